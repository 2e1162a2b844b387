"""Line charts as SVG files for the documentation, with logarithmic or linear axes."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 820, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 44, 50
COLORS = (
    "#d9480f",
    "#1971c2",
    "#2f9e44",
    "#9c36b5",
    "#f08c00",
    "#0c8599",
    "#495057",
    "#e64980",
    "#5c3d2e",
    "#82c91e",
    "#1c2a8c",
)
FOLDER = Path("build/benchmarks")


class Axis:
    """One axis: its range, the place of a value between 0 and 1, and its ticks."""

    def __init__(self, label: str, values: Sequence[float], logarithmic: bool) -> None:
        self.label = label
        self._log = logarithmic
        if logarithmic:
            self._low = math.floor(math.log10(min(values)) + 1e-9)
            self._high = max(math.ceil(math.log10(max(values)) - 1e-9), self._low + 1)
            self.ticks = [10.0**power for power in range(self._low, self._high + 1)]
        else:
            step = 10 ** math.floor(math.log10(max(values) or 1))
            step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if max(values) / (step * part) <= 8)
            self.ticks = [step * n for n in range(math.ceil(max(values) / step) + 1)]
            self._low, self._high = 0.0, self.ticks[-1] or 1.0

    def place(self, value: float) -> float:
        """Return the place of a value on the axis."""
        return ((math.log10(value) if self._log else value) - self._low) / (self._high - self._low)

    def name(self, value: float) -> str:
        """Return the label of a tick."""
        if self._log and value >= 1e4:
            return "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(round(math.log10(value))))
        return f"{value:,.10g}"


def line_chart(
    name: str,
    title: str,
    axes: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    logarithmic: tuple[bool, bool],
) -> Path:
    """Write a chart into `build/benchmarks` and return its path."""
    points = [point for line in series.values() for point in line]
    x, y = (Axis(axes[n], [point[n] for point in points], logarithmic[n]) for n in range(2))
    inner = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + inner[0] * x.place(point[0]), TOP + inner[1] * (1 - y.place(point[1]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold" fill="#212529">{escape(title)}</text>',
    ]
    for tick in x.ticks:
        at_x = LEFT + inner[0] * x.place(tick)
        parts.append(f'<path d="M{at_x:.1f} {TOP}V{TOP + inner[1]}" stroke="#e9ecef"/>')
        parts.append(_text(at_x, TOP + inner[1] + 18, x.name(tick), "middle"))
    for tick in y.ticks:
        at_y = TOP + inner[1] * (1 - y.place(tick))
        parts.append(f'<path d="M{LEFT} {at_y:.1f}H{LEFT + inner[0]}" stroke="#e9ecef"/>')
        parts.append(_text(LEFT - 8, at_y + 4, y.name(tick), "end"))
    parts.append(_text(LEFT + inner[0] / 2, HEIGHT - 10, x.label, "middle"))
    parts.append(f'<g transform="rotate(-90)">{_text(-(TOP + inner[1] / 2), 16, y.label, "middle")}</g>')
    for number, (label, line) in enumerate(series.items()):
        color, places = COLORS[number % len(COLORS)], [at(point) for point in line]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(places) <= 12:
            parts.extend(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in places)
        row = TOP + 12 + 20 * number
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {row}h18" stroke="{color}" stroke-width="3"/>')
        parts.append(_text(WIDTH - RIGHT + 38, row + 4, label, "start"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / name
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
    return path


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#495057">{escape(text)}</text>'
