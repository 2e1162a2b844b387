"""Curves of a run in a notebook: drawn by matplotlib into the output of a cell, and again as they grow."""

import io
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from anneal.contracts.events import EvalEvent, MetricEvent
from anneal.contracts.schemas.runs.curves import RunMetrics

SECONDS_BETWEEN = 1.0
"""Shortest time between two drawings."""

_WIDTH, _HEIGHT = 8.0, 3.0
"""Size of the axes of one unit, in inches."""


class CurvePlot:
    """Output of a cell with the curves of a run, or of several."""

    def __init__(self, title: str, names: Sequence[str], runs: Sequence[str] = ("",)) -> None:
        """Prepare for these series, named as in `client.runs.metrics`; raises `ImportError` without matplotlib.

        `runs` are labels that distinguish the curves of several runs.
        """
        try:
            import IPython.display  # noqa: F401
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "`client.runs.plot` needs matplotlib and IPython; install them with `pip install matplotlib ipython`."
            ) from error
        self._title = title
        self._points: dict[tuple[str, str], tuple[list[int], list[float | None]]] = {
            (run, name): ([], []) for name in names for run in runs
        }
        self._output: Any = None
        self._drawn_at = float("-inf")

    def load_metrics(self, metrics: RunMetrics, run: str = "") -> None:
        """Replace all points of a run by those of a response."""
        for label, name in self._points:
            if label == run:
                series = metrics.series[name]
                self._points[label, name] = (list(series.steps), list(series.values))

    def add_event(self, event: MetricEvent | EvalEvent) -> None:
        """Add the points of a `metric` or `eval` event.

        From its step on, earlier points are of a pass before; with a metric, also those of evaluations after its step.
        """
        if isinstance(event, MetricEvent):
            self._drop_later_pass(event.step)
        for (_, name), (steps, values) in self._points.items():
            is_known, value = _value_of(event, name)
            if is_known:
                at = bisect_left(steps, event.step)
                steps[at:], values[at:] = [event.step], [value]

    def _drop_later_pass(self, step: int) -> None:
        measured = [steps for (_, name), (steps, _) in self._points.items() if not name.startswith("eval.")]
        if not any(steps and step <= steps[-1] for steps in measured):
            return
        for (_, name), (steps, values) in self._points.items():
            at = bisect_left(steps, step + 1 if name.startswith("eval.") else step)
            del steps[at:], values[at:]

    def draw_output(self, status: str, *, now: bool = False) -> None:
        """Replace the output of the cell; without `now`, only if enough time has passed since the last drawing."""
        from IPython.display import Image, display

        if not now and time.monotonic() - self._drawn_at < SECONDS_BETWEEN:
            return
        image = Image(data=self._render_png(status), retina=True)  # type: ignore[no-untyped-call]
        if self._output is None:
            self._output = display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(image)
        self._drawn_at = time.monotonic()

    def _render_png(self, status: str) -> bytes:
        # Without pyplot, nothing depends on the backend of the notebook, and no figure is kept.
        from matplotlib.figure import Figure

        units = list(dict.fromkeys(_axes_name(name) for _, name in self._points))
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(units)), dpi=144, layout="constrained")
        axes = dict(zip(units, figure.subplots(len(units), squeeze=False)[:, 0], strict=True))
        for (run, name), (steps, values) in self._points.items():
            numbers = [float("nan") if value is None else value for value in values]
            few = ".-" if name.startswith("eval") else "-"
            axes[_axes_name(name)].plot(steps, numbers, few, label=f"{run} · {name}" if run else name, linewidth=1.5)
        for unit, axis in axes.items():
            axis.set_ylabel(unit)
            axis.grid(visible=True, alpha=0.3)
            axis.legend(loc="upper right")
        axis.set_xlabel("step")
        figure.suptitle(f"{self._title} · {status}", fontsize=11)
        written = io.BytesIO()
        figure.savefig(written, format="png")
        return written.getvalue()


def _axes_name(name: str) -> str:
    """Return the name of the axes of a series: losses share theirs."""
    return "loss" if name.endswith("loss") else name


def _value_of(event: MetricEvent | EvalEvent, name: str) -> tuple[bool, float | None]:
    """Return whether an event has a value of a series, and the value; None: it was not finite."""
    short = name.removeprefix("eval.").removeprefix("extra.")
    if isinstance(event, EvalEvent):
        return short in event.metrics, event.metrics.get(short)  # type: ignore[return-value]
    if name.startswith("extra."):
        return short in event.extra, event.extra.get(short)
    value = getattr(event, name, None)
    return value is not None or name in (event.non_finite or ()), value
