"""Watching a run: plain lines, JSON, or a progress bar and a plot on a terminal."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import typer

from anneal.contracts.events import (
    ActionEvent,
    CheckpointEvent,
    ConfigEvent,
    DeviceEvent,
    ErrorEvent,
    EvalEvent,
    Event,
    LogEvent,
    MetricEvent,
    PendingEvent,
    ProgressEvent,
    RepairEvent,
    SampleEvent,
    SkippedRowsEvent,
    StatusEvent,
)
from anneal.contracts.methods import method_of
from app.cli.console import json_line, print_note, print_text
from app.cli.runs.state_text import eta_text, status_text
from app.infra.terminal_text import plain_line, plain_number, plain_text

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import Prediction, RunRead, TrainingMetrics

COMPLETED, FAILED, CANCELLED = 0, 3, 4
_SECONDS_BETWEEN_LOOKS = 5.0
_SECONDS_BETWEEN_OUTLOOKS = 30.0
_ENDED = ("completed", "failed", "cancelled")
_POINTS = 400
_BAR = 10
_TIMINGS = ("_seconds", "_samples_per_second")
"""Ends of the names of an evaluation's metrics that lines leave out; the curves have them."""
# Events shown by `watch`. Log lines are left to `anneal runs logs -f`.
_TYPES = (
    "status", "pending", "metric", "eval", "sample", "checkpoint", "config", "progress", "skipped_rows", "repair",
    "device", "action", "error", "end",
)  # fmt: skip


def exit_code(status: str) -> int:
    """Return the exit code for the final status of a run."""
    return {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED}.get(status, 1)


def watch_run(client: "Anneal", run: "RunRead", as_json: bool) -> int:
    """Watch a run to its end and return the exit code."""
    with continue_on_interrupt(run.id):
        if as_json:
            for event in client.runs.events(run.id):
                json_line(event)
        else:
            for _ in show_events(client, run):
                pass
        run = client.runs.get(run.id)
    if not as_json:
        _print_end(run)
    return exit_code(run.status)


def show_events(client: "Anneal", run: "RunRead", patience: float = 600.0) -> Iterator[Event]:
    """Show a run until it has ended, as lines or on a terminal as a bar below a plot, and yield each event it shows.

    Fails after `patience` seconds without a connection.
    """
    seen = WatchState.from_run(run)
    print_text(seen.first_line)
    if run.pending_reason is not None:
        print_text(f"waits: {run.pending_reason.message}")
    screen: _Screen = _Terminal(client, seen) if sys.stdout.isatty() else _Lines(seen)
    with screen:
        refreshed_at, pause = time.monotonic(), _SECONDS_BETWEEN_LOOKS
        for event in client.runs.events(run.id, after=run.last_seq, types=_TYPES, patience=patience):
            if time.monotonic() - refreshed_at > pause:
                refreshed_at, seen.prediction = time.monotonic(), client.runs.get(run.id).prediction
                pause = refresh_interval(seen.prediction)
            if seen.total is None and isinstance(event, StatusEvent) and event.to == "running":
                seen.total = client.runs.get(run.id).total_steps
            screen.show_event(event)
            yield event


def refresh_interval(prediction: "Prediction | None") -> float:
    """Return the seconds until the prediction is refreshed; shorter as the end approaches."""
    if prediction is None or prediction.finish_at is None:
        return _SECONDS_BETWEEN_OUTLOOKS
    left = (prediction.finish_at - datetime.now(UTC)).total_seconds()
    return min(max(left / 4, _SECONDS_BETWEEN_LOOKS), _SECONDS_BETWEEN_OUTLOOKS)


