"""Tables of a report: for the terminal, and in Markdown for `docs/internals/gpu.md`."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu_check.goals import GOALS
from benchmarks.gpu_check.report import Report, Row
from benchmarks.gpu_check.stages.throughput import WARM_UP

NOT_RUN = "No GPU has run this check yet."
_SPEED_COLUMNS = ("tokens_per_second", "step_seconds", "peak_mb", "estimate_mb", "in_effect")


def stage_text(report: Report, stage: str) -> str:
    """Return the rows of a stage as lines for a terminal."""
    lines = [f"{stage} ({report.stages.get(stage, 0.0):.0f} s)"]
    lines += [f"  {row.status:8} {row.name:44} {_details(row)}" for row in report.of_stage(stage)]
    return "\n".join(lines)


def goals_table(report: Report | None) -> str:
    """Return the goals with what was measured."""
    rows = []
    for goal in GOALS:
        value = None if report is None else goal.measure(report)
        measured = "not measured" if value is None else goal.text(value)
        rows.append(
            (goal.name, goal.requirement, measured, "" if value is None else "yes" if goal.is_reached(value) else "no")
        )
    return table(("goal", "wanted", "measured", "reached"), rows)


def page_part(report: Report | None) -> str:
    """Return the results as Markdown: the goals, then a table for each stage; without a report, that there is none."""
    if report is None:
        return f"{NOT_RUN}\n\n{goals_table(None)}"
    model = "a tiny model in place of Qwen3-8B's shape" if report.tiny else "Qwen3-8B's shape with random weights"
    parts = [
        f"{report.device}, {report.date[:10]}, commit `{report.commit}`, {model}. `{report.command}`\n",
        goals_table(report),
    ]
    for stage, seconds in report.stages.items():
        rows = report.of_stage(stage)
        parts.append(f"### {stage} ({seconds:.0f} s)\n\n{_stage_table(stage, rows)}")
    return "\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with `|` escaped in its cells."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _stage_table(stage: str, rows: Sequence[Row]) -> str:
    if stage != "throughput":
        return table(("part", "status", "result"), [(row.name, row.status, _details(row)) for row in rows])
    measured = [
        (row.name, *(_cell(row.values.get(name)) for name in _SPEED_COLUMNS)) for row in rows
        if row.status == "ok" and "tokens_per_second" in row.values
    ]  # fmt: skip
    others = [(row.name, row.status, _details(row)) for row in rows if row.status != "ok"]
    columns = ("run", "tokens/s", "s a step", "peak MiB", "estimate MiB", "in effect")
    text = (
        f"Tokens without padding; the first {WARM_UP} steps of each run are not counted.\n\n{table(columns, measured)}"
    )
    return text + (f"\n{table(('run', 'status', 'reason'), others)}" if others else "")


def _details(row: Row) -> str:
    values = [f"{name} {_cell(value)}" for name, value in row.values.items() if value not in (None, "", {})]
    return "; ".join([*values, *([_one_line(row.text)] if row.text else [])])


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, dict):
        return _one_line(", ".join(f"{name}: {item}" for name, item in value.items()))
    return _one_line(str(value))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:399]}…"
