"""`anneal actions`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.console import After, AsJson, Limit, connected, details, document, fail, listing, note, noun, page

if TYPE_CHECKING:
    from app.actions.schemas import ActionRead
    from app.client import Anneal
    from app.client.actions import Name

commands = noun("Actions on a run that trains. Example: `anneal actions checkpoint --wait run_…`.")

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id that `anneal runs list` shows.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done; exit code 1 when it was refused.")]


def _ask(run_id: str, action: "Name", wait: bool, as_json: bool, **parameters: Any) -> None:
    with connected() as client:
        before = client.runs.get(run_id).last_seq
        asked = client.actions.create(run_id, action, **parameters)
        if wait:
            asked = _done(client, asked, before)
        if as_json:
            document(asked)
        elif asked.status == "waiting":
            note(f"It is done once the run ends a step; `anneal actions show {run_id} {asked.id}` tells.")
            typer.echo(asked.id)
        else:
            _tell(asked)
        if asked.status in ("refused", "failed"):
            raise typer.Exit(1)


def _done(client: "Anneal", asked: "ActionRead", after: int) -> "ActionRead":
    """The action once it was answered; the end of the run answers all."""
    for event in client.runs.events(asked.run_id, after=after, types=["action", "checkpoint", "end"]):
        if event.type == "end" or getattr(event, "action_id", None) == asked.id:
            break
    return client.actions.get(asked.run_id, asked.id)


def _tell(action: "ActionRead") -> None:
    result = dict(action.result or {})
    samples = result.pop("samples", [])
    details(
        {
            "id": action.id, "action": action.action, "status": action.status, "step": action.step,
            "because": action.message, **action.parameters, **result,
        } | {"prompts": None if samples else action.parameters.get("prompts")}
    )  # fmt: skip
    for sample in samples:
        typer.echo(f"\n> {sample['prompt']}\n{sample['completion']}")


@commands.command()
def checkpoint(
    run_id: RunId,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it, however many newer ones there are.")] = False,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Save a checkpoint now.

    Example: `anneal actions checkpoint --pin --wait run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _ask(run_id, "checkpoint", wait, as_json, pin=pin)


@commands.command()
def evaluate(run_id: RunId, wait: Wait = False, as_json: AsJson = False) -> None:
    """Evaluate now, on the run's evaluation data.

    Example: `anneal actions evaluate --wait run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _ask(run_id, "evaluate", wait, as_json)


@commands.command()
def sample(
    run_id: RunId,
    prompts: Annotated[list[str], typer.Option("--prompt", "-p", help="What to go on with; repeat for up to 8.")],
    tokens: Annotated[int | None, typer.Option(min=1, max=512, help="Most tokens of each text; unset: 64.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: always the likeliest token; unset: 1.")] = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Let the model write, as it is now.

    Example: `anneal actions sample --wait -p "What is a lease?" run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _ask(run_id, "sample", wait, as_json, prompts=prompts, max_new_tokens=tokens, temperature=temperature)


@commands.command()
def set_learning_rate(
    run_id: RunId,
    learning_rate: Annotated[float, typer.Argument(metavar="RATE", help="The new highest rate of the schedule.")],
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Go on with another learning rate.

    Example: `anneal actions set-learning-rate run_01k3x9m6q2v8s4t0w7y5z1a3b6 1e-4`
    """
    _ask(run_id, "set_learning_rate", wait, as_json, learning_rate=learning_rate)


@commands.command()
def extend(
    run_id: RunId,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Optimizer steps in all.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the data in all.")] = None,
    wait: Wait = False,
    as_json: AsJson = False,
) -> None:
    """Train longer than planned; the schedule is from then on that of a run of the new length.

    Example: `anneal actions extend --epochs 5 run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    if (max_steps is None) == (epochs is None):
        fail("Say how long the run is to be in all: either --max-steps or --epochs.")
    _ask(run_id, "extend", wait, as_json, max_steps=max_steps, epochs=epochs)


@commands.command("list")
def list_actions(run_id: RunId, limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List what was asked of a run, newest first.

    Example: `anneal actions list run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    with connected() as client:
        found, has_more = page(client.actions.list(run_id, limit=limit + 1, after=after), limit)
        rows = [(it.id, it.action, it.status, it.step, it.parameters, it.created_at) for it in found]
        listing(found, has_more, as_json, ("id", "action", "status", "step", "parameters", "asked"), rows)


@commands.command()
def show(
    run_id: RunId,
    action_id: Annotated[str, typer.Argument(metavar="ACTION", help="The id that `anneal actions list` shows.")],
    as_json: AsJson = False,
) -> None:
    """Show an action, and what came of it.

    Example: `anneal actions show run_01k3x9m6q2v8s4t0w7y5z1a3b6 act_01k3x9m6q2v8s4t0w7y5z1a3d0`
    """
    with connected() as client:
        found = client.actions.get(run_id, action_id)
        if as_json:
            document(found)
        else:
            _tell(found)
