"""Report of a campaign, with tables for docs/internals/promises.md."""

import statistics
from collections.abc import Mapping

from tests.chaos.campaign import Result


def show(result: Result) -> str:
    """Format the faults by kind and window, the checks, and the violations."""
    lines = [
        f"seed {result.seed}, {result.rounds} rounds, {result.seconds / 60:.1f} minutes",
        *_table("fault", result.faults),
        *_table("window", result.hits),
        *_table("seen in the history", result.observed),
        *_table("checked", result.counted),
    ]
    for what, seconds in sorted(result.times.items()):
        lines.append(f"{what}: median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")
    lines += [f"not tried: {what}" for what in result.not_tried]
    lines += [f"BROKEN promise {one.promise} {one.run_id}: {one.what}" for one in result.violations]
    if result.missed:
        lines.append(f"WINDOWS WITHOUT A HIT: {', '.join(result.missed)}")
    lines.append(f"violations: {len(result.violations)}; windows without a hit: {len(result.missed)}")
    return "\n".join(lines)


def _table(what: str, counts: Mapping[str, int]) -> list[str]:
    width = max((len(name) for name in counts), default=0)
    rows = [f"| {name:{width}s} | {count:8d} |" for name, count in sorted(counts.items())]
    return ["", f"| {what:{width}s} |    count |", f"|{'-' * (width + 2)}|----------|", *rows]
