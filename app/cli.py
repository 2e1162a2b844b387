"""Command line: servers, keys and the demo; commands that use HTTP are in `app.commands` and are loaded on use."""

import importlib
import os
import socket
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from app.audit.commands import audit
from app.commands.console import AsJson, document, note
from app.home import HomeError
from app.plain_errors import given_settings, plain_errors, settings_with_urls
from app.secrets.commands import secrets

NOUNS = ("actions", "datasets", "experiments", "runs", "workers")
"""Commands that use HTTP: each is a module of `app.commands` and is imported only when it runs."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *NOUNS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in NOUNS:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_group(importlib.import_module(f"app.commands.{cmd_name}").commands)
        command.name = cmd_name
        return command


cli = typer.Typer(
    cls=_Commands,
    help="Fine-tune language models on your own machines. Start with `anneal up`.",
    epilog="Exit codes: 0 success, 1 error, 2 invalid usage. Commands that follow a run to its end: 0 completed, "
    "3 failed, 4 cancelled. Set ANNEAL_URL and ANNEAL_API_KEY to use a service on another machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys = typer.Typer(help="Manage API keys. Example: `anneal keys create laptop --scope write`.", no_args_is_help=True)
cli.add_typer(keys, name="keys")
cli.add_typer(secrets, name="secrets")
cli.command()(audit)


@cli.command()
def up() -> None:
    """Run everything on this machine: PostgreSQL, Valkey, the API and a worker.

    Example: `ANNEAL_PORT=8800 anneal up`. If ANNEAL_DATABASE_URL or ANNEAL_REDIS_URL is set, that server is used
    instead of an embedded one.
    """
    from app.up import Up

    with plain_errors():
        raise typer.Exit(Up(given_settings(), typer.echo).run())


@cli.command()
def api(
    port: Annotated[
        int | None, typer.Option(help="Port to listen on, overriding ANNEAL_PORT; 0 selects any free port.")
    ] = None,
    fd: Annotated[int | None, typer.Option(help="Serve on this inherited listening socket.", hidden=True)] = None,
) -> None:
    """Run only the API, with the servers of a running `anneal up` or with your own.

    Example: `ANNEAL_DATABASE_URL=postgresql://… ANNEAL_REDIS_URL=redis://… anneal api --port 8800`
    """
    from app.serve import base_url, listen, serve

    with plain_errors():
        settings = settings_with_urls()
        if port is not None:
            settings = settings.model_copy(update={"port": port})
        with socket.socket(fileno=fd) if fd is not None else listen(settings) as listener:
            typer.echo(f"API on {base_url(listener)}")
            serve(settings, listener)


@cli.command()
def worker(
    drain: Annotated[
        bool, typer.Option("--drain", help="Make the workers of this machine and home exit once their runs are done.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="With --drain: seconds after which runs are saved and released.")
    ] = None,
) -> None:
    """Run only a worker, with one run at a time per GPU (ANNEAL_SLOTS sets another number).

    Example: `ANNEAL_DATABASE_URL=postgresql://… ANNEAL_REDIS_URL=redis://… anneal worker`

    With --drain, running workers accept no new runs, finish their current runs, and exit. The command shows the
    remaining runs and returns when the workers have exited. Ctrl-C stops the command, not the draining.
    Example: `anneal worker --drain --timeout 3600`
    """
    with plain_errors():
        if drain:
            from app.workers.drain import drain as drain_workers

            raise typer.Exit(drain_workers(given_settings(), timeout))
        if timeout is not None:
            raise HomeError(
                "--timeout requires --drain: it is the time after which the remaining runs are saved and released."
            )
        settings_with_urls()  # reports a missing URL as a readable error
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker.main"])


@cli.command()
def migrate(as_json: AsJson = False) -> None:
    """Migrate the database to the schema of this version; safe at any time, from any number of machines.

    Example: `ANNEAL_DATABASE_URL=postgresql://… anneal migrate`
    """
    from app.embedded import resolve_urls
    from app.migrate import head, upgrade

    with plain_errors():
        settings = given_settings()
        before, after = upgrade(settings if settings.database_url else resolve_urls(settings), note)
    if as_json:
        document({"before": before or None, "after": after})
    elif before > head():
        typer.echo(f"At revision {after}, created by a later version; this version (revision {head()}) works with it.")
    else:
        typer.echo(f"Already at revision {after}." if before == after else f"From {before or 'nothing'} to {after}.")


@cli.command()
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
    from app.runs.pruning import Policy
    from app.runs.pruning import prune as prune_now

    with plain_errors():
        settings = settings_with_urls()
        policy = Policy(events_days, checkpoints_days, runs_days).or_else(Policy.of(settings))
        if policy == Policy():
            raise HomeError(
                "No retention is set: pass --events-days, --checkpoints-days or --runs-days, or set ANNEAL_KEEP_…_DAYS."
            )
        found = prune_now(settings, policy, dry_run)
        if found.is_busy:
            raise HomeError("Another process is pruning; try again when it has finished.")
        if as_json:
            shown = ("runs", "checkpoints", "checkpoint_bytes", "months")
            document({"dry_run": dry_run, **{name: getattr(found, name) for name in shown}})
        else:
            typer.echo(found.told(dry_run))


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name to identify the key by.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="Scope: read, write or admin; repeat for several. [default: read write]")
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(min=0.001, max=36_500, help="Days until the key expires. Unset: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it cannot be shown again.

    Example: `anneal keys create laptop --scope read --scope write --expires-days 90`
    """
    from app.auth import SCOPES, create_key_sync, list_keys_sync

    with plain_errors():
        if unknown := set(scope or []) - set(SCOPES):
            raise HomeError(f"Unknown scope {', '.join(sorted(unknown))}; the scopes are {', '.join(SCOPES)}.")
        lasts = None if expires_days is None else timedelta(days=expires_days)
        settings = settings_with_urls()
        key = create_key_sync(settings, name, scope or ["read", "write"], lasts)
        if as_json:
            view = next(one for one in list_keys_sync(settings) if key.startswith(one.prefix))
            document({"id": view.id, "name": view.name, "scopes": view.scopes, "key": key})
        else:
            typer.echo(key)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List all keys with id, prefix, scopes and state.

    Example: `anneal keys list`
    """
    from app.auth import KeyView, list_keys_sync
    from app.wire import Page

    with plain_errors():
        found = list_keys_sync(settings_with_urls())
        if as_json:
            document(Page[KeyView](data=found, has_more=False))
            return
        for key in found:
            if key.revoked_at:
                state = f"revoked {key.revoked_at:%Y-%m-%d}"
            elif key.expires_at:
                state = f"expires {key.expires_at:%Y-%m-%d}"
            else:
                state = f"last used {key.last_used_at:%Y-%m-%d}" if key.last_used_at else "never used"
            typer.echo(f"{key.id}  {key.prefix}…  {','.join(key.scopes):<16}  {state:<20}  {key.name}")


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key, from `anneal keys list`.")], as_json: AsJson = False
) -> None:
    """Revoke a key: within 30 seconds it is rejected.

    Example: `anneal keys revoke key_01k…`
    """
    from app.auth import revoke_key_sync

    with plain_errors():
        if not revoke_key_sync(settings_with_urls(), key_id):
            raise HomeError(f"There is no key {key_id}; `anneal keys list` shows all keys.")
    if as_json:
        document({"id": key_id, "revoked": True})
    else:
        typer.echo(f"{key_id} is revoked.")


@cli.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Model of the Hugging Face Hub to fine-tune. Unset: a small model trained on this machine."),
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the service running and keep its data.")] = False,
) -> None:
    """Fine-tune a model through the API, from a dataset to an adapter, and show the progress.

    Example: `anneal demo --model Qwen/Qwen3-0.6B`
    """
    with plain_errors():
        raise typer.Exit(importlib.import_module("app.demo.run").main(model, keep))


def main() -> None:
    """Entry point of the `anneal` command."""
    cli()


if __name__ == "__main__":
    main()
