"""Registration of a worker in the database."""

import importlib.util
import logging
import math
import os
import time
from importlib.metadata import entry_points, version

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.plugins import PLUGINS
from anneal.contracts.training_config.optimizers import OPTIMIZERS
from anneal.contracts.training_config.rules import INSTALL_GGUF_QUANTIZER
from app.base_models import sources
from app.config import Settings
from app.estimator.activations import LIGER_PACKAGE
from app.infra.db import is_away
from app.infra.errors import SetupError
from app.infra.files.object_store import StoreUnavailable, WrongStore
from app.infra.process.identity import ProcessIdentity
from app.runs.state import machine as state_machine
from app.runs.state import parts
from app.tables import migrate
from app.workers import registry
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.devices import Machine
from worker.process.launcher import Launcher

log = logging.getLogger(__name__)

_MARK_SECONDS = 30.0
"""Time for which a worker that starts together with the API waits until that has marked the object store."""

_CHECKED_ROUNDS = 3
"""Heartbeats for which a check of this worker's health counts."""


def pid_scope(identity: ProcessIdentity) -> str:
    """Return boot id and pid namespace, within which a process id is unique."""
    return f"{identity.boot_id}/{identity.namespace}"


def installed_plugins() -> dict[str, list[str]]:
    """Return the names of all installed plugins, by kind."""
    return {kind: sorted({point.name for point in entry_points(group=group)}) for kind, group in PLUGINS.items()}


def installed_packages() -> list[str]:
    """Return the installed ones of the packages that single optimizers need and that change the memory of runs."""
    known = {LIGER_PACKAGE, *(traits.package for traits in OPTIMIZERS.values() if traits.package is not None)}
    return sorted(package for package in known if importlib.util.find_spec(package.replace("-", "_")) is not None)


def find_gguf_programs(settings: Settings) -> dict[str, bool]:
    """Return which programs of llama.cpp this machine has; log a warning for one that is missing."""
    converter, quantizer = settings.gguf_converter, settings.gguf_quantizer
    if converter is None or quantizer is None:
        return {"gguf": False, "gguf_quantizer": False}
    converts, quantizes = converter.is_file(), quantizer.is_file() and os.access(quantizer, os.X_OK)
    if not converts:
        log.warning("ANNEAL_GGUF_CONVERTER names %s, which is no file: runs with `gguf` are refused", converter)
    elif not quantizes:
        log.warning(
            "%s is no program: of GGUF files, this worker writes only F32, F16, BF16 and Q8_0. To write all types, %s",
            quantizer,
            INSTALL_GGUF_QUANTIZER,
        )
    return {"gguf": converts, "gguf_quantizer": converts and quantizes}


def release_dead(connection: Connection, host: str) -> None:
    """Reap at once the runs of dead workers of this machine."""
    here = ProcessIdentity.of_this_process()
    dead = [
        row.id
        for row in connection.execute(registry.on_host(host))
        if row.boot_id == pid_scope(here) and not ProcessIdentity.of_process(row.pid, row.process_started).exists
    ]
    if dead:
        connection.execute(parts.reap_dead(dead))
        moved = connection.execute(state_machine.reap_dead(dead)).mappings().all()
        connection.execute(registry.mark_offline(dead))
        log.warning("%d dead worker(s) of this machine found, %d run(s) reaped", len(dead), len(moved))


class Registration:
    """This worker in the database: its row, which heartbeats keep, and those of its devices."""

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        host: str,
        machine: Machine,
        backends: list[str],
        launcher: Launcher,
        group_address: str | None,
    ) -> None:
        self.worker_id = worker_id
        self.group_address = group_address
        """Address at which processes of other hosts reach those of this worker; None: it trains no run with others."""
        self._settings = settings
        self._host = host
        self._machine = machine
        self._backends = backends
        self._launcher = launcher
        self._healthy_at = -math.inf
        """Monotonic time of the last check that found no trouble."""

    def note_health(self, trouble: str | None) -> None:
        """Record a check of this worker: with trouble, or if the check is old, others claim none of its devices."""
        self._healthy_at = -math.inf if trouble else time.monotonic()

    def open_address(self) -> str | None:
        """Return the address under which other workers may claim devices of this one."""
        is_healthy = time.monotonic() - self._healthy_at < _CHECKED_ROUNDS * self._settings.renew_seconds
        return self.group_address if is_healthy else None

    def try_register(self, engine: Engine, copy: WorkingCopy | None, waited_seconds: float) -> str | None:
        """Register this worker; return a sentence that says why not, if that may change by itself.

        Raises:
            SetupError: The database schema is older than this code, or the object store is another one than the API's.
        """
        try:
            with engine.connect() as connection:
                if older := migrate.schema_error(migrate.current_revision(connection)):
                    raise SetupError(older)
            if copy is not None:
                self._check_storage(copy, waited_seconds)
            with engine.begin() as connection:
                release_dead(connection, self._host)
                connection.execute(registry.delete_old(older_than_days=30))
                self.register(connection)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            log.warning("the database cannot be reached, trying again: %s", error)
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            cause = f"the server is away, or ANNEAL_DATABASE_URL of {self._host} is wrong"
            return f"the database cannot be reached from {self._host} ({cause}): {why}"
        except WrongStore as error:
            log.warning("this worker waits for its storage: %s", error)
            return f"the storage {self._settings.storage_url} cannot be used: {error}"
        return None

    def _check_storage(self, copy: WorkingCopy, waited_seconds: float) -> None:
        """Check that the object store is the API's; if it does not answer now, each attempt checks it.

        Raises:
            SetupError: It is another one.
            WrongStore: It has no mark yet, and the API may be about to start.
        """
        url = self._settings.storage_url
        try:
            copy.check_store()
        except WrongStore as error:
            if error.is_marked or waited_seconds > _MARK_SECONDS:
                raise SetupError(f"the storage {url} cannot be used: {error}.") from error
            raise
        except StoreUnavailable as error:
            log.warning("the storage %s cannot be checked now: %s", url, error)

    def record_heartbeat(self, connection: Connection, *, is_draining: bool) -> None:
        """Record that this worker is alive; register it again if its row was deleted."""
        state, launcher = "draining" if is_draining else "online", self._launcher
        alive = registry.record_heartbeat(self.worker_id, state, launcher.mode, launcher.reason, self.open_address())
        if connection.execute(alive).one_or_none() is None:
            self.register(connection)

    def register(self, connection: Connection) -> None:
        """Write this worker and its devices into the database."""
        me = ProcessIdentity.of_this_process()
        worker = {
            "id": self.worker_id,
            "host": self._host,
            "pid": me.pid,
            "boot_id": pid_scope(me),
            "process_started": me.start_time,
            "version": version("anneal"),
            "slots": self._machine.slots,
            "backends": self._backends,
            "labels": list(self._settings.labels),
            "launch_mode": self._launcher.mode,
            "launch_reason": self._launcher.reason,
            "plugins": installed_plugins(),
            "packages": installed_packages(),
            **find_gguf_programs(self._settings),
            "model_sources": sources.source_fingerprint(self._settings),
            "group_address": self.open_address(),
        }
        connection.execute(registry.register_worker(worker))
        devices = [
            {
                "worker_id": self.worker_id,
                "index": device.index,
                "uid": device.id,
                "kind": device.kind,
                "name": device.name,
                "memory_mb": device.memory_bytes // 2**20,
            }
            for device in self._machine.devices
        ]
        connection.execute(registry.register_devices(devices))
