"""Celery worker, started with `python -m worker.main`: one thread per slot, each the supervisor of one run."""

import logging
import os
import sys
import warnings
from typing import Any

from celery.apps.worker import Worker
from celery.concurrency.thread import TaskPool

from app import process_logs
from app.config import Settings, get_settings
from app.embedded import resolve_urls
from app.home import HomeError
from app.queue import QUEUE, celery_app
from worker import tasks
from worker.host import Host
from worker.orders import Orders

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or SIGINT; then trainers save, runs are released, and 0 is returned."""
    orders = Orders()
    try:
        settings = get_settings()
        process_logs.set_up(settings.log_format)
        return run(resolve_urls(settings), orders)
    except HomeError as error:
        print(f"anneal: {error}", file=sys.stderr)  # noqa: T201
        return 1


def run(settings: Settings, orders: Orders) -> int:
    """Run a worker until `orders` end it."""
    host = Host(settings)
    app = celery_app(settings.redis_url or "")
    tasks.register(app, host)
    # Celery's warning about root concerns pickled messages; the messages here are JSON without arguments.
    warnings.filterwarnings("ignore", message=".*superuser privileges")
    orders.obey(host)
    try:
        if not host.start():
            return 0
        program = Program(
            orders,
            app=app,
            quiet=True,
            pool=Slots,
            concurrency=host.machine.slots,
            queues=[QUEUE],
            hostname=f"{host.id}@{host.name}",
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        program.start()
        return program.exitcode or 0
    finally:
        host.close()


class Program(Worker):  # type: ignore[misc]  # Celery has no types
    """Celery worker with this project's signal handling and logging."""

    def __init__(self, orders: Orders, **options: Any) -> None:
        self._orders = orders
        super().__init__(**options)

    def setup_logging(self, colorize: bool | None = None) -> bool:
        """Skip Celery's logging setup, which would keep messages about claimed and released runs out of the log."""
        return True

    def install_platform_tweaks(self, _worker: Worker) -> None:
        """Skip Celery's signal handlers.

        Its second SIGINT would cancel tasks, and its SIGHUP replace the process without ending them.
        """

    def register_with_event_loop(self, hub: Any) -> None:
        """Wake the event loop for a request to end, which it would otherwise check only every few seconds."""
        super().register_with_event_loop(hub)
        hub.add_reader(self._orders.ending, lambda: None)
        hub.add_reader(self.pool.freed, self.pool.look)


class Slots(TaskPool):  # type: ignore[misc]  # Celery has no types
    """Celery's thread pool, which signals when one of its threads becomes free.

    A full worker takes no hints, and its event loop would ask for the next one only when it wakes up for another
    reason, up to a second later.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(*args, **options)

    def on_apply(self, *args: Any, **options: Any) -> Any:
        """Start a task; wake the event loop after the task has ended and no longer counts."""
        result = super().on_apply(*args, **options)
        result.f.add_done_callback(lambda _: os.eventfd_write(self.freed, 1))
        return result

    def look(self) -> None:
        """Clear the wake-up; the event loop itself asks for hints before each wait."""
        os.eventfd_read(self.freed)


if __name__ == "__main__":
    sys.exit(main())
