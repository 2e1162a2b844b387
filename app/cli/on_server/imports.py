"""Group `anneal import`: an archive of another service, and jobs of OpenAI."""

from typing import Any

import typer

from app.cli.console import CommandGroup
from app.cli.on_server.data import import_archive
from app.cli.on_server.openai_jobs import import_jobs

_ARCHIVE = "archive"


class _Imports(CommandGroup):
    """Group in which `anneal import runs.tar` is short for `anneal import archive runs.tar`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, _ARCHIVE)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return _ARCHIVE, self.commands[_ARCHIVE], args


imports = typer.Typer(
    cls=_Imports,
    help="Add the runs of another service, or read jobs of OpenAI. Example: `anneal import llama.tar`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Options of `archive`, whose name may be left out.
    context_settings={"ignore_unknown_options": True},
)
imports.command(_ARCHIVE)(import_archive)
imports.command("openai-jobs")(import_jobs)
