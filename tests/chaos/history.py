"""What is known of a campaign when it is over: the material on which the checker decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]
MOST_MORE = 40
"""Descriptors, or threads, that a process may have gained over a segment."""


@dataclass(frozen=True)
class Event:
    """A stored event of a run."""

    seq: int
    type: str
    attempt: int
    ts: datetime
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Creation:
    """One `POST /v1/runs` (or `…/resume`) as its client saw it, retries with the same key included."""

    key: str
    """The `Idempotency-Key`, unique to what the client wanted."""
    profile: str
    """Which kind of run it is, see `Profile`."""
    answers: tuple[str, ...]
    """The run ids of all 2xx answers to this key, replays included; empty if every try failed."""
    parent: str | None = None
    """The run that it resumes."""


@dataclass(frozen=True)
class StopCall:
    """One accepted `POST /v1/runs/{id}/stop`."""

    run_id: str
    answered: float
    """Unix time of the 2xx answer, by the clock of the suite, which is also the database's."""
    save: bool


@dataclass(frozen=True)
class Transcript:
    """What one client of a run's stream received, over all its connections."""

    run_id: str
    received: tuple[tuple[int, str, Mapping[str, Any]], ...]
    """(id, event, data), in the order of arrival, `end` included."""
    connections: int
    ended: bool
    """Whether the `end` event came; otherwise the campaign gave up waiting."""


@dataclass(frozen=True)
class Profile:
    """A kind of run whose course is known: it is deterministic, so an undisturbed run tells every loss."""

    name: str
    backend: str
    steps: int
    max_restarts: int
    losses: Mapping[int, str]
    """Step → `float.hex` of the loss, from an undisturbed run; empty for runs that are made to fail."""
    samples: Mapping[int, tuple[Any, ...]]
    """Step → row ids, from the same run."""
    output: str | None
    """SHA-256 of what it exports, from the same run."""
    must_fail_with: str | None = None
    """The error code of a run that is made to fail; None for one that has to complete if nobody stops it."""


@dataclass(frozen=True)
class FaultRecord:
    """A fault that was injected."""

    round: int
    kind: str
    """As in `tests.chaos.faults`."""
    target: str
    """The service, or what else was hit: `postgres`, `valkey`, `storage`, `all`, the process id of a trainer."""
    began: float
    ended: float
    """Unix times, by the clock of the suite."""
    requeues: bool
    """Whether a run may rightly be taken back, handed back or retried because of it."""


@dataclass(frozen=True)
class Growth:
    """A service before anything was asked of it in a segment, and when all was over."""

    process: str
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @property
    def is_too_much(self) -> bool:
        """Whether it has more by a lot: pools may fill, but not for ever."""
        return any(last - first > MOST_MORE for first, last in (self.descriptors, self.threads))


@dataclass(frozen=True)
class History:
    """Everything, after all clients have ended and every run had time to end."""

    profiles: Mapping[str, Profile]
    creations: tuple[Creation, ...]
    stops: tuple[StopCall, ...]
    transcripts: tuple[Transcript, ...]
    faults: tuple[FaultRecord, ...]
    runs: Mapping[str, Row]
    """Run id → its row, all columns of `runs`."""
    attempts: Mapping[str, tuple[Row, ...]]
    """Run id → its rows of `run_attempts`, in order."""
    events: Mapping[str, tuple[Event, ...]]
    """Run id → its stored events by seq."""
    checkpoints: Mapping[str, tuple[Row, ...]]
    """Run id → its rows of `checkpoints`, oldest first."""
    journals: Mapping[str, tuple[Row, ...]]
    """Run id → what its trainers wrote down themselves, in the order of the file."""
    broken: Mapping[str, tuple[str, ...]]
    """Checkpoint id → what is wrong with its folder on disk; rows that were not deleted only."""
    outputs: Mapping[str, str]
    """Run id → SHA-256 of what it exported, for runs with `output_attempt`."""
    damaged: frozenset[str] = frozenset()
    """Ids of checkpoints that the suite damaged itself."""
    killed_trainers: frozenset[int] = frozenset()
    """Process ids of trainers that the suite killed with SIGKILL, the worker being left alone."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Id of a worker → the service that it was a process of, as faults name it in `target`."""
    booted: float = 0.0
    """Unix time at which the clock of the journals was 0."""
    growth: tuple[Growth, ...] = ()
    """Of each process of the service, when all was quiet again."""
    left: Mapping[int, str] = field(default_factory=dict)
    """Process id of each trainer that is there although every run has ended → what tells of it."""
    lease_seconds: float = 3.0
    """The lease that the service ran with."""


@dataclass(frozen=True)
class Violation:
    """A broken promise."""

    promise: int
    """Its number in docs/reliability.md."""
    run_id: str
    what: str
