"""`python -m worker.main`: a Celery worker, one thread per slot, each the supervisor of one run."""

import logging
import sys
import warnings

from celery import signals

from app.config import get_settings
from app.embedded import resolve_urls
from app.queue import QUEUE, celery_app
from worker import tasks
from worker.host import Host

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or SIGINT; then trainers save, runs are handed back, and 0 is returned."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = resolve_urls(get_settings())
    host = Host(settings)
    app = celery_app(settings.redis_url or "")
    tasks.register(app, host)

    @signals.worker_shutting_down.connect(weak=False)  # type: ignore[untyped-decorator]
    def drain(**_: object) -> None:
        log.info("shutting down: trainers save, runs are handed back")
        host.drain()

    # Celery's warning about root concerns pickled messages; ours are JSON without arguments.
    warnings.filterwarnings("ignore", message=".*superuser privileges")
    try:
        host.start()
        app.worker_main(
            [
                "--quiet",
                "worker",
                "--pool=threads",
                f"--concurrency={host.machine.slots}",
                f"--queues={QUEUE}",
                f"--hostname={host.id}@%h",
                "--loglevel=WARNING",
                "--without-gossip",
                "--without-mingle",
                "--without-heartbeat",
            ]
        )
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        host.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
