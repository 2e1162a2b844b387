"""Worker for one run, started with `python -m worker.single_run <run> <lease epoch>` on a node of a cluster.

It takes no hints: it claims its run and ends with the attempt, also when it has released the run.
"""

import logging
import os
import sys
import threading
import time

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app.config import Settings, get_settings
from app.infra.clock import since_boot
from app.infra.db import is_away
from app.infra.errors import EXIT_TRY_LATER, SetupError, TryLater
from app.infra.logs import log_setup
from app.infra.server_urls import resolve_urls
from app.runs.queue.fit import DeviceOffer, Fleet, Needs, WorkerOffer, pending_reason
from app.tables.runs import Run
from worker.attempts import device_checks, supervisor
from worker.context import WorkerContext
from worker.presence import registration
from worker.service import WorkerService
from worker.signals import SignalHandler

log = logging.getLogger(__name__)

_DATABASE_SECONDS = 60.0
_CLAIM_SECONDS = 60.0
_UNCLAIMED_SECONDS = 600.0
"""Most time without a claim, whatever hangs: the storage, the check of a GPU, or a call to the database."""
_PAUSE = 1.0


def main() -> int:
    """Train the run; return 0 if it was claimed, waits no more, or the worker was to end.

    Otherwise a last line says why it was not claimed. The code is 75 if that may end without a change, and 1 if not.
    """
    run_id, lease_epoch = sys.argv[1], int(sys.argv[2])
    signals = SignalHandler()
    hangs = threading.Timer(_UNCLAIMED_SECONDS, _give_up)
    hangs.daemon = True
    hangs.start()
    try:
        settings = get_settings()
        log_setup.set_up(settings.log_format)
        run(resolve_urls(settings), signals, run_id, lease_epoch, hangs)
    except ValidationError as error:  # its own text shows values, such as passwords
        problems = " ".join(f"ANNEAL_{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}." for one in error.errors())
        print(f"anneal: {problems}", file=sys.stderr)  # noqa: T201
        return 1
    except SetupError as error:
        print(f"anneal: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_TRY_LATER if isinstance(error, TryLater) else 1
    finally:
        signals.ignore_signals()
    return 0


def run(settings: Settings, signals: SignalHandler, run_id: str, lease_epoch: int, hangs: threading.Timer) -> None:
    """Claim the run and train it, or release it if `signals` end the worker; raise `SetupError` if it cannot.

    `hangs` is cancelled by the claim.
    """
    context = WorkerContext(settings, only_run=(run_id, lease_epoch))
    service = WorkerService(context)
    signals.start(service)
    context.launcher.adopt_orphans()
    try:
        if service.start(_DATABASE_SECONDS):
            _claim_and_train(context, run_id, lease_epoch, hangs)
    finally:
        hangs.cancel()
        service.close()


def _give_up() -> None:
    """End the process at once: its threads hang, and its child processes die with it."""
    waited = f"no claim within {_UNCLAIMED_SECONDS / 60:.0f} minutes"
    print(f"anneal: {waited}: a check of the storage or of a GPU hangs here", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_TRY_LATER)


def _claim_and_train(context: WorkerContext, run_id: str, lease_epoch: int, hangs: threading.Timer) -> None:
    device_checks.wait_for_devices(context)
    if trouble := context.health.unhealthy_reason():
        raise SetupError(trouble)
    deadline = time.monotonic() + _CLAIM_SECONDS
    while not context.closing.is_set():
        sent = since_boot()
        claimed = supervisor.claim(context)
        if claimed is not None:
            hangs.cancel()
            supervisor.supervise_run(context, claimed, sent)
            return
        try:
            waiting = _needs_if_waiting(context, run_id, lease_epoch)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            trouble = "the database is unavailable"
        else:
            if waiting is None:
                log.info("%s: it needs this worker no more", run_id)
                return
            if (reason := pending_reason(waiting, Fleet([_worker_offer(context)]))) is not None:
                raise SetupError(reason.message)
            trouble = "a quota, a pause of the queue or an error of the devices prevents it"
        if time.monotonic() > deadline:
            raise TryLater(f"no claim within {_CLAIM_SECONDS:.0f} s: {trouble}")
        context.closing.wait(_PAUSE)


def _needs_if_waiting(context: WorkerContext, run_id: str, lease_epoch: int) -> Needs | None:
    """Return what the run needs if it still waits for this worker."""
    query = select(Run.backend, Run.devices_needed, Run.hosts_needed, Run.requirements)
    with context.engine.begin() as connection:
        row = connection.execute(
            query.where(Run.id == run_id, Run.lease_epoch == lease_epoch, Run.status == "pending")
        ).one_or_none()
    return None if row is None else Needs.of(row.backend, row.devices_needed, row.hosts_needed, row.requirements)


def _worker_offer(context: WorkerContext) -> WorkerOffer:
    """Return what this worker has, in the terms of the queue."""
    devices = context.machine.devices
    programs = registration.find_gguf_programs(context.settings)
    return WorkerOffer(
        context.id,
        frozenset(context.backends),
        context.kind,
        devices[0].name,
        tuple(DeviceOffer(device.memory_bytes // 2**20) for device in devices),
        frozenset(context.settings.labels),
        context.name,
        programs["gguf"],
        programs["gguf_quantizer"],
    )


if __name__ == "__main__":
    sys.exit(main())
