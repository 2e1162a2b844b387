"""Command line: servers, keys and the demo; commands that use HTTP are in `app.cli` and are loaded on use."""

import difflib
import importlib
import io
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.console import CommandGroup, use_ca_file, use_json_errors
from app.cli.errors import plain_errors
from app.cli.on_server.audit import audit
from app.cli.on_server.data import backup, export, restore, storage
from app.cli.on_server.imports import imports
from app.cli.on_server.keys import keys
from app.cli.on_server.secrets import secrets
from app.cli.on_server.server import api, migrate, prune, up, worker
from app.cli.service import down, open_dashboard, status

NOUNS = {
    "actions": "app.cli.actions",
    "datasets": "app.cli.datasets",
    "experiments": "app.cli.experiments",
    "models": "app.cli.models",
    "queue": "app.cli.queue",
    "runs": "app.cli.runs.commands",
    "webhooks": "app.cli.webhooks",
    "workers": "app.cli.workers",
}
"""Groups of commands that call the HTTP API, with their modules, which are imported only when a command needs them."""


VERBS = {
    "chat": "app.cli.chat:commands",
    "eval": "app.cli.runs.evaluate:evaluation",
    "predict": "app.cli.runs.evaluate:prediction",
    "usage": "app.cli.usage:commands",
}
"""Single commands that call the HTTP API, as `module:application`, imported in the same way."""

_DELETING = {"prune", "delete"}
"""Commands that are never suggested for another word, because they delete."""


class _Commands(CommandGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *VERBS, *NOUNS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any
        if cmd_name in NOUNS:
            command = typer.main.get_group(importlib.import_module(NOUNS[cmd_name]).commands)
        elif cmd_name in VERBS:
            command = typer.main.get_command(pkgutil.resolve_name(VERBS[cmd_name]))
        else:
            return super().get_command(ctx, cmd_name)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = [name for name in self.list_commands(ctx) if name not in _DELETING]
            near = difflib.get_close_matches(args[0], known) or [
                f"{noun} {args[0]}"
                for noun in NOUNS
                if args[0] not in _DELETING and args[0] in self.get_command(ctx, noun).commands
            ]
            hint = f"perhaps {', '.join(f'`anneal {name}`' for name in near)}; " if near else ""
            ctx.fail(f"There is no command {args[0]!r}; {hint}`anneal --help` lists all.")
        return super().resolve_command(ctx, args)


cli = typer.Typer(
    cls=_Commands,
    help="Fine-tune language models on your own machines. Start with `anneal up`.",
    epilog="Exit codes: 0 success, 1 error, 2 invalid usage. Commands that follow a run to its end: 0 completed, "
    "3 failed, 4 stopped. Set ANNEAL_URL and ANNEAL_API_KEY to use a service on another machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"anneal {version('anneal')}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate of a private authority that signed that of the service."),
    ] = None,
) -> None:
    """Handle the options that precede a command."""
    use_json_errors(False)
    use_ca_file(ca_file)


for command in (up, down, status, api, worker, migrate, prune, backup, restore, export):
    cli.command()(command)
cli.command("open")(open_dashboard)
cli.add_typer(imports, name="import")
cli.add_typer(keys, name="keys")

cli.add_typer(secrets, name="secrets")
cli.add_typer(storage, name="storage")

cli.command()(audit)


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
        raise typer.Exit(importlib.import_module("app.cli.demo.program").main(model, keep))


def main() -> None:
    """Entry point of the `anneal` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may have characters that the encoding of a terminal or pipe lacks.
            stream.reconfigure(errors="backslashreplace")
    try:
        cli()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("app", "worker"):
            raise
        typer.echo(
            f"anneal: {error.name} is not installed; run `pip install -c constraints.txt -e '.[server]'` in the clone "
            "of Anneal.",
            err=True,
        )
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
