"""Output of `anneal runs estimate`: tables and notes."""

from typing import TYPE_CHECKING

from app.cli.console import print_details, print_note, print_table, print_text
from app.cli.runs.watch import exit_code, watch_run

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.estimates import Estimated, EstimatedDevice, Measured, ProbeResult, RunEstimate


def print_estimate(estimate: "RunEstimate") -> None:
    """Print the numbers on standard output; print assumptions and unknowns on standard error."""
    for reason in dict.fromkeys(item.reason for item in estimate.unknown):
        print_note(f"Unknown: {reason}")
    counts, cost = estimate.parameters, estimate.cost
    trainable = f"{counts.trainable:,} of {counts.total:,}" if counts else None
    print_details(
        {
            "device": _device_text(estimate.device),
            "trainable": trainable and f"{trainable} parameters",
            "steps": estimate.steps,
            "tokens": None if estimate.tokens is None else f"{estimate.tokens:,}",
            "time": _format_time(estimate.seconds)
            and f"{_format_time(estimate.seconds)} ({estimate.confidence.seconds})",
            "cost": cost and f"{cost.amount:g} {cost.currency}",
            "gradient checkpointing": estimate.gradient_checkpointing,
        }
    )
    if estimate.memory_mb:
        rows = [
            (name.replace("_", " "), f"{value:,.1f}")
            for name, value in estimate.memory_mb.items()
            if value or name == "total"
        ]
        print_table(("MEMORY", "MiB"), rows)
    if estimate.fits:
        answers = {True: "yes", False: "no", None: "?"}
        print_table(
            ("DEVICE", "FITS", "MiB", "NOTES"),
            [
                (
                    _device_text(fit.device),
                    answers[fit.fits],
                    "-" if fit.total_mb is None else f"{fit.total_mb:,.0f}",
                    " ".join([fit.reason, *fit.advice]),
                )
                for fit in estimate.fits
            ],
        )
    for sentence in estimate.assumptions:
        print_note(f"  {sentence}")


def follow_probe(client: "Anneal", estimate: "Estimated", is_reported: bool) -> int:
    """Follow the probe run to its end, print its measurements next to the estimate and return the exit code.

    With `is_reported`, the probe has ended and its result was printed already.
    """
    run = client.runs.get(estimate.probe_run_id or "")
    if not is_reported:
        watch_run(client, run, False)
        run = client.runs.get(run.id)
        _print_comparison(estimate, run.measured, run.probe)
    return 0 if run.probe and run.probe.fits is not None else exit_code(run.status)


def _print_comparison(estimate: "RunEstimate", measured: "Measured | None", probe: "ProbeResult | None") -> None:
    if probe is None:
        return
    expected = estimate.memory_mb or {}
    # On a GPU, the measured peak covers tensors only, not the CUDA context.
    gpu = estimate.device.kind == "cuda"
    total = expected["total"] - (expected["context"] if gpu else 0.0) if expected else None
    rows = [
        ("peak memory, MiB", _format_figure(total), _format_figure(measured.peak_memory_mb if measured else None)),
        ("reserved memory, MiB", "-", _format_figure(measured.reserved_memory_mb if measured else None)),
        ("steps", _format_figure(estimate.steps), _format_figure(probe.steps)),
        ("step on the longest rows", "-", _format_time(measured.step_seconds if measured else None) or "-"),
        ("time", _format_time(estimate.seconds) or "-", _format_time(probe.seconds) or "-"),
        ("maximum time", "-", _format_time(probe.seconds_at_most) or "-"),
    ]
    print_table(("WHOLE RUN", "ESTIMATED", "MEASURED"), [row for row in rows if row[1:] != ("-", "-")])
    print_text(probe.message)


def _format_figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _device_text(device: "EstimatedDevice") -> str:
    memory = "" if device.memory_mb is None else f", {device.memory_mb:,} MiB"
    return f"{device.name or device.kind}{memory}"


def _format_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
