"""Command `anneal runs logs`."""

from typing import Annotated

import typer

from app.cli.console import AsJson, json_line, open_client, print_text
from app.cli.names import RunId


def logs(
    run_id: RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Start with the last N lines.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines that contain this text.")] = None,
    is_complete: Annotated[
        bool, typer.Option("--all", help="Print every line so far, with time and stream, also those left out above.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="With --all: only the lines of this attempt.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the logs of a run. Exit code with -f: 0 completed, 3 failed, 4 stopped.

    Where a run prints more than 200 lines a second for long, some are left out; `--all` prints the complete log.

    Example: `anneal runs logs -f --tail 20 run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    from app.cli.runs.watch import continue_on_interrupt, exit_code

    if is_complete and (follow or tail is not None or as_json):
        raise typer.BadParameter("--all prints the lines so far as text; omit --follow, --tail and --json.")
    if attempt is not None and not is_complete:
        raise typer.BadParameter("--attempt selects lines of the complete log; add --all.")
    if is_complete:
        with open_client() as client:
            for line in client.runs.complete_log(run_id, attempt=attempt, grep=grep):
                print_text(line)
        return
    with open_client() as client, continue_on_interrupt(run_id):
        for event in client.runs.logs(run_id, tail=tail, grep=grep, follow=follow):
            if as_json:
                json_line(event)
            elif event.type == "log":
                print_text(getattr(event, "line", ""))
        if follow:
            raise typer.Exit(exit_code(client.runs.get(run_id).status))
