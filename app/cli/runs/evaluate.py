"""Command `anneal eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import AsJson, open_client, print_details, print_json, print_note, show_phases
from app.cli.names import complete_dataset, id_of_run, id_within, run_or_other
from app.cli.runs.run_request import dataset_of
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import RunRead

_TYPES = ("pending", "progress", "skipped_rows", "end")

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@commands.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Run (its id, or `last`) for its output, checkpoint (`ckpt_…`), or base model.",
            callback=run_or_other,
        ),
    ],
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="Dataset: its id, its name, `last`, or a local file, which is uploaded.",
            autocompletion=complete_dataset,
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Checkpoint of the run: its id or the beginning of it, or `last`."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Field of the configuration or resource, e.g. method=dpo or resources.devices=2; repeatable.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the evaluation.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the id of the run and do not wait.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a dataset and print the metrics. Exit code: 0 completed, 3 failed, 4 stopped.

    Example: `anneal eval run_01k3x9m6q2v8s4t0w7y5z1a3b6 heldout.jsonl --set max_eval_rows=500`
    """
    from app.cli.runs import run_file
    from app.cli.runs.watch import continue_on_interrupt, exit_code

    with open_client() as client:
        if checkpoint is not None:
            model = id_within("checkpoint", checkpoint, client.runs.checkpoints(id_of_run(model)))
        config = run_file.set_values({}, [one.removeprefix("config.") for one in sets or []])
        body: dict[str, Any] = {
            "model": model,
            "dataset_id": dataset_of(client, dataset, Path()),
            "resources": config.pop("resources", {}),
            "config": config,
            "name": name,
        }
        run = client.runs.evaluate(body, wait=False)
        if no_wait:
            return print_json(run) if as_json else typer.echo(run.id)
        if not as_json:
            print_note(f"{run.name} is {status_text(run.status)}: {run.id}")
        with continue_on_interrupt(run.id):
            _follow_evaluation(client, run, is_quiet=as_json)
        run = client.runs.get(run.id)
    if as_json:
        print_json(run)
    elif run.evaluation is not None:
        print_details(run.evaluation)
    else:
        print_note(f"{run.id} is {status_text(run.status)}: {run.error_message or 'it was stopped before it was done'}")
    raise typer.Exit(exit_code(run.status))


def _follow_evaluation(client: "Anneal", run: "RunRead", *, is_quiet: bool) -> None:
    """Wait for the end of an evaluation; what it does meanwhile is shown on standard error."""
    from anneal.contracts.events import PendingEvent, ProgressEvent, SkippedRowsEvent

    with show_phases() as show_phase:
        for event in client.runs.events(run.id, after=run.last_seq, types=_TYPES):
            if is_quiet:
                continue
            if isinstance(event, ProgressEvent):
                show_phase(event.phase, event.done, event.total)
            elif isinstance(event, PendingEvent):
                print_note(f"{'queued' if event.code == 'queued' else 'waits'}: {event.message}")
            elif isinstance(event, SkippedRowsEvent):
                print_note(f"warning: {event.reason}")
