"""Commands of `anneal experiments`."""

from typing import Annotated

import typer

from app.cli.console import (
    After,
    AsJson,
    Limit,
    MaxDevices,
    NewMaxDevices,
    NoMaxDevices,
    command_group,
    confirm_or_exit,
    new_limit,
    open_client,
    print_details,
    print_json,
    print_listing,
    print_text,
    report_changed,
    report_deleted,
    split_page,
)
from app.cli.names import ExperimentId
from app.cli.runs.state_text import status_text

commands = command_group("Experiments: groups of runs. Example: `anneal experiments create docstrings`.")

Description = Annotated[str | None, typer.Option(help="Purpose of the experiment.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Tag; repeatable.")]


@commands.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the experiment.")],
    description: Description = None,
    tags: Tags = None,
    max_devices: MaxDevices = None,
    as_json: AsJson = False,
) -> None:
    """Create an experiment and print its id.

    Example: `anneal experiments create docstrings --description "Which rank is enough?" --tag python`
    """
    with open_client() as client:
        experiment = client.experiments.create(name, description=description, tags=tags, max_devices=max_devices)
        if as_json:
            print_json(experiment)
        else:
            print_text(experiment.id)


@commands.command("list")
def list_experiments(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List experiments, newest first.

    Example: `anneal experiments list`
    """
    with open_client() as client:
        experiments_page, has_more = split_page(client.experiments.list(limit=limit + 1, after=after), limit)
        rows = [(it.id, it.name, it.tags, it.created_at) for it in experiments_page]
        print_listing(experiments_page, has_more, as_json, ("id", "name", "tags", "created"), rows)


@commands.command()
def show(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Show an experiment with the status of its runs and its best runs.

    Example: `anneal experiments show exp_01k3x9m6q2v8s4t0w7y5z1a3b9`
    """
    with open_client() as client:
        experiment = client.experiments.get(experiment_id)
        if as_json:
            print_json(experiment)
            return
        print_details(
            {
                "id": experiment.id, "name": experiment.name, "description": experiment.description,
                "tags": experiment.tags,
                "max devices": experiment.max_devices,
                "runs": [f"{count} {status_text(status)}" for status, count in experiment.runs.items() if count],
                "best runs": [
                    f"{best.run_id} ({best.name}), {best.method}: {best.metric} {best.value:.4g}"
                    for best in experiment.best_runs
                ],
                "created": experiment.created_at,
            }
        )  # fmt: skip


@commands.command()
def edit(
    experiment_id: ExperimentId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    description: Description = None,
    tags: Tags = None,
    max_devices: NewMaxDevices = None,
    no_max_devices: NoMaxDevices = False,
    as_json: AsJson = False,
) -> None:
    """Change the name, description, tags or quota of devices of an experiment; fields that are not given are kept.

    Example: `anneal experiments edit exp_01k3x9m6q2v8s4t0w7y5z1a3b9 --name "docstrings, second try" --max-devices 8`
    """
    quota = new_limit("max_devices", max_devices, no_max_devices)
    with open_client() as client:
        changed = client.experiments.update(experiment_id, name=name, description=description, tags=tags, **quota)
        report_changed(changed, as_json)


@commands.command()
def delete(
    experiment_id: ExperimentId,
    with_runs: Annotated[
        bool,
        typer.Option("--with-runs", help="Also delete its runs with their checkpoints and models; asks first."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete an experiment. One that has runs is refused, unless --with-runs is given.

    With --with-runs the command prints how many runs, checkpoints and models are deleted, and asks. Runs that have not
    ended, pinned runs and runs with pinned checkpoints are never deleted.

    Example: `anneal experiments delete --with-runs exp_01k3x9m6q2v8s4t0w7y5z1a3b9`
    """
    with open_client() as client:
        if with_runs and not yes:
            experiment = client.experiments.get(experiment_id)
            if not experiment.is_empty:
                confirm_or_exit(f"This deletes {experiment.name!r} with {experiment.as_sentence()}.")
        client.experiments.delete(experiment_id, cascade=with_runs)
    report_deleted(experiment_id, as_json)
