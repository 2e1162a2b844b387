"""Command line: servers, keys and the demo; commands that use HTTP are in `app.cli` and are loaded on use."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from app.cli.audit import audit
from app.cli.errors import plain_errors
from app.cli.keys import keys
from app.cli.secrets import secrets
from app.cli.server import api, migrate, prune, up, worker

NOUNS = {
    "actions": "app.cli.actions",
    "datasets": "app.cli.datasets",
    "experiments": "app.cli.experiments",
    "models": "app.cli.models",
    "runs": "app.cli.runs.commands",
    "workers": "app.cli.workers",
}
"""Groups of commands that call the HTTP API, with their modules, which are imported only when a command needs them."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *NOUNS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in NOUNS:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_group(importlib.import_module(NOUNS[cmd_name]).commands)
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

for command in (up, api, worker, migrate, prune):
    cli.command()(command)
cli.add_typer(keys, name="keys")

cli.add_typer(secrets, name="secrets")

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
        raise typer.Exit(importlib.import_module("app.cli.demo.run").main(model, keep))


def main() -> None:
    """Entry point of the `anneal` command."""
    try:
        cli()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("app", "worker"):
            raise
        typer.echo(f"anneal: {error.name} is not installed; run `pip install 'anneal[server]'`.", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
