"""Context of one worker process: its identity, connections, heartbeat and the leases that its threads hold."""

import importlib.util
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import Connection, Row, select
from sqlalchemy.exc import SQLAlchemyError

from app.base_models import sources
from app.config import Settings
from app.infra.broker import CONTROL_CHANNEL, events_channel
from app.infra.db import is_away, sync_engine
from app.infra.errors import SetupError, TryLater
from app.infra.files.disk_space import DatabaseReserve
from app.infra.files.object_store import StoreUnavailable, WrongStore
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.infra.tracing import Tracing
from app.runs.state import parts
from app.tables import migrate
from app.tables.runs import Run
from app.workers import registry
from app.workers.status_files import WorkerStatusFile
from worker import devices
from worker.checkpoint_store.remote_store import RemoteStore
from worker.checkpoint_store.uploader import CheckpointUploader
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.group_network import address_of
from worker.health import WorkerHealth
from worker.presence import registration
from worker.process.launcher import Launcher
from worker.telemetry import TelemetrySampler

log = logging.getLogger(__name__)


_REDIS_PAUSE = 2.0

_DATABASE_PAUSE = 2.0

_WARM_UP_LOOK = 1.0

_MARK_SECONDS = 30.0
"""Time for which a worker that starts together with the API waits until that has marked the object store."""

_CHECKED_ROUNDS = 3
"""Heartbeats for which a check of this worker's health counts."""


class HeldLease(Protocol):
    """A lease as the context sees it: control messages of the API name its run and have it renewed at once."""

    run_id: str

    def renew_now(self) -> None:
        """Have the lease renewed now, from its own thread; returns at once."""


