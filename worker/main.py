"""Celery worker, started with `python -m worker.main`: one thread per slot, each the supervisor of one run."""

import logging
import sys
import threading
import warnings

from app.config import Settings, get_settings
from app.infra.broker import QUEUE, celery_app
from app.infra.errors import SetupError
from app.infra.logs import log_setup
from app.infra.server_urls import resolve_urls
from worker import celery_worker
from worker.attempts.device_checks import check_devices_repeatedly
from worker.attempts.part import PartSupervisors
from worker.celery_worker import CeleryProgram, HintConsumer, SlotPool
from worker.context import WorkerContext
from worker.service import WorkerService
from worker.signals import SignalHandler

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or SIGINT; then trainers save, runs are released, and 0 is returned."""
    signals = SignalHandler()
    try:
        settings = get_settings()
        log_setup.set_up(settings.log_format)
        return run(resolve_urls(settings), signals)
    except SetupError as error:
        print(f"anneal: {error}", file=sys.stderr)  # noqa: T201
        return 1


def run(settings: Settings, signals: SignalHandler) -> int:
    """Run a worker until `signals` end it."""
    context = WorkerContext(settings)
    parts = PartSupervisors(context)
    service = WorkerService(context, take_parts=parts.start_new_parts)
    app = celery_app(settings.redis_url or "")
    celery_worker.register_task(app, context)
    # Celery's warning about root concerns pickled messages; the messages here are JSON without arguments.
    warnings.filterwarnings("ignore", message=".*superuser privileges")
    signals.start(service)
    context.launcher.adopt_orphans()
    try:
        if not service.start():
            return 0
        if context.group_address is not None:
            arguments = (context, service.registration.note_health)
            threading.Thread(target=check_devices_repeatedly, args=arguments, name="health", daemon=True).start()
        program = CeleryProgram(
            signals,
            app=app,
            quiet=True,
            pool=SlotPool,
            consumer_cls=HintConsumer,
            concurrency=context.machine.slots,
            queues=[QUEUE],
            hostname=f"{context.id}@{context.name}",
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        program.start()
        parts.wait()
        return program.exitcode or 0
    finally:
        service.close()


if __name__ == "__main__":
    sys.exit(main())
