"""Commands of `anneal actions`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import (
    After,
    AsJson,
    Limit,
    command_group,
    open_client,
    print_details,
    print_json,
    print_listing,
    print_note,
    print_text,
    split_page,
)
from app.cli.names import RunId, id_within

if TYPE_CHECKING:
    from anneal.client.actions import Name
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.actions import ActionRead

commands = command_group("Actions on a running run. Example: `anneal actions checkpoint --wait run_…`.")

Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the action is done. Exits with code 1 if it was refused or failed.")
]


def _request_action(run_id: str, action: "Name", wait: bool, as_json: bool, **parameters: Any) -> None:
    with open_client() as client:
        before = client.runs.get(run_id).last_seq
        action_read = client.actions.create(run_id, action, **parameters)
        if wait:
            action_read = _wait_until_done(client, action_read, before)
        if as_json:
            print_json(action_read)
        elif action_read.status == "waiting":
            print_note(
                f"The run performs it at the end of a step. Check with `anneal actions show {run_id} {action_read.id}`."
            )
            print_text(action_read.id)
        else:
            _print_action(action_read)
        if action_read.status in ("refused", "failed"):
            raise typer.Exit(1)


def _wait_until_done(client: "Anneal", action: "ActionRead", after: int) -> "ActionRead":
    """Wait for the result of the action, or for the end of the run, and return the action."""
    for event in client.runs.events(action.run_id, after=after, types=["action", "checkpoint", "end"]):
        if event.type == "end" or getattr(event, "action_id", None) == action.id:
            break
    return client.actions.get(action.run_id, action.id)


def _print_action(action: "ActionRead") -> None:
    result = dict(action.result or {})
    samples = result.pop("samples", [])
    print_details(
        {
            "id": action.id, "action": action.action, "status": action.status, "step": action.step,
            "message": action.message, **action.parameters, **result,
        } | {"prompts": None if samples else action.parameters.get("prompts")}
    )  # fmt: skip
    for sample in samples:
        print_text(f"\n> {sample['prompt']}\n{sample['completion']}")


@commands.command()
def checkpoint(
    run_id: RunId,
    pin: Annotated[bool, typer.Option("--pin", help="Never delete this checkpoint automatically.")] = False,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Save a checkpoint now.

    Example: `anneal actions checkpoint --pin --wait run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _request_action(run_id, "checkpoint", wait, as_json, pin=pin)


@commands.command()
def evaluate(run_id: RunId, wait: Wait = False, as_json: AsJson = False) -> None:
    """Evaluate now, on the run's evaluation dataset.

    Example: `anneal actions evaluate --wait run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _request_action(run_id, "evaluate", wait, as_json)


@commands.command()
def sample(
    run_id: RunId,
    prompts: Annotated[list[str], typer.Option("--prompt", "-p", help="Prompt to complete; repeat for up to 8.")],
    tokens: Annotated[
        int | None, typer.Option(min=1, max=512, help="Maximum new tokens per completion. Default: 64.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy. Default: 1.")
    ] = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Generate completions with the current weights.

    Example: `anneal actions sample --wait -p "What is a lease?" run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _request_action(run_id, "sample", wait, as_json, prompts=prompts, max_new_tokens=tokens, temperature=temperature)


# A negative number is a value, which the service refuses with its reason.
@commands.command(context_settings={"ignore_unknown_options": True})
def set_learning_rate(
    run_id: RunId,
    learning_rate: Annotated[float, typer.Argument(metavar="RATE", help="New peak learning rate of the schedule.")],
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Change the peak learning rate of a running run.

    Example: `anneal actions set-learning-rate run_01k3x9m6q2v8s4t0w7y5z1a3b6 1e-4`
    """
    _request_action(run_id, "set_learning_rate", wait, as_json, learning_rate=learning_rate)


@commands.command()
def extend(
    run_id: RunId,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="New total number of optimizer steps.")
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="New total number of epochs.")] = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Extend a run; the learning-rate schedule follows the new length from then on.

    Example: `anneal actions extend --epochs 5 run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    if (max_steps is None) == (epochs is None):
        raise typer.BadParameter("Give the new total length of the run: either --max-steps or --epochs.")
    _request_action(run_id, "extend", wait, as_json, max_steps=max_steps, epochs=epochs)


@commands.command("list")
def list_actions(run_id: RunId, limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List the actions of a run, newest first.

    Example: `anneal actions list run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    with open_client() as client:
        actions, has_more = split_page(client.actions.list(run_id, limit=limit + 1, after=after), limit)
        rows = [(it.id, it.action, it.status, it.step, it.parameters, it.created_at) for it in actions]
        print_listing(actions, has_more, as_json, ("id", "action", "status", "step", "parameters", "created"), rows)


@commands.command()
def show(
    run_id: RunId,
    action_id: Annotated[
        str, typer.Argument(metavar="ACTION", help="Action: its id or the beginning of it, or `last` for the newest.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show an action and its result.

    Example: `anneal actions show run_01k3x9m6q2v8s4t0w7y5z1a3b6 act_01k3x9m6q2v8s4t0w7y5z1a3d0`
    """
    with open_client() as client:
        action = client.actions.get(run_id, id_within("action", action_id, client.actions.list(run_id)))
        if as_json:
            print_json(action)
        else:
            _print_action(action)
