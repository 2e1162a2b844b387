"""Command `anneal runs events`: status changes, progress and ends of all runs."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, json_line, open_client, print_text
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.events import Event


def events(
    context: typer.Context,
    after: Annotated[
        int | None,
        typer.Option(min=0, help="Start after this cursor of an earlier event, 0 for the oldest. Unset: start now."),
    ] = None,
    types: Annotated[str | None, typer.Option(help="Only these types, comma-separated: status, progress, end.")] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow", help="Wait for more events until Ctrl-C, or end after the newest stored one."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print status changes, progress and ends of all runs. With --json, each event has the cursor for --after.

    Example: `anneal runs events --types status,end`
    """
    if context.args:
        run = shlex.quote(context.args[0])
        context.fail(
            f"This command prints events of all runs. Use `anneal runs watch {run}` for those of one run, with --json "
            f"for all of them, or `anneal runs logs {run}` for its log."
        )
    start = after if follow else after or 0
    names: dict[str, str] = {}
    with open_client() as client:
        for event in client.runs.all_events(after=start, types=types, follow=follow):
            if as_json:
                json_line(event)
            else:
                print_text(_event_line(event, _run_name(client, event.run_id, names)))
                sys.stdout.flush()


def _run_name(client: "Anneal", run_id: str, names: dict[str, str]) -> str:
    """Return the name of a run, which is asked for once; empty for one that was deleted."""
    from anneal.client.errors import AnnealError

    if run_id and run_id not in names:
        try:
            names[run_id] = client.runs.get(run_id).name
        except AnnealError as error:
            if error.status != 404:
                raise
            names[run_id] = ""
    return names.get(run_id, "")


def _event_line(event: "Event", name: str) -> str:
    when = f"{event.ts.astimezone():%Y-%m-%d %H:%M:%S}" if event.ts else ""
    return f"{when:19}  {event.run_id:30}  {f'{name}: ' if name else ''}{_event_text(event)}"


def _event_text(event: "Event") -> str:
    from anneal.contracts.events import EndEvent, ProgressEvent, StatusEvent

    if isinstance(event, StatusEvent):
        return f"{status_text(event.to)}: {event.reason}" if event.reason else status_text(event.to)
    if isinstance(event, ProgressEvent):
        of = "" if event.total is None else f" of {event.total:g}"
        done = "" if event.done is None else f" {event.done:g}{of}"
        return f"{event.message or event.phase}{done}"
    if isinstance(event, EndEvent):
        return f"ended: {status_text(event.status)}"
    return "older events were pruned" if event.type == "truncated" else event.type
