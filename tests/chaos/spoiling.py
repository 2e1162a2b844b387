"""Modifications of a correct history in exactly one place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.chaos.history import Creation, Event, FaultRecord, History, Row
from tests.chaos.synthetic import OUTPUT, Story, transcript

Spoil = Callable[[History], History]
Which = Callable[[Event], bool]


def whole(**values: Any) -> Spoil:
    """Replace fields of the history."""
    return lambda history: replace(history, **values)


def row(run_id: str, **values: Any) -> Spoil:
    """Replace values in the row of a run; a function gets the present value."""

    def spoil(history: History) -> History:
        before = history.runs[run_id]
        changed = {name: value(before[name]) if callable(value) else value for name, value in values.items()}
        return replace(history, runs={**history.runs, run_id: {**before, **changed}})

    return spoil


def run_added(story: Story, after: float | None = None, target: str = "worker-1") -> Spoil:
    """Add a run; with `after`, also a fault that explains its losses from that time on."""

    def spoil(history: History) -> History:
        run_id = story.run_id
        cause = () if after is None else (FaultRecord(1, "kill_worker", target, after, story.now, True),)
        return replace(
            history,
            creations=(*history.creations, Creation(f"key-{run_id}", story.profile, (run_id,), story.parent)),
            stops=(*history.stops, *story.stops),
            faults=(*history.faults, *cause),
            runs={**history.runs, run_id: story.row},
            attempts={**history.attempts, run_id: tuple(story.attempts)},
            events={**history.events, run_id: tuple(story.events)},
            checkpoints={**history.checkpoints, run_id: tuple(story.checkpoints)},
            journals={**history.journals, run_id: tuple(story.journal)},
            outputs={**history.outputs, **({run_id: OUTPUT} if story.output_attempt else {})},
        )

    return spoil


def fault_added(kind: str, target: str, began: float, ended: float, requeues: bool = True) -> Spoil:
    """Add a fault."""
    fault = FaultRecord(1, kind, target, began, ended, requeues)
    return lambda history: replace(history, faults=(*history.faults, fault))


def attempt(run_id: str, index: int, **values: Any) -> Spoil:
    """Replace values in the row of an attempt."""

    def spoil(history: History) -> History:
        rows = list(history.attempts[run_id])
        rows[index] = {**rows[index], **values}
        return replace(history, attempts={**history.attempts, run_id: tuple(rows)})

    return spoil


def checkpoint(run_id: str, index: int, **values: Any) -> Spoil:
    """Replace values in the row of a checkpoint."""

    def spoil(history: History) -> History:
        rows = list(history.checkpoints[run_id])
        rows[index] = {**rows[index], **values}
        return replace(history, checkpoints={**history.checkpoints, run_id: tuple(rows)})

    return spoil


def journal(run_id: str, change: Callable[[list[Row]], list[Row]]) -> Spoil:
    """Replace the journal of a run."""
    return lambda history: replace(
        history, journals={**history.journals, run_id: tuple(change(list(history.journals[run_id])))}
    )


def line(run_id: str, index: int, **values: Any) -> Spoil:
    """Replace values in one line of a journal."""
    return journal(run_id, lambda lines: [{**one, **values} if one is lines[index] else one for one in lines])


def line_added(run_id: str, after: int, **values: Any) -> Spoil:
    """Insert a copy of a line after it, with other values."""

    def change(lines: list[Row]) -> list[Row]:
        place = after % len(lines)
        return [*lines[: place + 1], {**lines[place], **values}, *lines[place + 1 :]]

    return journal(run_id, change)


def line_removed(run_id: str, which: Callable[[Row], bool]) -> Spoil:
    """Remove the lines for which `which` is true."""
    return journal(run_id, lambda lines: [one for one in lines if not which(one)])


def events(run_id: str, change: Callable[[list[Event]], list[Event]], uncounted: int = 0) -> Spoil:
    """Replace the events of a run, renumbered, counted and without readers, so that nothing else is wrong.

    `uncounted` is the number of added events that the trainer of the last attempt did not write.
    """

    def spoil(history: History) -> History:
        before = history.events[run_id]
        after = tuple(replace(event, seq=seq) for seq, event in enumerate(change(list(before)), 1))
        more = len(after) - len(before)
        readers = tuple(one for one in history.transcripts if one.run_id != run_id)
        altered = replace(history, events={**history.events, run_id: after}, transcripts=readers)
        count = history.runs[run_id]["attempt_event_count"] + more - uncounted
        return row(run_id, event_seq=len(after), attempt_event_count=count)(altered)

    return spoil


def event_added(run_id: str, after: Which, type: str, number: int = 1, counted: bool = True, **data: Any) -> Spoil:
    """Insert an event of the attempt `number` after the first event for which `after` is true."""

    def change(before: list[Event]) -> list[Event]:
        place = next(index for index, event in enumerate(before) if after(event)) + 1
        return [*before[:place], Event(0, type, number, before[place - 1].ts, data), *before[place:]]

    return events(run_id, change, uncounted=int(not counted))


def event_doubled(run_id: str, which: Which, counted: bool = True) -> Spoil:
    """Duplicate events."""
    return events(run_id, lambda all: [one for one in all for _ in range(1 + which(one))], uncounted=int(not counted))


def event_removed(run_id: str, which: Which) -> Spoil:
    """Remove events of the trainer of the last attempt."""
    return events(run_id, lambda all: [one for one in all if not which(one)])


def event_changed(run_id: str, which: Which, **data: Any) -> Spoil:
    """Replace data of events."""
    return events(run_id, lambda all: [replace(e, data={**e.data, **data}) if which(e) else e for e in all])


def reader(**values: Any) -> Spoil:
    """Replace fields in the transcript of the plain run; a function gets the received events."""

    def spoil(history: History) -> History:
        received = transcript("plain", history.events["plain"]).received
        changed = {name: value(received) if callable(value) else value for name, value in values.items()}
        readers = [replace(one, **changed) if one.run_id == "plain" else one for one in history.transcripts]
        return replace(history, transcripts=tuple(readers))

    return spoil


def together(*spoils: Spoil) -> Spoil:
    """Apply several modifications in order."""

    def spoil(history: History) -> History:
        for spoil_one in spoils:
            history = spoil_one(history)
        return history

    return spoil


def prints(step: int) -> Which:
    """Match the log line of a step."""
    return lambda event: event.type == "log" and event.data["line"].startswith(f"step {step} ")


def measures(step: int) -> Which:
    """Match the metric of a step."""
    return lambda event: event.type == "metric" and event.data["step"] == step


def saves(step: int) -> Which:
    """Match the checkpoint of a step."""
    return lambda event: event.type == "checkpoint" and event.data["step"] == step


def becomes(status: str, number: int = 1) -> Which:
    """Match a status change in the attempt `number`."""
    return lambda event: event.type == "status" and event.data["to"] == status and event.attempt == number


def is_end(event: Event) -> bool:
    """Match the last event."""
    return event.type == "end"
