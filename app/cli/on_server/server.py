"""Commands that run on the server: `up`, `api`, `worker`, `migrate` and `prune`."""

import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, print_json, print_note
from app.cli.errors import environment_settings, plain_errors, settings_with_urls
from app.infra.errors import SetupError

if TYPE_CHECKING:
    from app.config import Settings


def up() -> None:
    """Run everything on this machine: PostgreSQL, Valkey, the API and a worker.

    Example: `ANNEAL_PORT=8800 anneal up`. If ANNEAL_DATABASE_URL or ANNEAL_REDIS_URL is set, that server is used
    instead of an embedded one.
    """
    from app.infra.files.unfinished_restore import refuse_unfinished_restore
    from app.standalone.supervisor import Up

    with plain_errors():
        settings = environment_settings()
        refuse_unfinished_restore(settings)
        _check_storage(settings)
        raise typer.Exit(Up(settings, typer.echo, sys.stdout.isatty()).run())


def api(
    port: Annotated[
        int | None, typer.Option(help="Port to listen on, overriding ANNEAL_PORT; 0 selects any free port.")
    ] = None,
    fd: Annotated[int | None, typer.Option(help="Serve on this inherited listening socket.", hidden=True)] = None,
) -> None:
    """Run only the API, with the servers of a running `anneal up` or with your own.

    Example: `ANNEAL_DATABASE_URL=postgresql://… ANNEAL_REDIS_URL=redis://… anneal api --port 8800`
    """
    from app.infra.files.unfinished_restore import refuse_unfinished_restore
    from app.server import base_url, open_listener, serve_api

    with plain_errors():
        settings = settings_with_urls()
        refuse_unfinished_restore(settings)
        _check_storage(settings)
        if port is not None:
            settings = settings.model_copy(update={"port": port})
        with socket.socket(fileno=fd) if fd is not None else open_listener(settings) as listener:
            typer.echo(f"API on {base_url(listener)}")
            serve_api(settings, listener)


def worker(
    workers: Annotated[
        list[str] | None, typer.Argument(help="With --drain: ids or process ids of workers of this machine.")
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Make workers of this machine and home exit once their runs are done.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="With --drain: seconds after which runs are saved and released.")
    ] = None,
) -> None:
    """Run only a worker, with one run at a time on each of its devices (ANNEAL_SLOTS).

    Beside `anneal up` on the same machine it needs no settings, as it uses the servers of ANNEAL_HOME.

    Example: `ANNEAL_DATABASE_URL=postgresql://… ANNEAL_REDIS_URL=redis://… anneal worker`

    With --drain, running workers accept no new runs, finish their current runs, and exit: those that are named, or all
    but the one of `anneal up`. The command shows the remaining runs and returns when the workers have exited. Ctrl-C
    stops the command, not the draining.
    Example: `anneal worker --drain --timeout 3600`
    """
    from app.infra.files.unfinished_restore import refuse_unfinished_restore

    with plain_errors():
        if drain:
            from app.standalone.drain import drain_workers as drain_workers

            raise typer.Exit(drain_workers(environment_settings(), timeout, names=workers or ()))
        if workers:
            raise SetupError("A worker is named only with --drain; a new one gets its id from the service.")
        if timeout is not None:
            raise SetupError(
                "--timeout requires --drain: it is the time after which the remaining runs are saved and released."
            )
        refuse_unfinished_restore(settings_with_urls())  # reports a missing URL as a readable error
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker.main"])


def migrate(as_json: AsJson = False) -> None:
    """Migrate the database to the schema of this version; safe at any time, from any number of machines.

    Example: `ANNEAL_DATABASE_URL=postgresql://… anneal migrate`
    """
    from app.infra.server_urls import resolve_urls
    from app.tables.migrate import needed_revision, upgrade_schema

    with plain_errors():
        settings = environment_settings()
        before, after = upgrade_schema(settings if settings.database_url else resolve_urls(settings), print_note)
    if as_json:
        print_json({"before": before or None, "after": after})
    elif before > needed_revision():
        typer.echo(
            f"At revision {after}, created by a later version; this version (revision {needed_revision()}) works "
            "with it."
        )
    else:
        typer.echo(f"Already at revision {after}." if before == after else f"From {before or 'nothing'} to {after}.")


def prune(
    events_days: Annotated[
        float | None,
        typer.Option(min=0, max=36_500, help="Delete events of runs that ended more than this many days ago."),
    ] = None,
    checkpoints_days: Annotated[
        float | None,
        typer.Option(min=0, max=36_500, help="Delete checkpoints of such runs, except the latest and the best."),
    ] = None,
    runs_days: Annotated[
        float | None, typer.Option(min=0, max=36_500, help="Delete such runs with all their data.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete old events, checkpoints and runs; options that are not given default to ANNEAL_KEEP_…_DAYS.

    A run or checkpoint is kept if it is pinned, if an unfinished run needs it, or if a later run resumes from it or
    builds on it. Events are deleted by month, once all runs of the month are old enough; events of pinned runs stay.

    Example: `anneal prune --events-days 90 --checkpoints-days 30 --dry-run`
    """
    from app.infra.files.unfinished_restore import refuse_unfinished_restore
    from app.runs.retention import Policy
    from app.runs.retention import run_prune as prune_now

    with plain_errors():
        settings = settings_with_urls()
        refuse_unfinished_restore(settings)
        policy = Policy(events_days, checkpoints_days, runs_days).or_else(Policy.from_settings(settings))
        if policy == Policy():
            raise SetupError(
                "No retention is set: pass --events-days, --checkpoints-days or --runs-days, or set ANNEAL_KEEP_…_DAYS."
            )
        result = prune_now(settings, policy, dry_run)
        if result.is_busy:
            raise SetupError("Another process is pruning; try again when it has finished.")
        if as_json:
            counts = ("runs", "checkpoints", "checkpoint_bytes", "months")
            print_json({"dry_run": dry_run, **{name: getattr(result, name) for name in counts}})
        else:
            typer.echo(result.as_sentence(dry_run))


def _check_storage(settings: "Settings") -> None:
    """Raise `SetupError` if a URL needs a library that is not installed; the processes would fail one by one."""
    from app.infra.files.object_store import ObjectStore

    if settings.storage_url is not None:
        ObjectStore(settings.storage_url, "ANNEAL_STORAGE")