@contextmanager
def continue_on_interrupt(run_id: str) -> Iterator[None]:
    """On Ctrl-C, print that the run continues and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        print_note(
            f"\nStopped watching {run_id}; the run continues. Use `anneal runs watch {run_id}` to watch it again, "
            f"or `anneal runs stop {run_id}` to stop it."
        )
        raise typer.Exit(130) from None


def _print_end(run: "RunRead") -> None:
    limited = f" ({run.end_reason})" if run.end_reason not in (None, "finished") else ""
    reward = run.metrics_history[-1].extra.get("reward") if run.metrics_history else None
    has_reward = isinstance(reward, int | float)  # then the loss says little
    learned = _loss_text(reward, ", reward") if has_reward else _loss_text(run.best_loss, ", best loss")
    print_text(f"{run.id} {run.name}: {status_text(run.status)}{limited} at step {run.current_step}{learned}")
    if run.status == "failed":
        print_text(f"  {run.error_code}: {run.error_message} (see `anneal runs why {run.id}`)")
    elif run.evaluation is not None:
        print_text(f"  {'  '.join(_metric_figures(run.evaluation))}")
    elif run.status == "completed" and run.probe is None:
        print_text(f"  Download the model with `anneal runs download {run.id}`.")
    elif run.status == "cancelled" and run.probe is None and run.task.saves_checkpoints:
        print_text(f"  Resume it with `anneal runs resume {run.id}`.")


def _loss_text(value: float | None, name: str = "loss") -> str:
    return "" if value is None else f"{name} {value:.4f}"


@dataclass
class WatchState:
    """State of the watched run, built from its events."""

    run_id: str
    name: str
    status: str
    step: int
    total: int | None
    learns_from_rewards: bool = False
    """True for runs that generate: they show the reward, because the loss says little."""
    loss: float | None = None
    reward: float | None = None
    evaluated: float | None = None
    phase: str = ""
    device: str = ""
    """Latest telemetry of the GPU, with units."""
    prediction: "Prediction | None" = None
    started: datetime | None = None
    """Start of the attempt's steps, which progress lines count from."""
    curve: dict[int, float] = field(default_factory=dict)
    """The objective by step: the loss, or the reward."""

    @classmethod
    def from_run(cls, run: "RunRead") -> "WatchState":
        """Create the state from the run at the start of watching."""
        seen = cls(
            run.id, run.name, run.status, run.current_step, run.total_steps, method_of(run.config).generates,
            prediction=run.prediction, started=run.started_at,
        )  # fmt: skip
        if run.metrics_history:
            seen._note_measurements(run.metrics_history[-1])
        return seen

    def apply_event(self, event: Event) -> str | None:
        """Apply an event; return a line if the event is printed as one."""
        if isinstance(event, StatusEvent):
            self.status, self.phase, self.device = event.to, "", ""
            if event.to == "running":
                self.started = event.ts
            return f"{status_text(event.to)}{f': {event.reason}' if event.reason else ''}"
        if isinstance(event, MetricEvent):
            if event.step < self.step:
                self.curve = {step: it for step, it in self.curve.items() if step < event.step}
            self.step = event.step
            self._note_measurements(event)
            objective = self.reward if self.learns_from_rewards else self.loss
            if objective is not None:
                self.curve[event.step] = objective
        elif isinstance(event, EvalEvent):
            score = event.metrics.get("eval_reward" if self.learns_from_rewards else "eval_loss")
            self.evaluated = score if isinstance(score, int | float) else self.evaluated
            metrics = {name: value for name, value in event.metrics.items() if not name.endswith(_TIMINGS)}
            return f"step {event.step}  {'  '.join(_metric_figures(metrics))}"
        elif isinstance(event, SampleEvent) and event.rewards is None:  # those of `rlhf` come with every metric
            prompt, completion = (json.dumps(text, ensure_ascii=False) for text in (event.prompt, event.completion))
            return f"step {event.step}  sample {prompt} -> {completion}"
        elif isinstance(event, CheckpointEvent):
            return f"step {event.step}  checkpoint {event.checkpoint_id} ({event.kind})"
        elif isinstance(event, ActionEvent):
            total = (event.result or {}).get("total_steps")
            self.total = total if isinstance(total, int) else self.total
            return f"step {event.step}  {event.action}: {event.status}{f' ({event.message})' if event.message else ''}"
        elif isinstance(event, ConfigEvent):
            self.total = event.total_steps or self.total
            fidelity = resume_fidelity(event.facts)
            return f"resume {fidelity}" if fidelity != "exact" else None
        elif isinstance(event, PendingEvent):
            return f"{'queued' if event.code == 'queued' else 'waits'}: {event.message}"
        elif isinstance(event, DeviceEvent):
            self.device = _telemetry_text(event)
        elif isinstance(event, ProgressEvent):
            self.phase = event.message or event.phase
        elif isinstance(event, SkippedRowsEvent):
            return f"warning: {event.reason}"
        elif isinstance(event, RepairEvent):
            return f"repair: {event.reason}"
        elif isinstance(event, ErrorEvent):
            return f"{event.code}: {event.message}"
        elif isinstance(event, LogEvent):
            return event.line
        return None

    def _note_measurements(self, metrics: "TrainingMetrics") -> None:
        reward = metrics.extra.get("reward")
        self.loss = self.loss if metrics.loss is None else metrics.loss
        self.reward = reward if isinstance(reward, int | float) else self.reward

    def progress_line(self, metrics: MetricEvent) -> str:
        """Format a metric as a line of tqdm, `30%|###       | 30/100 [00:31<01:12]`, with its measurements."""
        total, times = self.total or 0, []
        if self.started is not None and metrics.ts is not None:
            times.append(_clock_text((metrics.ts - self.started).total_seconds()))
            if self.prediction is not None and self.prediction.finish_at is not None:
                times.append(_clock_text((self.prediction.finish_at - metrics.ts).total_seconds()))
        part = min(metrics.step / total, 1.0) if total else 0.0
        bar = f"{part:4.0%}|{'#' * round(part * _BAR):<{_BAR}}| {metrics.step}/{total or '?'}"
        measured = {"loss": metrics.loss, "learning_rate": metrics.learning_rate, "grad_norm": metrics.grad_norm}
        if self.learns_from_rewards:
            measured = {"reward": self.reward, **measured}
        measured |= {name: metrics.extra.get(name) for name in ("tokens_per_second", "mfu")}
        return "  ".join(filter(None, (bar + (f" [{'<'.join(times)}]" if times else ""), *_metric_figures(measured))))

    @property
    def first_line(self) -> str:
        """Name and state of the run at the start of watching."""
        step = f"step {self.step}{f' of {self.total}' if self.total else ''}" if self.step else ""
        state = ", ".join(filter(None, (status_text(self.status), step, self.outlook)))
        return f"{self.run_id} {self.name}: {state}"

    @property
    def outlook(self) -> str:
        """Predicted finish, relative to now; empty once the run has ended."""
        return "" if self.status in _ENDED else eta_text(self.prediction)

    @property
    def figures(self) -> str:
        """Latest loss or reward, latest evaluation result, telemetry of the GPU and predicted finish."""
        held_out = "held-out reward" if self.learns_from_rewards else "held-out"
        now = _loss_text(self.reward, "reward") if self.learns_from_rewards else _loss_text(self.loss)
        return "  ".join(filter(None, (now, _loss_text(self.evaluated, held_out), self.device, self.outlook)))


