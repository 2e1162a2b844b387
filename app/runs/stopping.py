"""What to expect of a stop: how long a save takes, and whether the grace suffices for it."""

from sqlalchemy.ext.asyncio import AsyncSession

from app.checkpoints.service import best_good, furthest_good, slowest_save
from app.runs.models import TERMINAL, Run
from app.runs.schemas import StopMode, StopOutlook


async def outlook(session: AsyncSession, run: Run, asked: StopMode, grace_seconds: float) -> StopOutlook:
    """What comes of the stop that is in force on `run`, after one with the mode `asked` was asked for."""
    mode: StopMode = "checkpoint"
    if run.stop_mode in ("epoch_end", "best", "discard"):
        mode = run.stop_mode  # type: ignore[assignment]
    seconds = await slowest_save(session, run.id)
    saves = mode in ("checkpoint", "epoch_end")
    suffices = seconds <= grace_seconds if saves and seconds is not None else None
    parts = []
    if asked == "best" and mode == "checkpoint":
        parts.append("No evaluation has found a best checkpoint yet, so the present state counts.")
    if run.status in TERMINAL:
        parts.append(f"The run is {run.status}.")
    else:
        parts.append(await _what_comes(session, run, mode))
        if saves:
            parts.append(await _how_long(session, run, mode, seconds, grace_seconds))
    return StopOutlook(
        mode=mode,
        save_seconds=seconds,
        grace_seconds=grace_seconds,
        grace_suffices=suffices,
        message=" ".join(parts),
    )


async def _what_comes(session: AsyncSession, run: Run, mode: StopMode) -> str:
    if mode == "discard":
        return "It ends at once and saves nothing."
    if mode == "best":
        best = await best_good(session, run.id)
        where = f"the best checkpoint, of step {best.step}" if best else "its last checkpoint"
        return f"It ends at once and saves nothing; to resume it goes on from {where}."
    if mode == "epoch_end":
        return "It trains to the end of its epoch, saves a checkpoint and ends; a stop of another mode ends it at once."
    return "It saves a checkpoint and ends."


async def _how_long(
    session: AsyncSession, run: Run, mode: StopMode, seconds: float | None, grace_seconds: float
) -> str:
    if seconds is None:
        return f"How long a save takes is not known yet; there are {grace_seconds:g} s for it."
    if mode == "epoch_end":
        # Nothing is killed while it trains on: the grace counts from a stop that ends it at once.
        return f"Its saves took up to {seconds:.1f} s."
    if seconds <= grace_seconds:
        return f"Its saves took up to {seconds:.1f} s of the {grace_seconds:g} s that there are."
    last = await furthest_good(session, run.id)
    step = f"step {last.step}, its last checkpoint" if last else "the start"
    return (
        f"Its saves took up to {seconds:.1f} s, and after {grace_seconds:g} s the trainer is killed: this save may "
        f"come to nothing, and what lies behind {step}, be lost. For the next time raise "
        "ANNEAL_LEASE_SECONDS (the grace is twice the lease) or ask for the mode `epoch_end`."
    )
