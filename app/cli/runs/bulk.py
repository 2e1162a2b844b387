"""Commands of `anneal runs` that change one or several runs, which are named or chosen by filters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anneal.contracts.run_status import LIVE, TERMINAL
from app.cli.console import (
    AsJson,
    confirm_or_exit,
    fail,
    open_client,
    print_json,
    print_note,
    print_text,
    report_deleted,
)
from app.cli.names import OfDataset, OfExperiment, SomeRunIds
from app.cli.runs.state_text import status_of, status_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.bulk import RunChanges
    from anneal.contracts.schemas.runs.reads import RunRead

WithStatus = Annotated[list[str] | None, typer.Option("--status", help="Only runs with this status; repeatable.")]
WithTag = Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")]
OfBaseModel = Annotated[str | None, typer.Option("--base-model", help="Only runs of this base model.")]
OfMethod = Annotated[str | None, typer.Option("--method", help="Only runs of this method.")]
WithText = Annotated[str | None, typer.Option("--search", help="Only runs with this text in their name or a tag.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def stop(
    run_ids: SomeRunIds = None,
    experiment: OfExperiment = None,
    status: WithStatus = None,
    tag: WithTag = None,
    base_model: OfBaseModel = None,
    method: OfMethod = None,
    dataset: OfDataset = None,
    search: WithText = None,
    every_live_run: Annotated[bool, typer.Option("--all", help="All live runs of the service.")] = False,
    mode: Annotated[
        Literal["checkpoint", "epoch_end", "best", "discard"],
        typer.Option(help="Save a checkpoint, finish the epoch first, end with the best checkpoint, or save nothing."),
    ] = "checkpoint",
    no_save: Annotated[bool, typer.Option("--no-save", help="Same as --mode discard.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.001, max=86_400, help="Seconds until its trainer is killed. [default: the grace period]"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the runs have ended.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Stop runs: those that are named, or all live ones that the filters select.

    Saves a checkpoint to resume from, unless --mode says otherwise. A run that has ended meanwhile is no failure.

    Example: `anneal runs stop --mode epoch_end --wait run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    if no_save and mode not in ("checkpoint", "discard"):
        raise typer.BadParameter(f"--no-save contradicts --mode {mode}; use only one of them.")
    filters = _build_filters(experiment, status, tag, base_model, method, dataset, search)
    if every_live_run:
        if run_ids is not None or filters:
            raise typer.BadParameter("--all stops every live run: use it without names and filters.")
        filters = {"status": ["pending", *LIVE]}
    with open_client() as client:
        chosen = _chosen_ids(client, run_ids, filters, ("pending", *LIVE))
        if run_ids is None and chosen and not yes:
            confirm_or_exit(f"{_count_text(chosen)} will be stopped.", "Nothing is stopped.")
        how: Any = "discard" if no_save else mode
        if run_ids is not None and len(chosen) == 1:
            _stop_one(client, chosen[0], how, deadline, wait, as_json)
            return
        changes = client.runs.stop_many(chosen, mode=how, deadline_seconds=deadline) if chosen else None
        stopping = [run.id for run in changes.runs if run.outcome != "refused"] if changes is not None else []
        for run_id in stopping if wait else ():
            for _ in client.runs.events(run_id, types="end"):
                pass
        _report_changes(changes, "has stopped" if wait else "was asked to stop", as_json)


def _stop_one(client: "Anneal", run_id: str, mode: Any, deadline: float | None, wait: bool, as_json: bool) -> None:
    """Stop a run, and say what to expect."""
    from anneal.client.errors import AnnealError

    try:
        stopping = client.runs.stop(run_id, mode=mode, deadline_seconds=deadline)
    except AnnealError as error:
        if error.code != "run_has_ended":
            raise
        ended = client.runs.get(run_id)
        if as_json:
            print_json(ended)
        else:
            print_text(f"{run_id} is {status_text(ended.status)} already, at step {ended.current_step}.")
        return
    run: RunRead = stopping
    if wait:
        for _ in client.runs.events(run_id, after=run.last_seq, types="end"):
            pass
        run = client.runs.get(run_id)
    if as_json:
        print_json(run)
    elif run.finished_at is None:
        print_text(f"{run_id} was asked to stop; it is {status_text(run.status)}. {stopping.stop.message}")
    else:
        print_text(f"{run_id} is {status_text(run.status)} at step {run.current_step}.")


def delete(
    run_ids: SomeRunIds = None,
    experiment: OfExperiment = None,
    status: WithStatus = None,
    tag: WithTag = None,
    base_model: OfBaseModel = None,
    method: OfMethod = None,
    dataset: OfDataset = None,
    search: WithText = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete ended runs with their events, checkpoints and models: those named, or all that the filters select.

    The runs of a fine-tuning job are deleted together: those of a job of which one is not selected are refused.

    Example: `anneal runs delete run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    filters = _build_filters(experiment, status, tag, base_model, method, dataset, search)
    with open_client() as client:
        chosen = _chosen_ids(client, run_ids, filters, TERMINAL)
        if run_ids is not None and len(chosen) == 1:
            client.runs.delete(chosen[0])
            report_deleted(chosen[0], as_json)
            return
        if run_ids is None and chosen and not yes:
            confirm_or_exit(f"{_count_text(chosen)} will be deleted with events, checkpoints and models.")
        _report_changes(client.runs.delete_many(chosen) if chosen else None, "is deleted", as_json)


def tag(
    run_ids: SomeRunIds = None,
    add: Annotated[list[str] | None, typer.Option("--add", help="Tag to add; repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Tag to remove; repeatable.")] = None,
    experiment: OfExperiment = None,
    status: WithStatus = None,
    tag: WithTag = None,
    base_model: OfBaseModel = None,
    method: OfMethod = None,
    dataset: OfDataset = None,
    search: WithText = None,
    as_json: AsJson = False,
) -> None:
    """Add tags to runs or remove some: of those that are named, or all that the filters select.

    Example: `anneal runs tag --experiment ranks --add keep`
    """
    if not add and not remove:
        raise typer.BadParameter("Name a tag with --add or --remove.")
    with open_client() as client:
        filters = _build_filters(experiment, status, tag, base_model, method, dataset, search)
        chosen = _chosen_ids(client, run_ids, filters, None)
        changes = client.runs.tag_many(chosen, add=add or (), remove=remove or ()) if chosen else None
        _report_changes(changes, "has other tags now", as_json)


def _build_filters(
    experiment: str | None,
    status: Sequence[str] | None,
    tag: str | None,
    base_model: str | None,
    method: str | None,
    dataset: str | None,
    search: str | None,
) -> dict[str, Any]:
    filters = {
        "experiment_id": experiment, "status": [status_of(word) for word in status or ()], "tag": tag,
        "base_model": base_model, "method": method, "dataset_id": dataset, "search": search,
    }  # fmt: skip
    return {name: value for name, value in filters.items() if value}


def _chosen_ids(
    client: "Anneal", run_ids: Sequence[str] | None, filters: dict[str, Any], statuses: Sequence[str] | None
) -> list[str]:
    """Return the ids of the runs that are named, or of all with one of the statuses that the filters select."""
    if run_ids is not None:
        if filters:
            raise typer.BadParameter("Name runs or use filters, not both.")
        return list(dict.fromkeys(run_ids))
    if not filters:
        raise typer.BadParameter("Name runs, or select some with a filter such as --tag or --experiment.")
    if statuses is not None and "status" not in filters:
        filters = {**filters, "status": list(statuses)}
    return [run.id for run in client.runs.list(**filters)]


def _count_text(ids: Sequence[str]) -> str:
    return f"{len(ids)} run{'' if len(ids) == 1 else 's'}"


def _report_changes(changes: "RunChanges | None", changed: str, as_json: bool) -> None:
    """Print what became of each run; exit with code 1 if one was refused."""
    runs = changes.runs if changes is not None else []
    if as_json:
        print_json({"runs": [run.model_dump(mode="json") for run in runs]})
    elif not runs:
        print_note("No run is selected.")
    for run in runs:
        if not as_json and run.outcome != "refused":
            print_text(f"{run.id} {changed}." if run.outcome == "changed" else run.detail or f"{run.id} is so already.")
    refused = [run for run in runs if run.outcome == "refused"]
    if refused and as_json:
        raise typer.Exit(1)
    if refused:
        fail(f"{len(refused)} of {len(runs)} runs are unchanged:", *(f"  {run.detail}" for run in refused))
