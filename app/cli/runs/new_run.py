"""Commands that validate, estimate and create a run from a run file or options."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, fail, open_client, plain_errors, print_json, print_note, print_text
from app.cli.runs.run_request import Dataset, File, Full, Lora, Method, Model, Qlora, RunOptions, Set
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import RunRead
    from anneal.contracts.schemas.runs.requests import RunCheck

Watch = Annotated[bool, typer.Option("--watch", help="Watch the run to its end; the exit code gives the result.")]


def create(
    file: File = None,
    model: Model = None,
    dataset: Dataset = None,
    method: Method = None,
    qlora: Qlora = False,
    lora: Lora = False,
    full: Full = False,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: method and model.")] = None,
    sets: Set = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """Create a run from a run file or options, and print its id; without --json also its warnings.

    Options override fields of the file. Datasets and experiments may be named as in other commands; a local file is
    uploaded, unless one with its content was before. Exit code with --watch: 0 completed, 3 failed, 4 stopped.

    Example: `anneal runs create -m Qwen/Qwen3-0.6B -d chats.jsonl --lora --watch`, or `anneal runs create -f run.yaml`
    """
    options = RunOptions.from_parameters(file, model, dataset, method, sets, qlora=qlora, lora=lora, full=full)
    with open_client() as client:
        body = options.build_body(client)
        if name is not None:
            body["name"] = name
        print_or_watch(client, client.runs.create(body), watch, as_json)


def print_or_watch(client: "Anneal", run: "RunRead", watch: bool, as_json: bool) -> None:
    """Print a new run with its warnings, or watch it to its end."""
    if not as_json:
        _note_warnings(run)
    if watch:
        from app.cli.runs.watch import watch_run

        raise typer.Exit(watch_run(client, run, as_json))
    if as_json:
        print_json(run)
        return
    print_note(f"{run.name} is {status_text(run.status)}. Watch it with `anneal runs watch {run.id}`.")
    print_text(run.id)


def _note_warnings(checked: "RunCheck | RunRead") -> None:
    for warning in checked.warnings:
        print_note(f"  {warning.field}: {warning.message}")


def validate(
    file: File = None,
    model: Model = None,
    dataset: Dataset = None,
    method: Method = None,
    qlora: Qlora = False,
    lora: Lora = False,
    full: Full = False,
    sets: Set = None,
    as_json: AsJson = False,
) -> None:
    """Validate what `anneal runs create` takes, without creating a run; exit code 1 if it is invalid.

    Example: `anneal runs validate -f run.yaml`
    """
    options = RunOptions.from_parameters(file, model, dataset, method, sets, qlora=qlora, lora=lora, full=full)
    with open_client() as client:
        check = client.runs.validate(options.build_body(client))
        if as_json:
            print_json(check)
            raise typer.Exit(0 if check.valid else 1)
        _note_warnings(check)
        if not check.valid:
            fail("This run would be refused.", *(f"  {item.field}: {item.message}" for item in check.errors))
        print_text("This run can be created.")


def estimate(
    file: File = None,
    model: Model = None,
    dataset: Dataset = None,
    method: Method = None,
    qlora: Qlora = False,
    lora: Lora = False,
    full: Full = False,
    sets: Set = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also measure: a worker runs two steps on the longest rows.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option(help="Number of rows, such as 10k, of a dataset that is not uploaded yet.")
    ] = None,
    mean_tokens: Annotated[
        float | None, typer.Option(help="With --rows: mean number of tokens of a row; unset: max_seq_length.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="GPU to estimate for, such as H100 or 'A100 80GB', also if no worker has one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, steps, time and cost of a run, and where it fits, without creating it.

    With --probe a worker measures it too, and the measurement is printed next to the estimate. Exit code 3 if the probe
    failed, except for lack of memory, which is a valid result; 4 if it was stopped.

    Example: `anneal runs estimate -m Qwen/Qwen3-0.6B --lora --rows 10k --mean-tokens 300 --device H100`
    """
    from app.cli.runs import estimate as estimating

    if mean_tokens is not None and rows is None:
        raise typer.BadParameter("--mean-tokens describes a dataset that is not uploaded yet: use it with --rows.")
    options = RunOptions.from_parameters(file, model, dataset, method, sets, qlora=qlora, lora=lora, full=full)
    with open_client() as client:
        body = options.build_body(client, has_dataset=rows is None)
        if rows is not None:
            body["dataset_size"] = {"rows": rows, "mean_tokens": mean_tokens}
        if device is not None:
            body["device"] = device
        estimated = client.runs.estimate(body, probe=probe, wait=as_json)
        if as_json:
            print_json(estimated)
        else:
            estimating.print_estimate(estimated)
        if estimated.probe_run_id is not None:
            raise typer.Exit(estimating.follow_probe(client, estimated, as_json))


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("run.yaml"),
    model: Model = None,
    dataset: Dataset = None,
    method: Method = None,
    qlora: Qlora = False,
    lora: Lora = False,
    full: Full = False,
    as_json: AsJson = False,
) -> None:
    """Write a run file with comments, which `anneal runs create -f` takes.

    Example: `anneal runs init run.yaml -m Qwen/Qwen3-0.6B -d chats.jsonl --lora`
    """
    from app.cli.runs import run_template

    with plain_errors():
        options = RunOptions.from_parameters(None, model, dataset, method, None, qlora=qlora, lora=lora, full=full)
        text = run_template.text_of(model, dataset, options.chosen_method)
        try:
            with file.open("x", encoding="utf-8") as written:
                written.write(text)
        except FileExistsError:
            fail(f"{file} exists and is not replaced: name another file.", code="file_exists")
    if as_json:
        print_json({"file": str(file.absolute())})
        return
    print_note(f"{file} is written. Change it, then run `anneal runs create -f {file} --watch`.")
