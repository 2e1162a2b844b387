"""Commands `anneal eval` and `anneal predict`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import AsJson, open_client, print_details, print_json, print_note, show_phases
from app.cli.names import CheckpointOfModel, ModelName, checkpoint_or_model, complete_dataset
from app.cli.runs.run_request import dataset_of
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import RunRead

_TYPES = ("pending", "progress", "skipped_rows", "end")
_PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

evaluation = typer.Typer(**_PLAIN)
prediction = typer.Typer(**_PLAIN)

_Dataset = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        help="Dataset: its id, its name, `last`, or a local file, which is uploaded.",
        autocompletion=complete_dataset,
    ),
]
_Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Field of the configuration or resource, e.g. seed=1 or resources.kind=cpu; repeatable.",
    ),
]
_Name = Annotated[str | None, typer.Option(help="Name of the new run.")]
_NoWait = Annotated[bool, typer.Option("--no-wait", help="Print the id of the run and do not wait.")]


@evaluation.command("eval")
def evaluate(
    model: ModelName,
    dataset: _Dataset,
    checkpoint: CheckpointOfModel = None,
    sets: _Sets = None,
    name: _Name = None,
    no_wait: _NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a dataset and print the metrics. Exit code: 0 completed, 3 failed, 4 stopped.

    Example: `anneal eval run_01k3x9m6q2v8s4t0w7y5z1a3b6 heldout.jsonl --set max_eval_rows=500`
    """
    with open_client() as client:
        body = _request_body(client, model, dataset, checkpoint, sets, name)
        run = client.runs.evaluate(body, wait=False)
        _show_result(client, run, no_wait=no_wait, as_json=as_json)


@prediction.command("predict")
def predict(
    model: ModelName,
    dataset: _Dataset,
    checkpoint: CheckpointOfModel = None,
    sets: _Sets = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the answers, JSONL or `.parquet`, in the order of the dataset."),
    ] = None,
    name: _Name = None,
    no_wait: _NoWait = False,
    as_json: AsJson = False,
) -> None:
    """Answer the rows of a dataset with a model and print the scores. Exit code: 0 completed, 3 failed, 4 stopped.

    Example: `anneal predict run_01k3x9m6q2v8s4t0w7y5z1a3b6 heldout.jsonl --set max_new_tokens=64 -o answers.jsonl`
    """
    if output is not None and no_wait:
        raise typer.BadParameter("needs the end of the run; leave `--no-wait` out", param_hint="--output")
    with open_client() as client:
        body = _request_body(client, model, dataset, checkpoint, sets, name)
        run = client.runs.predict(body, wait=False)
        _show_result(client, run, no_wait=no_wait, as_json=as_json, output=output)


def _request_body(
    client: "Anneal", model: str, dataset: str, checkpoint: str | None, sets: list[str] | None, name: str | None
) -> dict[str, Any]:
    from app.cli.runs import run_file

    config = run_file.set_values({}, [one.removeprefix("config.") for one in sets or []])
    return {
        "model": checkpoint_or_model(client, model, checkpoint),
        "dataset_id": dataset_of(client, dataset, Path()),
        "resources": config.pop("resources", {}),
        "config": config,
        "name": name,
    }


def _show_result(client: "Anneal", run: "RunRead", *, no_wait: bool, as_json: bool, output: Path | None = None) -> None:
    """Follow a run to its end, print its metrics, download the answers, and exit with the code of its status."""
    from app.cli.runs.watch import continue_on_interrupt, exit_code

    if no_wait:
        return print_json(run) if as_json else typer.echo(run.id)
    if not as_json:
        print_note(f"{run.name} is {status_text(run.status)}: {run.id}")
    with continue_on_interrupt(run.id):
        _follow_run(client, run, is_quiet=as_json)
    run = client.runs.get(run.id)
    if output is not None and run.status == "completed":
        _download_answers(client, run.id, output)
    if as_json:
        print_json(run)
    elif run.evaluation is not None:
        print_details(run.evaluation)
    else:
        print_note(f"{run.id} is {status_text(run.status)}: {run.error_message or 'it was stopped before it was done'}")
    raise typer.Exit(exit_code(run.status))


def _download_answers(client: "Anneal", run_id: str, output: Path) -> None:
    import tempfile

    file = "predictions.parquet" if output.suffix == ".parquet" else "predictions.jsonl"
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        (client.runs.download(run_id, Path(folder) / "answers", paths=[file]) / file).replace(output)


def _follow_run(client: "Anneal", run: "RunRead", *, is_quiet: bool) -> None:
    """Wait for the end of a run; what it does meanwhile is shown on standard error."""
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
