"""`anneal runs estimate`: what a run would take, as tables and sentences."""

from typing import TYPE_CHECKING

from app.commands.console import details, note, table

if TYPE_CHECKING:
    from app.estimates.schemas import EstimatedDevice, RunEstimate


def show(estimate: "RunEstimate") -> None:
    """The figures on standard output; assumptions and what is not known as notes beside them."""
    for reason in dict.fromkeys(item.reason for item in estimate.unknown):
        note(f"Not known: {reason}")
    counts, cost = estimate.parameters, estimate.cost
    trainable = f"{counts.trainable:,} of {counts.total:,}" if counts else None
    details(
        {
            "device": _named(estimate.device),
            "trains": trainable and f"{trainable} parameters",
            "steps": estimate.steps,
            "tokens": None if estimate.tokens is None else f"{estimate.tokens:,}",
            "time": _time(estimate.seconds) and f"{_time(estimate.seconds)} ({estimate.confidence.seconds})",
            "cost": cost and f"{cost.amount:g} {cost.currency}",
            "recomputes": estimate.gradient_checkpointing,
        }
    )
    if estimate.memory_mb:
        rows = [
            (name.replace("_", " "), f"{value:,.1f}")
            for name, value in estimate.memory_mb.items()
            if value or name == "total"
        ]
        table(("memory", "MiB"), rows)
    if estimate.fits:
        answers = {True: "yes", False: "no", None: "?"}
        table(
            ("device", "fits", "MiB", "what to know"),
            [
                (
                    _named(fit.device),
                    answers[fit.fits],
                    "-" if fit.total_mb is None else f"{fit.total_mb:,.0f}",
                    " ".join([fit.reason, *fit.advice]),
                )
                for fit in estimate.fits
            ],
        )
    for sentence in estimate.assumptions:
        note(f"  {sentence}")


def _named(device: "EstimatedDevice") -> str:
    memory = "" if device.memory_mb is None else f", {device.memory_mb:,} MiB"
    return f"{device.name or device.kind}{memory}"


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
