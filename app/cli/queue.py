"""Commands of `anneal queue`."""

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, command_group, open_client, print_details, print_json

if TYPE_CHECKING:
    from anneal.contracts.schemas.runs.queue import QueueRead

commands = command_group("The queue of all runs. Example: `anneal queue show`.")


@commands.command("show")
def show_queue(as_json: AsJson = False) -> None:
    """Show whether the queue is paused, by whom and why, and how many runs wait and train.

    Example: `anneal queue show`
    """
    with open_client() as client:
        _print_queue(client.queue.get(), as_json)


@commands.command("pause")
def pause_queue(
    reason: Annotated[str | None, typer.Option(help="Reason, which every run that waits shows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let no run start until the queue is resumed; runs that train go on. Needs a key with the scope admin.

    Example: `anneal queue pause --reason "new cooling for rack 3"`
    """
    with open_client() as client:
        _print_queue(client.queue.pause(reason), as_json)


@commands.command("resume")
def resume_queue(as_json: AsJson = False) -> None:
    """Let runs start again. Needs a key with the scope admin.

    Example: `anneal queue resume`
    """
    with open_client() as client:
        _print_queue(client.queue.resume(), as_json)


def _print_queue(queue: "QueueRead", as_json: bool) -> None:
    if as_json:
        print_json(queue)
        return
    details: dict[str, object] = {"state": "paused: no run starts" if queue.paused else "runs start"}
    if queue.pause is not None:
        pause = queue.pause
        details |= {"paused at": pause.paused_at, "paused by": pause.paused_by, "reason": pause.reason}
    print_details({**details, "pending runs": queue.pending, "live runs": queue.live})
