"""Registration of a worker in the database."""

import importlib.util
import logging
from importlib.metadata import entry_points, version
from pathlib import Path

from sqlalchemy import Connection

from anneal.contracts.plugins import PLUGINS
from anneal.contracts.training_config.optimizers import OPTIMIZERS
from app.estimator.activations import LIGER_PACKAGE
from app.infra.process.identity import ProcessIdentity
from app.runs.state import machine as state_machine
from app.runs.state import parts
from app.workers import registry
from worker.devices import Machine
from worker.process.launcher import Launcher

log = logging.getLogger(__name__)


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


def has_gguf_converter(converter: Path | None) -> bool:
    """Return True if the converter that the operator names exists; log a warning if it does not."""
    if converter is not None and not converter.is_file():
        log.warning("ANNEAL_GGUF_CONVERTER names %s, which is no file: runs with `gguf` are refused", converter)
    return converter is not None and converter.is_file()


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


def register_worker(
    connection: Connection,
    worker_id: str,
    host: str,
    machine: Machine,
    backends: list[str],
    labels: tuple[str, ...],
    launcher: Launcher,
    *,
    gguf: bool,
    group_address: str | None,
    model_sources: str | None,
) -> None:
    """Write this worker and its devices into the database."""
    me = ProcessIdentity.of_this_process()
    connection.execute(
        registry.register_worker(
            {
                "id": worker_id,
                "host": host,
                "pid": me.pid,
                "boot_id": pid_scope(me),
                "process_started": me.start_time,
                "version": version("anneal"),
                "slots": machine.slots,
                "backends": backends,
                "labels": list(labels),
                "launch_mode": launcher.mode,
                "launch_reason": launcher.reason,
                "plugins": installed_plugins(),
                "packages": installed_packages(),
                "gguf": gguf,
                "model_sources": model_sources,
                "group_address": group_address,
            }
        )
    )
    connection.execute(
        registry.register_devices(
            [
                {
                    "worker_id": worker_id,
                    "index": device.index,
                    "uid": device.id,
                    "kind": device.kind,
                    "name": device.name,
                    "memory_mb": device.memory_bytes // 2**20,
                }
                for device in machine.devices
            ]
        )
    )
