"""Context of one worker process: what the threads of a worker share."""

import importlib.util
import logging
import socket
import threading
import time

from redis import Redis

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.files.disk_space import DatabaseReserve
from app.infra.ids import new_id
from app.infra.logs.tracing import Tracing
from app.infra.storage import Storage
from app.workers.status_files import WorkerStatusFile
from worker import devices
from worker.checkpoint_store.remote_store import RemoteStore
from worker.checkpoint_store.uploader import CheckpointUploader
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.group_network import address_of
from worker.health import WorkerHealth
from worker.presence.held_leases import HeldLeases
from worker.presence.publisher import Publisher
from worker.process.launcher import Launcher
from worker.telemetry import TelemetrySampler

log = logging.getLogger(__name__)


class WorkerContext:
    """Parts of a worker that its supervisors use, none of which runs by itself: `WorkerService` starts and ends them.

    Every method may be called from any thread.
    """

    def __init__(self, settings: Settings, only_run: tuple[str, int] | None = None) -> None:
        """Create the parts; with `only_run`, the worker takes only that run, as of that lease epoch."""
        if settings.database_url is None or settings.redis_url is None:
            raise ValueError("no database or Redis URL: start `anneal up` first, or set both ANNEAL_…_URL variables")
        self.settings = settings
        self.only_run = only_run
        self.id = new_id("wrk")
        self.name = socket.gethostname()
        self.machine = devices.find_machine(settings)
        self.backends = ["ray"] if only_run is not None else _trainable_backends(settings)
        """Backends whose runs this worker can train."""
        self.group_address = None if settings.group_interface is None else address_of(settings.group_interface)
        """Address at which processes of other hosts reach those of this worker; None: it trains no run with others."""
        connections = self.machine.slots + 1
        self.engine = sync_engine(settings.database_url, pool_size=connections)
        """For the work on runs."""
        self.lease_engine = sync_engine(
            settings.database_url,
            pool_size=connections,
            name="anneal-lease",
            statement_seconds=max(settings.renew_seconds, 0.5),
        )
        """For renewals and heartbeats alone: they must not queue behind a large append or block with it."""
        self.redis: Redis = Redis.from_url(
            settings.redis_url,
            socket_connect_timeout=1,
            socket_timeout=1,
            decode_responses=True,
            encoding_errors="replace",  # of whatever others publish
        )
        self.storage = Storage(settings)
        self.working_copy: WorkingCopy | None = None
        """Copy of the object store on this machine, if `storage` is a URL."""
        self.uploader: CheckpointUploader | None = None
        """Sends the checkpoints of the working copy to the object store."""
        if settings.storage_url:
            remote = RemoteStore(settings.storage_url, self.storage)
            self.working_copy = WorkingCopy(
                remote, self.storage, self.engine, settings.cache_bytes, settings.disk_reserve_bytes
            )
            self.uploader = CheckpointUploader(remote, self.storage, self.engine)
        self.database_reserve = DatabaseReserve.for_home(settings.home, settings.database_url)
        """Room of the embedded database; None with an external one."""
        self.health = WorkerHealth(
            self.storage.root, is_shared=settings.storage_url is None, database_reserve=self.database_reserve
        )
        self.launcher = Launcher(settings)
        self.tracing = Tracing(settings.otlp_endpoint, "anneal-worker")
        self.telemetry = TelemetrySampler(self.id, self.machine.devices, self.engine)
        self.status_file = WorkerStatusFile(settings.home, self.id)
        self.leases = HeldLeases(self.status_file)
        self.publisher = Publisher(self.redis)
        self.closing = threading.Event()
        """No further run is taken; current runs finish."""
        self.draining = threading.Event()
        """Current runs save and are released now."""
        self.drained_at = float("inf")
        """Monotonic time at which `draining` was set."""

    @property
    def kind(self) -> str:
        """Kind of this machine's devices: `cuda` or `cpu`."""
        return self.machine.devices[0].kind

    def drain(self) -> None:
        """Take no more runs; current runs save and are released."""
        self.drained_at = min(self.drained_at, time.monotonic())
        self.draining.set()
        self.closing.set()


def _trainable_backends(settings: Settings) -> list[str]:
    can_train = importlib.util.find_spec("torch") is not None
    backends = [*(["celery"] if can_train else []), *(["fake"] if settings.fake_backend else [])]
    if not backends:
        log.error(
            "this worker takes no run: torch is not installed; "
            "run `pip install -c constraints.txt -e '.[worker]'` in the clone of Anneal"
        )
    return backends