def resume_fidelity(facts: Mapping[str, Any]) -> str:
    """Format whether a resume continues exactly, with the reasons if it does not, from the run facts."""
    reasons = facts.get("fidelity_reasons")
    return f"approximate: {' '.join(map(str, reasons))}" if isinstance(reasons, list) and reasons else "exact"


def _telemetry_text(device: DeviceEvent) -> str:
    """Format the telemetry of a GPU, `GPU 97% 59.8 GiB 63 °C 512 W`, as far as its driver reports it."""
    figures = (
        (device.utilization_percent, "{:.0f}%"),
        (None if device.memory_mb is None else device.memory_mb / 1024, "{:.1f} GiB"),
        (device.temperature_celsius, "{:.0f} °C"),
        (device.power_watts, "{:.0f} W"),
    )
    return " ".join(["GPU", *(form.format(value) for value, form in figures if value is not None)])


def _clock_text(seconds: float) -> str:
    """Format a duration as tqdm does: `01:12`, or `2:01:12`."""
    minutes, left = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def _metric_figures(metrics: dict[str, Any]) -> Iterator[str]:
    for name, value in metrics.items():
        if isinstance(value, int | float):
            yield f"{name} {plain_number(value)}"


class _Screen(Protocol):
    def show_event(self, event: Event) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *problem: Any) -> None: ...


