"""Data recorded by a campaign: the input of the checker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]
MOST_MORE = 40
"""Maximum number of descriptors or threads that a process may gain over a segment."""


@dataclass(frozen=True)
class Event:
    """Stored event of a run."""

    seq: int
    type: str
    attempt: int
    ts: datetime
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Creation:
    """One `POST /v1/runs` (or `…/resume`) as its client saw it, retries with the same key included."""

    key: str
    """`Idempotency-Key`, unique per request of a client."""
    profile: str
    """Name of the `Profile` of the run."""
    answers: tuple[str, ...]
    """Run ids of all 2xx responses to this key, including replays; empty if every try failed."""
    parent: str | None = None
    """Run that it resumes."""


@dataclass(frozen=True)
class StopCall:
    """One accepted `POST /v1/runs/{id}/stop`."""

    run_id: str
    answered: float
    """Unix time of the 2xx response, by the clock of the suite, which is also the database's."""
    save: bool


@dataclass(frozen=True)
class Transcript:
    """Events that one reader of a run's stream received, over all its connections."""

    run_id: str
    received: tuple[tuple[int, str, Mapping[str, Any]], ...]
    """(id, event, data), in the order of arrival, `end` included."""
    connections: int
    ended: bool
    """True if the `end` event came; otherwise the campaign gave up waiting."""


@dataclass(frozen=True)
class Profile:
    """Kind of run with known results: it is deterministic, so a run without faults gives every loss."""

    name: str
    backend: str
    steps: int
    max_restarts: int
    losses: Mapping[int, str]
    """Step → `float.hex` of the loss, from a run without faults; empty for runs that fail on purpose."""
    samples: Mapping[int, tuple[Any, ...]]
    """Step → row ids, from the same run."""
    output: str | None
    """SHA-256 of the exported file, from the same run."""
    must_fail_with: str | None = None
    """Error code of a run that fails on purpose; None for one that must complete unless stopped."""


@dataclass(frozen=True)
class FaultRecord:
    """Injected fault."""

    round: int
    kind: str
    """As in `tests.chaos.faults`."""
    target: str
    """Target: a service, `postgres`, `valkey`, `storage`, `all` or the process id of a trainer."""
    began: float
    ended: float
    """Unix times, by the clock of the suite."""
    requeues: bool
    """True if runs may be reaped, released or retried because of it."""


@dataclass(frozen=True)
class Growth:
    """Resource use of a service before and after a segment."""

    process: str
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @property
    def is_too_much(self) -> bool:
        """True if the growth exceeds the limit; pools may fill up to their size."""
        return any(last - first > MOST_MORE for first, last in (self.descriptors, self.threads))


@dataclass(frozen=True)
class History:
    """Complete record of a segment, collected after all clients have ended and every run had time to end."""

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
    """Run id → journal lines written by its trainers, in file order."""
    broken: Mapping[str, tuple[str, ...]]
    """Checkpoint id → verification errors of its folder on disk; only rows that were not deleted."""
    outputs: Mapping[str, str]
    """Run id → SHA-256 of the exported file, for runs with `output_attempt`."""
    parts: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """Run id → its rows of `run_parts`: the workers of other hosts, by lease epoch."""
    overlaps: tuple[str, ...] = ()
    """Training processes, of any rank and host, that began while one of an earlier attempt of the run was alive."""
    damaged: frozenset[str] = frozenset()
    """Ids of checkpoints that the suite corrupted."""
    killed_trainers: frozenset[int] = frozenset()
    """Process ids of trainers that the suite killed with SIGKILL, without killing the worker."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Worker id → name of its service, as in `FaultRecord.target`."""
    booted: float = 0.0
    """Unix time at which the clock of the journals was 0."""
    growth: tuple[Growth, ...] = ()
    """Resource use of each process of the service, after all activity has ended."""
    left: Mapping[int, str] = field(default_factory=dict)
    """Process id of each trainer that is alive although every run has ended → source of this information."""
    lease_seconds: float = 3.0
    """Lease duration of the service in seconds."""


@dataclass(frozen=True)
class Violation:
    """Violation of a promise."""

    promise: int
    """Its number in docs/internals/promises.md."""
    run_id: str
    what: str