class WorkerContext:
    """State that the threads of a worker share: the supervisors of its runs, the heartbeat and the listeners.

    `worker.main` creates one per process, starts it before it takes runs, and closes it at the end. Every method may
    be called from any thread. `engine` is for the work on runs, `lease_engine` for renewals and heartbeats alone;
    both have a connection per slot and one more. `kind` is the kind of this machine's devices (`cuda` or `cpu`), and
    `backends` the backends whose runs this worker can train. A worker that was started for one run takes
    only that, as of the lease epoch for which it was started.
    """

    def __init__(self, settings: Settings, only_run: tuple[str, int] | None = None) -> None:
        if settings.database_url is None or settings.redis_url is None:
            raise ValueError("no database or Redis URL: start `anneal up` first, or set both ANNEAL_…_URL variables")
        self.settings = settings
        self.only_run = only_run
        self.id = new_id("wrk")
        self.name = socket.gethostname()
        self.storage = Storage(settings)
        self.database_reserve = DatabaseReserve.for_home(settings.home, settings.database_url)
        """Room of the embedded database; None with an external one."""
        self.health = WorkerHealth(
            self.storage.root, is_shared=settings.storage_url is None, database_reserve=self.database_reserve
        )
        self.machine = devices.find_machine(settings)
        self.kind = self.machine.devices[0].kind
        self.group_address = None if settings.group_interface is None else address_of(settings.group_interface)
        """Address at which processes of other hosts reach those of this worker; None: it trains no run with others."""
        self._healthy_at = -math.inf
        """Monotonic time of the last check that found no trouble."""
        self.take_parts: Callable[[Sequence[Row[Any]]], None] | None = None
        """Called with the parts of runs that this worker is to train, at each heartbeat."""
        self.launcher = Launcher(settings)
        self.tracing = Tracing(settings.otlp_endpoint, "anneal-worker")
        can_train = importlib.util.find_spec("torch") is not None
        self.backends = [*(["celery"] if can_train else []), *(["fake"] if settings.fake_backend else [])]
        if only_run is not None:
            self.backends = ["ray"]
        if not self.backends:
            log.error(
                "this worker takes no run: torch is not installed; "
                "run `pip install -c constraints.txt -e '.[worker]'` in the clone of Anneal"
            )
        self.engine = sync_engine(settings.database_url, pool_size=self.machine.slots + 1)
        # Renewals must not queue behind a large append or block with it, so they have their own connections with short
        # timeouts.
        self.lease_engine = sync_engine(
            settings.database_url,
            pool_size=self.machine.slots + 1,
            name="anneal-lease",
            statement_seconds=max(settings.renew_seconds, 0.5),
        )
        self.redis: Redis = Redis.from_url(
            settings.redis_url,
            socket_connect_timeout=1,
            socket_timeout=1,
            decode_responses=True,
            encoding_errors="replace",  # of whatever others publish
        )
        self.closing = threading.Event()
        """No further run is taken; current runs finish."""
        self.draining = threading.Event()
        """Current runs save and are released now."""
        self.drained_at = float("inf")
        """Monotonic time at which `draining` was set."""
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
        self.telemetry = TelemetrySampler(self.id, self.machine.devices, self.engine)
        self._status_file = WorkerStatusFile(settings.home, self.id)
        self._leases: dict[str, HeldLease] = {}
        self._to_publish: set[tuple[str, str]] = set()
        """Channels and messages."""
        self._wake_up = threading.Event()
        self._beat_now = threading.Event()
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name="heartbeat", daemon=True)
        self._ended = threading.Event()

    def start(self, database_seconds: float = math.inf) -> bool:
        """Clean up after a dead predecessor, register once the database is available, start heartbeat and listeners.

        Returns:
            False if the worker was asked to end meanwhile.

        Raises:
            SetupError: The database schema is older than this code, or the object store is another one than the API's.
            TryLater: The database could not be reached for `database_seconds`.
        """
        self._status_file.open()
        self.launcher.start()
        began = time.monotonic()
        while (trouble := self._try_register(time.monotonic() - began)) is not None:
            if time.monotonic() - began > database_seconds:
                raise TryLater(trouble)
            if self.closing.wait(_DATABASE_PAUSE):
                return False
        self._heartbeat.start()
        self.telemetry.start()
        if self.uploader:
            self.uploader.start()
        threads = (("control", self._listen_for_control), ("wake-ups", self._notify_loop), ("warm-up", self._note_warm))
        for name, work in threads:
            threading.Thread(target=work, name=name, daemon=True).start()
        log.info(
            "worker %s on %s: %d slot(s) of %s", self.id, self.name, self.machine.slots, self.machine.devices[0].name
        )
        return True

    def stop_claiming(self) -> None:
        """Take no more runs; current runs finish."""
        self.closing.set()
        self._status_file.update(draining=True)
        self._beat_now.set()

    def drain(self) -> None:
        """Take no more runs; current runs save and are released."""
        self.drained_at = min(self.drained_at, time.monotonic())
        self.draining.set()
        self.closing.set()
        self._beat_now.set()

    def close(self) -> None:
        """Mark the worker as offline and stop everything that still runs."""
        self._ended.set()
        self._wake_up.set()
        self._beat_now.set()
        self.telemetry.close()
        self.launcher.stop()
        if self.uploader:
            self.uploader.close()
        if self._heartbeat.is_alive():
            self._heartbeat.join(_DATABASE_PAUSE)  # a heartbeat in flight would mark the worker as online
        # If the database has fallen silent, a new connection gives up after 5 s, an open one only after 15 s.
        self.engine.dispose()
        try:
            with self.engine.begin() as connection:
                connection.execute(registry.mark_offline([self.id]))
        except SQLAlchemyError as error:
            log.warning("this worker could not be marked as offline, the missing heartbeat will show it: %s", error)
        self.engine.dispose()
        self.lease_engine.dispose()
        self._status_file.close()
        self.tracing.close()

    def hold_lease(self, lease: HeldLease) -> None:
        """Register a lease that control messages may concern."""
        self._leases[lease.run_id] = lease
        self._note_runs()

    def release_lease(self, lease: HeldLease) -> None:
        """Remove an ended lease; one on a later attempt of the same run stays."""
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]
        self._note_runs()

    def wake_streams(self, run_id: str) -> None:
        """Notify event streams of new events; without Redis they poll. Never waits."""
        self._publish_later(events_channel(run_id), "")

    def signal_control(self, name: str) -> None:
        """Have the leases on a run renewed at once by the workers that hold one, or a worker look for parts to train.

        `name` is the id of the run or of the worker. Without Redis, the next renewal or heartbeat does the same. Never
        waits.
        """
        self._publish_later(CONTROL_CHANNEL, name)

    def _publish_later(self, channel: str, message: str) -> None:
        self._to_publish.add((channel, message))
        self._wake_up.set()

    def _notify_loop(self) -> None:
        while not self._ended.is_set():
            self._wake_up.wait()
            self._wake_up.clear()
            # Popped one at a time: what other threads add meanwhile is handled in the next round.
            while self._to_publish:
                channel, message = self._to_publish.pop()
                try:
                    self.redis.publish(channel, message)
                except (RedisError, OSError) as error:
                    log.info("event streams and workers are not notified for now: %s", error)
                    self._ended.wait(_REDIS_PAUSE)

    def _try_register(self, waited: float) -> str | None:
        """Register this worker; return a sentence that says why not, if that may change by itself."""
        try:
            with self.engine.connect() as connection:
                if older := migrate.schema_error(migrate.current_revision(connection)):
                    raise SetupError(older)
            if self.working_copy is not None:
                self._check_storage(self.working_copy, waited)
            with self.engine.begin() as connection:
                registration.release_dead(connection, self.name)
                connection.execute(registry.delete_old(older_than_days=30))
                self._register_worker(connection)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            log.warning("the database cannot be reached, trying again: %s", error)
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            cause = f"the server is away, or ANNEAL_DATABASE_URL of {self.name} is wrong"
            return f"the database cannot be reached from {self.name} ({cause}): {why}"
        except WrongStore as error:
            log.warning("this worker waits for its storage: %s", error)
            return f"the storage {self.settings.storage_url} cannot be used: {error}"
        return None

    def _check_storage(self, copy: WorkingCopy, waited: float) -> None:
        """Check that the object store is the API's; if it does not answer now, each attempt checks it.

        Raises:
            SetupError: It is another one.
            WrongStore: It has no mark yet, and the API may be about to start.
        """
        try:
            copy.check_store()
        except WrongStore as error:
            if error.is_marked or waited > _MARK_SECONDS:
                raise SetupError(f"the storage {self.settings.storage_url} cannot be used: {error}.") from error
            raise
        except StoreUnavailable as error:
            log.warning("the storage %s cannot be checked now: %s", self.settings.storage_url, error)

    def _register_worker(self, connection: Connection) -> None:
        labels = self.settings.labels
        gguf = registration.has_gguf_converter(self.settings.gguf_converter)
        registration.register_worker(
            connection,
            self.id,
            self.name,
            self.machine,
            self.backends,
            labels,
            self.launcher,
            model_sources=sources.source_fingerprint(self.settings),
            gguf=gguf,
            group_address=self._open_address(),
        )

    def note_health(self, trouble: str | None) -> None:
        """Record a check of this worker: with trouble, or if the check is old, others claim none of its devices."""
        self._healthy_at = -math.inf if trouble else time.monotonic()

    def _open_address(self) -> str | None:
        """Return the address under which other workers may claim devices of this one."""
        is_healthy = time.monotonic() - self._healthy_at < _CHECKED_ROUNDS * self.settings.renew_seconds
        return self.group_address if is_healthy else None

    def _run_heartbeat(self) -> None:
        while True:
            self._beat_now.wait(self.settings.renew_seconds)
            self._beat_now.clear()
            if self._ended.is_set():
                return
            state = "draining" if self.closing.is_set() else "online"
            try:
                with self.lease_engine.begin() as connection:
                    address = self._open_address()
                    alive = registry.record_heartbeat(self.id, state, self.launcher.mode, self.launcher.reason, address)
                    if connection.execute(alive).one_or_none() is None:
                        self._register_worker(connection)
                    if self.closing.is_set():
                        self._note_progress(connection)
                    part_rows = connection.execute(parts.of_worker(self.id)).all() if self.group_address else ()
                if self.take_parts is not None and part_rows:
                    self.take_parts(part_rows)
            except SQLAlchemyError as error:
                log.info("heartbeat missed: %s", error)
            except Exception:  # without heartbeats the worker would count as lost
                log.exception("heartbeat failed")

    def _note_warm(self) -> None:
        """Record once that a launch would not wait for the zygote to load."""
        while not self._ended.is_set():
            if self.launcher.wait_ready(_WARM_UP_LOOK):
                self._status_file.update(warm=True)
                return

    def _note_runs(self) -> None:
        self._status_file.update(runs={run_id: [None, None] for run_id in list(self._leases)})

    def _note_progress(self, connection: Connection) -> None:
        """Record the progress of current runs for a caller that waits for them to finish."""
        steps = select(Run.id, Run.current_step, Run.total_steps).where(Run.id.in_(list(self._leases)))
        steps_of_runs = {row.id: [row.current_step, row.total_steps] for row in connection.execute(steps)}
        self._status_file.update(
            runs={run_id: steps_of_runs.get(run_id, [None, None]) for run_id in list(self._leases)}
        )

    def _listen_for_control(self) -> None:
        """Renew leases and look for parts on control messages, before the next regular renewal or heartbeat."""
        while not self._ended.is_set():
            try:
                with self.redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(CONTROL_CHANNEL)
                    while not self._ended.is_set():
                        message = pubsub.get_message(timeout=0.5)
                        name = message["data"] if message else None
                        if name == self.id:
                            self._beat_now.set()
                        elif name is not None and (lease := self._leases.get(name)):
                            lease.renew_now()
            except (RedisError, OSError) as error:
                log.info("control messages are unavailable, stop requests arrive with lease renewals: %s", error)
                self._ended.wait(_REDIS_PAUSE)