class _Lines:
    """Output without a terminal: a line for every change, and for every metric."""

    def __init__(self, seen: WatchState) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        pass

    def __exit__(self, *problem: Any) -> None:
        pass

    def show_event(self, event: Event) -> None:
        line = self._seen.apply_event(event)
        if isinstance(event, MetricEvent):
            line = self._seen.progress_line(event)
        if line is not None:
            self._print_line(line)

    @staticmethod
    def _print_line(line: str) -> None:
        print_text(line)
        sys.stdout.flush()


class _Terminal:
    """Output on a terminal: a progress bar below a plot of the loss or reward; other lines scroll above both."""

    def __init__(self, client: "Anneal", seen: WatchState) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._seen = seen
        name = "extra.reward" if seen.learns_from_rewards else "loss"
        drawn = client.runs.metrics(seen.run_id, names=[name], max_points=_POINTS).series.get(name)
        if drawn is not None:
            seen.curve = {step: it for step, it in zip(drawn.steps, drawn.values, strict=True) if it is not None}
        self._console = Console(highlight=False)
        # A narrow terminal cuts the name, never the bar and the counter; figures have lines of their own.
        name_column = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, self._console.width - 46))
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=name_column), BarColumn(30),
            MofNCompleteColumn(), console=self._console, auto_refresh=False,
        )  # fmt: skip
        self._task = self._bar.add_task(plain_line(seen.name), total=seen.total, completed=seen.step)
        self._live = Live(get_renderable=self._render_picture, console=self._console, refresh_per_second=2)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *problem: Any) -> None:
        self._live.stop()

    def show_event(self, event: Event) -> None:
        line = self._seen.apply_event(event)
        if line is not None:
            self._console.print(plain_text(line), markup=False, soft_wrap=True)
        self._bar.update(self._task, completed=self._seen.step, total=self._seen.total)

    def _status_figures(self) -> str:
        seen = self._seen
        state = plain_line(seen.phase) if seen.phase else status_text(seen.status)
        return "  ".join(filter(None, (state, seen.figures)))

    def _render_picture(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        plot = draw_curve(self._seen.curve, self._console.width, max(8, self._console.height // 2))
        below = (self._bar, Text(self._status_figures()))
        return Group(Text(plot, no_wrap=True), *below) if plot else Group(*below)


def draw_curve(curve: dict[int, float], width: int, height: int) -> str:
    """Draw a curve over the steps as lines of text; empty with fewer than two points."""
    if len(curve) < 2:
        return ""
    import plotext

    steps = sorted(curve)
    steps = [*steps[:-1][:: max(1, len(steps) // _POINTS)], steps[-1]]
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(width, 100), min(height, 20))
    signal = figure.signal(steps, [curve[step] for step in steps], marker="braille")
    signal.lines()
    figure.draw(signal)
    ticks = step_ticks(steps[0], steps[-1], min(width, 100) // 15)
    figure.ruler("x").ticks(ticks, [f"{step:,}" for step in ticks])
    return str(figure.build().string(colorless=True))


def step_ticks(first: int, last: int, most: int) -> list[int]:
    """Return at most `most` round steps from `first` to `last`, and both ends if there is room for no more."""
    for magnitude in range(len(str(last)) + 1):
        for factor in (1, 2, 5):
            distance = factor * 10**magnitude
            ticks = list(range(-(-first // distance) * distance, last + 1, distance))
            if len(ticks) <= max(most, 2):
                return ticks if len(ticks) >= 2 else [first, last]
    return [first, last]
