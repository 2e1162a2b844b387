"""Commands of `anneal runs`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from anneal.contracts.run_status import RunSort
from anneal.contracts.run_task import RunTask
from app.cli.console import (
    After,
    AsJson,
    Limit,
    command_group,
    format_size,
    open_client,
    option_hint,
    print_details,
    print_json,
    print_listing,
    print_note,
    print_text,
    report_changed,
    show_transfer,
    split_page,
    value_text,
)
from app.cli.names import OfDataset, OfExperiment, ParentId, RunId, id_within
from app.cli.runs.all_events import events
from app.cli.runs.bulk import OfBaseModel, OfMethod, WithStatus, WithTag, WithText, delete, stop, tag
from app.cli.runs.compare import compare
from app.cli.runs.logs import logs
from app.cli.runs.new_run import Watch, create, estimate, init, print_or_watch, validate
from app.cli.runs.postmortem import why
from app.cli.runs.run_request import Set
from app.cli.runs.state_text import eta_text, status_of, status_text

if TYPE_CHECKING:
    from anneal.contracts.field_types import GgufType
    from anneal.contracts.schemas.checkpoints import CheckpointRead
    from anneal.contracts.schemas.runs.reads import RunRead, RunSummary

commands = command_group("Training runs. Example: `anneal runs create -f run.yaml --watch`.")

OfCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Apply to this checkpoint instead of the run: its id or the beginning of it, or `last` for the newest.",
    ),
]

for command in (create, validate, estimate, init):
    commands.command()(command)


@commands.command("list")
def list_runs(
    experiment: OfExperiment = None,
    status: WithStatus = None,
    tag: WithTag = None,
    parent: ParentId = None,
    base_model: OfBaseModel = None,
    method: OfMethod = None,
    dataset: OfDataset = None,
    task: Annotated[RunTask | None, typer.Option(help="Only runs of this task.")] = None,
    search: WithText = None,
    sort: Annotated[
        RunSort | None,
        typer.Option(help="Order: newest first, running first, best first in each method, or by a value."),
    ] = None,
    order: Annotated[Literal["asc", "desc"] | None, typer.Option(help="Direction of an order by a value.")] = None,
    full: Annotated[bool, typer.Option("--full", help="With --json: also the configuration of each run.")] = False,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first unless --sort is given; with --sort best, the metric of each method is named.

    Example: `anneal runs list --status running --status pending --limit 10`
    """
    statuses = [status_of(word) for word in status or ()]
    with open_client() as client:
        runs = client.runs.list(
            experiment_id=experiment, status=statuses or None, tag=tag, parent_run_id=parent,
            base_model=base_model, method=method, task=task, dataset_id=dataset, search=search, sort=sort, order=order,
            full=full, limit=limit + 1, after=after,
        )  # fmt: skip
        shown_runs, has_more = split_page(runs, limit)
        title, measure_text = _measure_column(sort)
        rows = [
            (it.id, status_text(it.status), _steps_text(it), measure_text(it), it.name, eta_text(it.prediction) or None,
             it.created_at)
            for it in shown_runs
        ]  # fmt: skip
        print_listing(shown_runs, has_more, as_json, ("id", "status", "step", title, "name", "eta", "created"), rows)


def _steps_text(run: "RunSummary") -> str | None:
    """Format the progress of a training; evaluations and exports have no steps."""
    return f"{run.current_step}/{run.total_steps or '?'}" if run.task.saves_checkpoints else None


def _measure_column(sort: "RunSort | None") -> "tuple[str, Callable[[RunSummary], Any]]":
    """Return title and value of the column with the measure of each run: that by which they are ordered, if any."""
    if sort == "best":
        return "best of its method", _best_of_method
    if sort == "best_eval":
        return "best eval", lambda run: run.best_eval
    return "best loss", lambda run: run.best_loss


def _best_of_method(run: "RunSummary") -> str | None:
    """Format the value by which a run is compared with others of its method."""
    from anneal.contracts.methods import METHODS, RANKING_METRIC

    if run.best_eval is not None:
        metric = METHODS[run.method].eval_metric if run.task != RunTask.predict else RANKING_METRIC
        return f"{run.method} {metric} {value_text(run.best_eval)}"
    return None if run.best_loss is None else f"{run.method} loss {value_text(run.best_loss)}"


