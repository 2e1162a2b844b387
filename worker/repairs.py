"""What another attempt of a run is to do otherwise than the one that failed, so that the run may go on by itself.

A repair is remembered with the attempt that it follows from (`run_attempts.report`), so every later attempt knows all
of them, on whichever worker it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, select

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

    def stored(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def repair_for(config: Mapping[str, Any], phase: str, code: str, found: Mapping[str, Any] | None) -> Repair | None:
    """How a run that failed with `code` can go on; None: it cannot, or was not to.

    `config` is what the attempt really used, `found` what the trainer proposes by itself.
    """
    if found is not None:
        step = int(found["step"])
        said = "the loss leapt" if found["kind"] == "loss_spike" else "loss or gradients were no number"
        return Repair(
            str(found["kind"]),
            f"{said} at step {step}: back to the last checkpoint, and past that step",
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
    """The repairs of a run so far, in order, each with the `attempt` it followed from and that one's `start_step`."""
    rows = connection.execute(
        select(Attempt.attempt, Attempt.start_step, Attempt.report)
        .where(Attempt.run_id == run_id, Attempt.report["repair"].is_not(None))
        .order_by(Attempt.attempt)
    )
    return [
        {**row.report["repair"], "attempt": row.attempt, "start_step": row.start_step or 0}
        for row in rows
        if row.report.get("repair")
    ]


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


def spoilt_steps(repairs: Sequence[Mapping[str, Any]], attempt: int) -> set[int]:
    """Steps of checkpoints that `attempt` is not to take up the run at.

    Whoever went back and met trouble again before another checkpoint goes back further: that one may be spoilt.
    """
    rewinds = {one["attempt"]: int(one["start_step"]) for one in repairs if one["kind"] != OUT_OF_MEMORY}
    spoilt = set()
    while attempt - 1 in rewinds and attempt - 2 in rewinds:
        attempt -= 1
        spoilt.add(rewinds[attempt])
    return spoilt


def _smaller(config: Mapping[str, Any], phase: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What trains the same in less memory, and the values before; None: nothing is left to change."""
    batch = int(config["batch_size"])
    if phase == "evaluating":
        at_once = int(config.get("extra", {}).get("eval_batch_size") or batch)
        return ({"extra.eval_batch_size": at_once // 2}, {"extra.eval_batch_size": at_once}) if at_once > 1 else None
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
