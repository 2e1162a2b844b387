"""Goals on one H100 with 80 GB, and what a report measured of them."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.stages import parity
from benchmarks.gpu_check.stages.throughput import ANNEAL, TRL, Cell, row_name

_LONG = Cell("qlora", "long", 0.05)
_MIX = Cell("qlora", "mix", 0.05)


@dataclass(frozen=True)
class Goal:
    """Figure to reach; `measure` returns None if the report does not contain it."""

    name: str
    bound: float
    at_least: bool
    measure: Callable[[Report], float | None]
    form: str = "{:,.2f}"

    @property
    def requirement(self) -> str:
        """Goal as text."""
        return f"{'≥' if self.at_least else '≤'} {self.text(self.bound)}"

    def text(self, value: float) -> str:
        """Return a value as text."""
        return self.form.format(value)

    def is_reached(self, value: float) -> bool:
        """Return True if a measured value reaches the goal."""
        return value >= self.bound if self.at_least else value <= self.bound


def _speed(cell: Cell, participant: str = ANNEAL) -> Callable[[Report], float | None]:
    def measure(report: Report) -> float | None:
        if report.tiny:
            return None  # a speed of another model
        return report.value("throughput", row_name(cell, participant), "tokens_per_second")

    return measure


def _ratio(cell: Cell) -> Callable[[Report], float | None]:
    def measure(report: Report) -> float | None:
        anneal, trl = _speed(cell)(report), _speed(cell, TRL)(report)
        return anneal / trl if anneal and trl else None

    return measure


def _estimate(report: Report) -> float | None:
    """Return the largest relative error of the estimated peaks."""
    ratios = [row.values.get("estimate_by_peak") for row in report.of_stage("throughput") if row.status == "ok"]
    errors = [abs(ratio - 1) for ratio in ratios if ratio]
    return None if report.tiny else max(errors, default=None)


def _losses(report: Report) -> float | None:
    """Return the largest difference, if every comparison has one."""
    rows = {row.name: row.values.get("largest_difference") for row in report.of_stage("parity")}
    differences = [rows.get(name) for name in parity.RUNS]
    return (
        None
        if any(value is None for value in differences)
        else max(value for value in differences if value is not None)
    )


GOALS = (
    Goal("QLoRA, 4×4096, dropout 0: tokens/s", 13_000, True, _speed(Cell("qlora", "long", 0.0)), "{:,.0f}"),
    Goal("QLoRA, 4×4096, dropout 0.05: tokens/s", 12_000, True, _speed(_LONG), "{:,.0f}"),
    Goal("QLoRA, 4×4096: tokens/s, as a multiple of TRL's", 1.4, True, _ratio(_LONG)),
    Goal("QLoRA, mix packed: tokens/s, as a multiple of padded TRL's", 2.5, True, _ratio(_MIX)),
    Goal("LoRA, 4×4096, dropout 0: tokens/s", 14_000, True, _speed(Cell("lora", "long", 0.0)), "{:,.0f}"),
    Goal("Estimated peak: largest error", 0.1, False, _estimate, "{:.1%}"),
    Goal(
        "Stall of a checkpoint, ms", 50, False,
        lambda report: None if report.tiny else report.value("checkpoint", "stall", "stall_ms"), "{:,.0f}",
    ),
    Goal(
        "Cold launch, as a multiple of a warm one", 4, True,
        lambda report: report.value("launch", "first step", "cold_by_warm"), "{:.1f}",
    ),
    Goal("Losses of ten steps: largest difference from TRL's", parity.BOUND, False, _losses, "{:.1e}"),
)  # fmt: skip