@commands.command()
def show(run_id: RunId, as_json: AsJson = False) -> None:
    """Show a run, what computes it, and the configuration fields that differ from the defaults.

    --json shows all fields, all run facts, and the alternatives to the planned step.

    Example: `anneal runs show run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    with open_client() as client:
        run = client.runs.get(run_id)
        if as_json:
            print_json(run)
            return
        from anneal.contracts.training_config.fields import TrainingConfig
        from app.cli.runs.run_facts import fact_lines, remark_lines

        config = _in_force(run)
        usual = {"base_model": None} | TrainingConfig(base_model="any").model_dump(mode="json", exclude={"base_model"})
        last = run.metrics_history[-1] if run.metrics_history else None
        print_details(
            {
                "id": run.id, "name": run.name, "task": run.task if run.task != RunTask.train else None,
                "status": status_text(run.status), "eta": _outlook_text(run),
                "waits because": run.pending_reason.message if run.pending_reason else None, "error": run.error_code,
                "message": run.error_message, "step": f"{run.current_step}/{run.total_steps or '?'}",
                "loss": last.loss if last else None, "best loss": run.best_loss,
                "best evaluation": run.best_eval, **(run.evaluation or {}), "attempt": run.attempt,
                "model": run.fine_tuned_model, "checkpoint": run.checkpoint_path, "parent": run.parent_run_id,
                "resume": _resume_fidelity(run),
                "uses": run.base_run_id if run.task.is_inference else None,
                "estimated memory": _estimated_memory(run), "measured memory": _measured_memory(run),
                **fact_lines(run), **remark_lines(run), "needs": _needs_text(run), "experiment": run.experiment_id,
                "tags": run.tags, "pinned": run.pinned or None,
                "dataset": run.dataset_id, "eval dataset": run.eval_dataset_id,
                **{f"eval dataset {name}": id for name, id in run.extra_eval_datasets.items()}, "worker": run.worker_id,
                "created": run.created_at, "started": run.started_at, "finished": run.finished_at,
                **{f"config.{name}": value for name, value in config.items() if value != usual.get(name)},
            }
        )  # fmt: skip


def _in_force(run: "RunRead") -> dict[str, Any]:
    """Return the requested configuration with the values in force of the fields that live actions change."""
    from anneal.contracts.schemas.actions import CHANGED_BY_ACTIONS

    effective = run.effective_config or {}
    changed = {name: effective[name] for name in CHANGED_BY_ACTIONS if name in effective}
    return {**run.config, **changed}


def _resume_fidelity(run: "RunRead") -> str | None:
    """Format whether the newest attempt continued its checkpoint exactly; None for a run without one."""
    from app.cli.runs.watch import resume_fidelity

    is_resumed = run.resume_checkpoint_id is not None or run.attempt > 1
    return resume_fidelity(run.facts) if run.facts and is_resumed and run.task == RunTask.train else None


def _needs_text(run: "RunRead") -> str | None:
    """Format the requirements on a device."""
    needs = run.requirements
    kind = needs.kind or ("cuda, cpu without one" if needs.prefers_gpu else None)
    devices, hosts = run.resources.devices, run.resources.hosts
    parts = (
        f"{devices} devices" + (f" on {hosts} hosts" if hosts > 1 else "") if devices > 1 else None,
        kind,
        needs.gpu,
        _least_memory(run),
        f"labels {', '.join(needs.labels)}" if needs.labels else None,
        "model divided among the devices" if needs.sharded else None,
        f"{needs.sequence_parallel} of them share each sequence" if needs.sequence_parallel > 1 else None,
        f"{needs.expert_parallel} of them share the experts" if needs.expert_parallel > 1 else None,
        f"GGUF converter{' and quantizer' if needs.gguf_quantizer else ''}" if needs.gguf else None,
    )
    return "; ".join(part for part in parts if part) or None


def _least_memory(run: "RunRead") -> str | None:
    """Format the memory that a device must have, with its source: it may be less than the estimated memory."""
    needs = run.requirements
    if needs.memory_mb is not None:
        return f"device memory of at least {needs.memory_mb:,} MiB (requested)"
    if not needs.estimated_mb:
        return None
    repairs = run.config.get("on_out_of_memory") == "repair"
    source = "estimate of its smallest micro-batch, to which repairs lead" if repairs else "estimate"
    return f"device memory of at least {max(needs.estimated_mb.values()):,} MiB ({source})"


def _estimated_memory(run: "RunRead") -> str | None:
    """Format the estimated memory of a step."""
    if run.estimate is None or run.estimate.memory_mb is None:
        return None
    context = ", including the CUDA context" if run.estimate.device.kind == "cuda" else ""
    return f"{run.estimate.memory_mb['total']:,.0f} MiB at the peak of a step{context}"


def _measured_memory(run: "RunRead") -> str | None:
    """Format the measured memory; on a GPU, where the allocator reserves memory, that of tensors."""
    if run.measured is None or run.measured.peak_memory_mb is None:
        return None
    context = ", without the CUDA context" if run.measured.reserved_memory_mb is not None else ""
    return f"{run.measured.peak_memory_mb:,.0f} MiB at the peak{context}"


def _outlook_text(run: "RunRead") -> str | None:
    """Format the prediction with its confidence and basis; `waits because` replaces one without a time."""
    prediction = run.prediction
    if prediction is None or (run.pending_reason is not None and not eta_text(prediction)):
        return None
    return f"{eta_text(prediction) or 'unknown'} ({prediction.confidence} confidence: {prediction.basis})"


@commands.command()
def edit(
    run_id: RunId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="Tag that replaces the present tags; repeatable.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=-1000, max=1000, help="New priority; runs with higher priority start first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the name, the tags or the priority of a run.

    Example: `anneal runs edit run_01k3x9m6q2v8s4t0w7y5z1a3b6 --name baseline --tag keep --priority 10`
    """
    with open_client() as client:
        report_changed(client.runs.update(run_id, name=name, tags=tags, priority=priority), as_json)


