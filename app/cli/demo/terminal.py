"""Output of the demo: one line per step with its duration, and a progress bar with the loss of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0


class Bar:
    """Progress of a run: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: Console, progress: Progress | None, label: str) -> None:
        self._console = console
        self._progress = progress
        self._label = label
        self._task: TaskID | None = progress.add_task(label, total=None, figures="waiting") if progress else None
        self._done, self._total = 0, 0
        self._loss: float | None = None
        self._held_out: float | None = None
        self._printed_at = time.monotonic()

    def step(self, done: int, total: int | None, loss: float | None) -> None:
        """Show a new optimizer step."""
        self._done, self._total = done, total or self._total
        self._loss = loss if loss is not None else self._loss
        self._show(always=done == self._total)

    def evaluated(self, loss: float) -> None:
        """Show a new loss on the held-out rows."""
        self._held_out = loss
        self._show(always=True)

    def phase(self, text: str) -> None:
        """Show the phase of a run before its first step."""
        if self._progress is not None and self._task is not None and not self._done:
            self._progress.update(self._task, figures=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(f"    {text}", markup=False, highlight=False, soft_wrap=True)

    def _show(self, always: bool) -> None:
        figures = [f"loss {self._loss:.3f}"] if self._loss is not None else []
        figures += [f"held-out {self._held_out:.3f}"] if self._held_out is not None else []
        text = "  ".join(figures)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, total=self._total or None, figures=text)
        elif always or time.monotonic() - self._printed_at > _SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            self.say(f"step {self._done}/{self._total}  {text}")


class Terminal:
    """Standard output, on a terminal or as plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()
        self._headings = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the demo."""
        return time.monotonic() - self._began

    def say(self, text: str = "") -> None:
        """Print one or more lines."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print a numbered heading."""
        self._headings += 1
        self._console.print(f"\n{self._headings}. {text}", style="bold", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, text: str) -> Iterator[list[str]]:
        """Run a step; print the items of the yielded list and the duration when it is done."""
        began = time.monotonic()
        notes: list[str] = []
        if self._console.is_terminal:
            with self._console.status(text):
                yield notes
        else:
            yield notes
        self.say(f"  {' '.join([text, *notes])} ({time.monotonic() - began:.1f} s)")

    @contextmanager
    def bar(self, label: str) -> Iterator[Bar]:
        """Show a bar for one run; it remains visible after the run."""
        if not self._console.is_terminal:
            self.say(f"  {label}")
            yield Bar(self._console, None, label)
            return
        columns = (
            TextColumn("  {task.description}"), BarColumn(30), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True),
        )  # fmt: skip
        with Progress(*columns, console=self._console, refresh_per_second=4) as progress:
            yield Bar(self._console, progress, label)

    def fail(self, text: str) -> None:
        """Print the reason of a failure."""
        self._console.print(f"\nThe demo failed: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
