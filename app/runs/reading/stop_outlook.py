"""Expected result of a stop: how long a save takes, and whether the grace period is enough for it."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.run_status import TERMINAL
from anneal.contracts.schemas.runs.reads import StopOutlook
from anneal.contracts.stop import StopMode
from app.runs.state.checkpoints.service import best_good, furthest_good, slowest_save
from app.tables.runs import AttemptTimings, Run


async def describe_stop(
    session: AsyncSession, run: Run, requested_mode: StopMode, grace_seconds: float, *, found_no_best: bool = False
) -> StopOutlook:
    """Describe the stop that is in effect on `run`, after a request with the mode `requested_mode`.

    `found_no_best` means that the best checkpoint was requested, and there is none.
    """
    mode = run.stop_mode or requested_mode
    seconds = await slowest_save(session, run.id)
    saves = mode in ("checkpoint", "epoch_end") and run.status in ("running", "checkpointing")
    needed = await _needed_seconds(session, run, seconds) if saves and seconds is not None else None
    suffices = needed <= grace_seconds if needed is not None else None
    parts = []
    if found_no_best and mode == "checkpoint" and saves:
        parts.append("No evaluation has found a best checkpoint yet, so the current state is saved.")
    elif requested_mode != mode and run.status not in TERMINAL:
        parts.append(f"An earlier stop with mode `{mode}` remains in effect.")
    if run.status in TERMINAL:
        parts.append(f"The run is {run.status}.")
    elif run.status == "initializing" and mode != "epoch_end":
        parts.append("It has not started training, so there is nothing to save: it ends at once.")
    else:
        parts.append(await _what_comes(session, run, mode))
        if saves:
            parts.append(await _how_long(session, run, mode, seconds, needed, grace_seconds))
    return StopOutlook(
        mode=mode,
        save_seconds=seconds,
        grace_seconds=grace_seconds,
        grace_suffices=suffices,
        message=" ".join(parts),
    )


async def _needed_seconds(session: AsyncSession, run: Run, save_seconds: float) -> float:
    """Return the seconds that a stop may take: the current step, a checkpoint in progress, and the last one."""
    timings = await session.scalar(
        select(AttemptTimings.timings).where(AttemptTimings.run_id == run.id, AttemptTimings.attempt == run.attempt)
    )
    step_seconds = (timings or {}).get("step_seconds") or 0.0
    return float(step_seconds) + 2 * save_seconds


async def _what_comes(session: AsyncSession, run: Run, mode: StopMode) -> str:
    if mode == "discard":
        return "It ends at once and saves nothing."
    if mode == "best":
        best = await best_good(session, run.id)
        where = f"the best checkpoint, of step {best.step}" if best else "its last checkpoint"
        return (
            "It ends at once and saves nothing except a checkpoint that is being written; when resumed, it continues "
            f"from {where}, or from that one if it is better."
        )
    if mode == "epoch_end":
        return (
            "It trains to the end of its epoch, saves a checkpoint and ends; a stop with another mode ends it at once."
        )
    return "It saves a checkpoint and ends."


async def _how_long(
    session: AsyncSession,
    run: Run,
    mode: StopMode,
    seconds: float | None,
    needed: float | None,
    grace_seconds: float,
) -> str:
    if seconds is None or needed is None:
        return f"How long a save takes is not known yet; the grace period is {grace_seconds:g} s."
    took = f"Its saves took up to {seconds:.1f} s"
    if mode == "epoch_end":
        # The trainer is not killed while it trains on: the grace period starts with an immediate stop.
        return f"{took}."
    if needed <= grace_seconds:
        return (
            f"{took}; with the current step and a save in progress, the stop takes {needed:.1f} of {grace_seconds:g} s."
        )
    last = await furthest_good(session, run.id)
    step = f"step {last.step}, its last checkpoint" if last else "the start"
    return (
        f"{took}; with the current step and a save in progress, the stop may take {needed:.1f} s, but the trainer is "
        f"killed after {grace_seconds:g} s. This save may fail, and the progress since {step} may be lost. "
        "A further stop with `deadline_seconds` gives it more time. Next time, raise ANNEAL_LEASE_SECONDS (the grace "
        "period is twice the lease) or use mode `epoch_end`."
    )