def _set_pin(run_id: str, checkpoint: str | None, pinned: bool, as_json: bool) -> None:
    with open_client() as client:
        if checkpoint is None:
            changed: Any = client.runs.update(run_id, pinned=pinned)
        else:
            checkpoint = id_within("checkpoint", checkpoint, client.runs.checkpoints(run_id))
            changed = client.runs.update_checkpoint(run_id, checkpoint, pinned=pinned)
        if as_json:
            print_json(changed)
    print_note(f"{checkpoint or run_id} is {'pinned' if pinned else 'no longer pinned'}.")


@commands.command()
def pin(run_id: RunId, checkpoint: OfCheckpoint = None, as_json: AsJson = False) -> None:
    """Exempt a run or one of its checkpoints from automatic deletion; a pinned run cannot be deleted.

    Example: `anneal runs pin run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    _set_pin(run_id, checkpoint, True, as_json)


@commands.command()
def unpin(run_id: RunId, checkpoint: OfCheckpoint = None, as_json: AsJson = False) -> None:
    """Unpin a run or checkpoint, so that retention applies to it again.

    Example: `anneal runs unpin run_01k3x9m6q2v8s4t0w7y5z1a3b6 --checkpoint ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8`
    """
    _set_pin(run_id, checkpoint, False, as_json)


@commands.command()
def watch(run_id: RunId, as_json: AsJson = False) -> None:
    """Watch a run to its end. Exit code: 0 completed, 3 failed, 4 stopped. Ctrl-C does not stop the run.

    Shows a progress bar and a plot of the loss on a terminal, and plain lines elsewhere. With --json, prints one line
    per event, starting from the first event.

    Example: `anneal runs watch run_01k3x9m6q2v8s4t0w7y5z1a3b6 && echo done`
    """
    from app.cli.runs.watch import watch_run

    with open_client() as client:
        raise typer.Exit(watch_run(client, client.runs.get(run_id), as_json))


@commands.command()
def resume(
    run_id: RunId,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Checkpoint to resume from: its folder, its id or the beginning of it. Default: the newest."),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Restart from the first step, without a checkpoint.")
    ] = False,
    stop_after_steps: Annotated[
        int | None, typer.Option(min=1, max=100_000_000, help="Save and stop after so many further steps.")
    ] = None,
    sets: Set = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """Resume an ended run as a new run and print the new id.

    Exit code with --watch: 0 completed, 3 failed, 4 stopped.

    Example: `anneal runs resume run_01k3x9m6q2v8s4t0w7y5z1a3b6 --set config.epochs=2 --watch`
    """
    from app.cli.runs import run_file

    with open_client() as client:
        changes = run_file.set_values({}, sets or [])
        config, resources = changes.pop("config", {}), changes.pop("resources", None)
        if changes:
            name = next(iter(changes))
            raise typer.BadParameter(
                f"Only the configuration and the resources can be changed: write --set config.{name}=…."
            )
        path = checkpoint if checkpoint is not None and "/" in checkpoint else None
        if checkpoint is not None and path is None:
            checkpoint = id_within("checkpoint", checkpoint, client.runs.checkpoints(run_id))
        with option_hint("no_checkpoint", "On the command line, use --from-start."):
            run = client.runs.resume(
                run_id,
                checkpoint_id=None if path else checkpoint,
                checkpoint_path=path,
                from_start=from_start,
                config=config,
                stop_after_steps=stop_after_steps,
                resources=resources,
            )
        print_or_watch(client, run, watch, as_json)


@commands.command()
def checkpoints(run_id: RunId, limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, newest first.

    Example: `anneal runs checkpoints run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    with open_client() as client:
        checkpoints_page, has_more = split_page(client.runs.checkpoints(run_id, limit=limit + 1, after=after), limit)
        rows = [
            (it.id, it.step, f"{it.kind}{', pinned' if it.pinned else ''}", it.metrics.get("loss"),
             _evaluation_text(it), format_size(it.bytes), it.created_at)
            for it in checkpoints_page
        ]  # fmt: skip
        print_listing(
            checkpoints_page, has_more, as_json, ("id", "step", "kind", "loss", "evaluation", "size", "created"), rows
        )


@commands.command()
def export(
    run_id: RunId,
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint to export: its id or the beginning of it, or `last` for the newest.")
    ] = "last",
    output: Annotated[
        Literal["adapter", "merged"] | None, typer.Option(help="The adapter alone, or merged into its base model.")
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Also write `model.gguf` with weights of this type, usually Q4_K_M; an adapter is merged for it.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint of an ended run: create a run whose output is the model, and print its id.

    Works for runs that completed, failed or were stopped. The new run can be downloaded, and can be the base model of
    other runs. Exit code with --watch: 0 completed, 3 failed, 4 stopped.

    Example: `anneal runs export run_01k3x9m6q2v8s4t0w7y5z1a3b6 --gguf Q4_K_M --watch`
    """
    with open_client() as client:
        chosen = id_within("checkpoint", checkpoint, client.runs.checkpoints(run_id))
        gguf_type = cast("GgufType | None", gguf)  # the server checks it
        export_run = client.runs.export_checkpoint(run_id, chosen, output=output, gguf=gguf_type, name=name)
        print_or_watch(client, export_run, watch, as_json)


