"""Automatic repairs: what the next attempt of a failed run does differently, so that the run continues by itself.

A repair is stored with the attempt that it follows (`run_attempts.report`), so every later attempt knows all of them,
on whichever worker it runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable, exists, func, select
from sqlalchemy.orm import aliased

from anneal.contracts.attempt.messages import RepairProposal
from anneal.contracts.attempt.repair import Repair
from anneal.contracts.methods import method_of, options_of, predict_options
from app.runs.state.checkpoints import retention
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Attempt
from worker.claimed_run import ClaimedRun

OUT_OF_MEMORY = "out_of_memory"
_TOKENS = "extra.predict.batch_tokens"


def resolve_repair(connection: Connection, run: ClaimedRun, repair: Repair) -> Repair:
    """Complete a repair before it is stored and reported: one that rewinds also names the checkpoint, `back_to`.

    If an attempt that went back to a checkpoint meets another anomaly before it has saved the next one, it goes back
    further, provided that no row was singled out either time: the weights may be corrupt, and no run resumes from that
    checkpoint any more (`corrupt_checkpoint`). If it is the last good one, or pinned, the rows after it are
    skipped instead, until the number of repairs reaches its limit.

    Call this once everything that the trainer reported is stored.
    """
    if repair.step is None:
        return repair
    good = list(connection.execute(_checkpoints_before(run, repair.step)).all())
    if not good:
        start = "the checkpoint that the run was resumed from" if run.resume_checkpoint_id else "the start"
        return repair.model_copy(update={"reason": _rewind_reason(repair, start)})
    here, *before = good
    if not (before and not here.pinned and not repair.singled_out and _started_at_rewind(connection, run, here)):
        return repair.model_copy(
            update={"reason": _rewind_reason(repair, f"the checkpoint of step {here.step}"), "back_to": here.id}
        )
    why = f"anomalies occurred twice after that of step {here.step}, and no row was singled out"
    reason = _rewind_reason(repair, f"the checkpoint of step {before[0].step} ({why})")
    return repair.model_copy(update={"reason": reason, "back_to": before[0].id, "corrupt_checkpoint": here.id})


def _checkpoints_before(run: ClaimedRun, step: int) -> Executable:
    """Select the two latest checkpoints before this step: the attempt's own, or those that it may have started from."""
    columns = (Checkpoint.id, Checkpoint.step, Checkpoint.pinned)
    statement: Executable = retention.select_restorable(run.id, below_step=step).with_only_columns(*columns).limit(2)  # type: ignore[attr-defined]
    return statement


def _started_at_rewind(connection: Connection, run: ClaimedRun, checkpoint: Any) -> bool:
    """Return True if this attempt started at a checkpoint to which an earlier one went back with no row singled out."""
    this = (Attempt.run_id == run.id, Attempt.attempt == run.attempt, Attempt.start_step == checkpoint.step)
    earlier = aliased(Attempt)
    repair = earlier.report["repair"]
    before = exists().where(
        earlier.run_id == run.id,
        earlier.attempt < run.attempt,
        repair["back_to"].astext == checkpoint.id,
        func.jsonb_array_length(repair["singled_out"]) == 0,
    )
    return bool(connection.scalar(select(exists().where(*this, before))))


def _rewind_reason(repair: Repair, where: str) -> str:
    return f"{repair.reason}: back to {where}, skipping that step"


def mark_checkpoint_corrupt(connection: Connection, run: ClaimedRun, repair: Repair) -> None:
    """Mark the checkpoint that a repair (as `resolve_repair`) names as corrupt, so that no run resumes from it."""
    if repair.corrupt_checkpoint:
        why = "anomalies occurred twice after it, without another checkpoint in between, and no row was singled out"
        connection.execute(retention.mark_corrupt(repair.corrupt_checkpoint, why, run.id, run.lease_epoch))


def propose_repair(config: Mapping[str, Any], phase: str, code: str, proposal: RepairProposal | None) -> Repair | None:
    """Return a repair for a run that failed with `code`; None if there is none, or repairs are disabled.

    `config` is what the attempt actually used, `found` what the trainer itself proposes.
    """
    if proposal is not None:
        step = proposal["step"]
        anomaly = "the loss spiked" if proposal["kind"] == "loss_spike" else "loss or gradients were non-finite"
        return Repair(
            kind=proposal["kind"],
            reason=f"{anomaly} at step {step}",
            step=step,
            rows=proposal["rows"],
            singled_out=proposal["singled_out"],
        )
    if code != OUT_OF_MEMORY or config.get("on_out_of_memory") != "repair":
        return None
    saving = _memory_saving_changes(config, phase)
    if saving is None:
        return None
    changes, instead_of = saving
    changed = ", ".join(f"{name} {value} instead of {instead_of[name]}" for name, value in changes.items())
    reason = f"out of memory while {phase}: {changed}"
    return Repair(kind=OUT_OF_MEMORY, reason=reason, changes=changes, instead_of=instead_of)


def previous_repairs(connection: Connection, run_id: str) -> list[Repair]:
    """Return the repairs of a run so far, in order."""
    rows = connection.execute(
        select(Attempt.report)
        .where(Attempt.run_id == run_id, Attempt.report["repair"].is_not(None))
        .order_by(Attempt.attempt)
    )
    return [Repair.model_validate(row.report["repair"]) for row in rows if row.report.get("repair")]


def apply_repairs(config: Mapping[str, Any], repairs: Sequence[Repair]) -> tuple[dict[str, Any], set[str]]:
    """Return the repaired configuration and the names of the changed fields."""
    repaired, names = dict(config), set()
    for name, value in (change for one in repairs for change in one.changes.items()):
        *groups, member = name.split(".")
        place = repaired
        for group in groups:
            place[group] = dict(place.get(group, {}))
            place = place[group]
        place[member] = value
        names.add(name)
    return repaired, names


def _memory_saving_changes(config: Mapping[str, Any], phase: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return changes that train the same with less memory, and the previous values; None if there are none."""
    batch = int(config["batch_size"])
    if phase == "evaluating":
        at_once = int(config.get("extra", {}).get("eval_batch_size") or batch)
        # The completions of a prompt stay together.
        together = int(options_of(config)["num_generations"]) if method_of(config).generates else 1
        fewer = at_once // 2 // together * together
        return ({"extra.eval_batch_size": fewer}, {"extra.eval_batch_size": at_once}) if fewer else None
    if phase == "predicting" and (options := predict_options(config)) and options["batch_tokens"] is not None:
        fewer_tokens, tokens = int(options["batch_tokens"]) // 2, int(options["batch_tokens"])
        # Fewer tokens than one answer may have make the batches no smaller.
        return ({_TOKENS: fewer_tokens}, {_TOKENS: tokens}) if fewer_tokens >= options["max_new_tokens"] else None
    if phase not in ("training", "saving"):
        return None  # loading does not depend on the batch size
    most = batch // method_of(config).min_batch_size
    # As many rows per step as before: the factor that divides one value multiplies the other.
    if factor := next((number for number in range(2, most + 1) if batch % number == 0), None):
        micro_batches = int(config["gradient_accumulation_steps"])
        return (
            {"batch_size": batch // factor, "gradient_accumulation_steps": micro_batches * factor},
            {"batch_size": batch, "gradient_accumulation_steps": micro_batches},
        )
    if config.get("gradient_checkpointing") is not True:
        return {"gradient_checkpointing": True}, {"gradient_checkpointing": config.get("gradient_checkpointing")}
    return None
