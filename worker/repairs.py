"""What another attempt of a run is to do otherwise than the one that failed, so that the run may go on by itself.

A repair is remembered with the attempt that it follows from (`run_attempts.report`), so every later attempt knows all
of them, on whichever worker it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Executable, exists, func, select
from sqlalchemy.orm import aliased

from app.checkpoints import retention
from app.checkpoints.models import Checkpoint
from app.runs.models import Attempt

OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Repair:
    """One repair; `asdict` is how it is stored, and what the event `repair` says."""

    kind: str
    """out_of_memory, non_finite or loss_spike."""
    reason: str
    """A sentence for people."""
    step: int | None = None
    """The step that is passed over from now on."""
    rows: list[int] = field(default_factory=list)
    """Rows of the data set of which that step is made, from 0."""
    singled_out: list[int] = field(default_factory=list)
    """Those of them that go wrong by themselves: no later step may hold one."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration and their new values; `extra.…` for those within that group."""
    instead_of: dict[str, Any] = field(default_factory=dict)
    """The values before."""
    back_to: str | None = None
    """The checkpoint from which the run goes on; none where it is the start."""
    spoilt: str | None = None
    """The checkpoint behind which there was trouble too often; nobody goes on from there any more."""

    def stored(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def planned(connection: Connection, run: Any, repair: Repair) -> Repair:
    """A repair as it is stored and told: one that leads back also says to which checkpoint, `back_to`.

    Whoever went back to a checkpoint, and meets trouble again before there is another one, goes back further, if no row
    stood out either time: then the weights may be spoilt, and nobody is to take up the run there any more (`spoilt`).
    Not so where that is the last good one, or pinned: rows are passed over behind it, until it has been often enough.

    To be called once everything is stored that the trainer told of.
    """
    if repair.step is None:
        return repair
    good = list(connection.execute(_behind(run, repair.step)).all())
    if not good:
        start = "what the run was resumed from" if run.resume_checkpoint_id else "the start"
        return replace(repair, reason=_back(repair, start))
    here, *before = good
    if not (before and not here.pinned and not repair.singled_out and _came_from(connection, run, here)):
        return replace(repair, reason=_back(repair, f"the checkpoint of step {here.step}"), back_to=here.id)
    why = f"training met trouble twice behind that of step {here.step}, and no row stood out"
    reason = _back(repair, f"the checkpoint of step {before[0].step} ({why})")
    return replace(repair, reason=reason, back_to=before[0].id, spoilt=here.id)


def _behind(run: Any, step: int) -> Executable:
    """The two checkpoints that an attempt has behind it at this step: its own, or those that it may have begun from."""
    columns = (Checkpoint.id, Checkpoint.step, Checkpoint.pinned)
    found: Executable = retention.good(run.id, below_step=step).with_only_columns(*columns).limit(2)  # type: ignore[attr-defined]
    return found


def _came_from(connection: Connection, run: Any, checkpoint: Any) -> bool:
    """Whether this attempt began at a checkpoint that an earlier one was led back to without a row that stood out."""
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


def _back(repair: Repair, where: str) -> str:
    return f"{repair.reason}: back to {where}, and past that step"


def remember(connection: Connection, run: Any, repair: Mapping[str, Any]) -> None:
    """Let nobody take up the run where a repair (as `planned`) says that its weights may be spoilt."""
    if repair["spoilt"]:
        why = "training met trouble twice behind it, without another checkpoint in between, and no row stood out"
        connection.execute(retention.mark_bad(repair["spoilt"], why, run.id, run.epoch))


def repair_for(config: Mapping[str, Any], phase: str, code: str, found: Mapping[str, Any] | None) -> Repair | None:
    """How a run that failed with `code` can go on; None: it cannot, or was not to.

    `config` is what the attempt really used, `found` what the trainer proposes by itself.
    """
    if found is not None:
        step = int(found["step"])
        said = "the loss leapt" if found["kind"] == "loss_spike" else "loss or gradients were no number"
        return Repair(
            str(found["kind"]),
            f"{said} at step {step}",
            step,
            [int(row) for row in found["rows"]],
            [int(row) for row in found["singled_out"]],
        )
    if code != OUT_OF_MEMORY or config.get("on_out_of_memory") != "repair":
        return None
    smaller = _smaller(config, phase)
    if smaller is None:
        return None
    changes, instead_of = smaller
    told = ", ".join(f"{name} {value} instead of {instead_of[name]}" for name, value in changes.items())
    return Repair(OUT_OF_MEMORY, f"out of memory while {phase}: {told}", changes=changes, instead_of=instead_of)


def earlier(connection: Connection, run_id: str) -> list[dict[str, Any]]:
    """The repairs of a run so far, in order."""
    rows = connection.execute(
        select(Attempt.report)
        .where(Attempt.run_id == run_id, Attempt.report["repair"].is_not(None))
        .order_by(Attempt.attempt)
    )
    return [row.report["repair"] for row in rows if row.report.get("repair")]


def apply(config: Mapping[str, Any], repairs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """The configuration as repaired, and the names of the fields that were changed."""
    repaired, names = dict(config), set()
    for name, value in (change for one in repairs for change in one["changes"].items()):
        group, _, member = name.rpartition(".")
        if group:
            repaired[group] = {**repaired.get(group, {}), member: value}
        else:
            repaired[name] = value
        names.add(name)
    return repaired, names


def _smaller(config: Mapping[str, Any], phase: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What trains the same in less memory, and the values before; None: nothing is left to change."""
    batch = int(config["batch_size"])
    if phase == "evaluating":
        at_once = int(config.get("extra", {}).get("eval_batch_size") or batch)
        # The completions of a prompt stay together.
        together = int(config["rlhf"]["num_generations"]) if config.get("method") == "rlhf" else 1
        fewer = at_once // 2 // together * together
        return ({"extra.eval_batch_size": fewer}, {"extra.eval_batch_size": at_once}) if fewer else None
    if phase not in ("training", "saving"):
        return None  # loading does not depend on how much is trained on at once
    if batch > 1:
        # As many rows in each step as before: whatever divides the one multiplies the other.
        factor = next(number for number in range(2, batch + 1) if batch % number == 0)
        micro_batches = int(config["gradient_accumulation_steps"])
        return (
            {"batch_size": batch // factor, "gradient_accumulation_steps": micro_batches * factor},
            {"batch_size": batch, "gradient_accumulation_steps": micro_batches},
        )
    if config.get("gradient_checkpointing") is not True:
        return {"gradient_checkpointing": True}, {"gradient_checkpointing": config.get("gradient_checkpointing")}
    return None