def _evaluation_text(checkpoint: "CheckpointRead") -> str | None:
    """Format the evaluation of exactly these weights; marks the best checkpoint of the run."""
    measured = (name for name in ("eval_loss", "eval_reward") if checkpoint.metrics.get(name) is not None)
    name = next(measured, None)
    best = " (best)" if checkpoint.is_best else ""
    return f"{name} {value_text(checkpoint.metrics[name])}{best}" if name else None


@commands.command()
def download(
    run_id: RunId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Target folder. Default: named after the run, and the attempt."),
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--path", help="Only files that match, e.g. *.json; repeatable.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Download this checkpoint instead, as a tar archive: its id or the beginning, or `last`."),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, help="Download the records of this attempt instead: metrics, memory profile, TensorBoard."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download the fine-tuned model of a run and print the folder; resumes an interrupted download.

    Example: `anneal runs download run_01k3x9m6q2v8s4t0w7y5z1a3b6 -o my-adapter`
    """
    if checkpoint is not None and (paths or attempt is not None):
        raise typer.BadParameter("A checkpoint is downloaded whole: leave out --path and --attempt.")
    with open_client() as client:
        if checkpoint is not None:
            chosen = id_within("checkpoint", checkpoint, client.runs.checkpoints(run_id))
            file = client.runs.download_checkpoint(run_id, chosen, output)
            if as_json:
                print_json({"file": str(file)})
            else:
                print_text(file)
            return
        total = sum(artifact.bytes for artifact in client.runs.artifacts(run_id, attempt=attempt))
        with show_transfer(run_id, total) as update:
            received: dict[str, int] = {}

            def on_progress(path: str, done: int, _: int) -> None:
                received[path] = done
                update(sum(received.values()))

            folder = client.runs.download(
                run_id, output, paths=paths or (), attempt=attempt, on_progress=on_progress if update else None
            )
        if as_json:
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            print_json({"folder": str(folder), "files": files})
        else:
            print_text(folder)


commands.command()(logs)
commands.command()(why)
commands.command()(compare)
commands.command()(stop)
commands.command()(delete)
commands.command()(tag)
commands.command(context_settings={"allow_extra_args": True})(events)
