"""Context of the faults of a campaign, and their records."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from tests.chaos.causes import over_at
from tests.chaos.clients import Clients
from tests.chaos.history import FaultRecord
from tests.chaos.world import LEASE_SECONDS, Service, World
from tests.waiting import _pause, rest

T = TypeVar("T")


@dataclass
class Scene:
    """Context of a fault, and the records of all faults."""

    world: World
    clients: Clients
    random: random.Random
    round: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    records: list[FaultRecord] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Violations observed during a fault: promise number and description."""
    killed_trainers: set[int] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Measured seconds for the report, by name."""

    @contextmanager
    def fault(self, target: str, *, requeues: bool) -> Iterator[None]:
        """Record the start and end of the fault."""
        began = time.time()
        try:
            yield
        finally:
            kind = self.kind
            self.records.append(FaultRecord(self.round, kind, target, began, time.time(), requeues))

    kind: str = ""

    def time(self, what: str, seconds: float) -> None:
        """Record a duration."""
        self.seconds.setdefault(what, []).append(seconds)

    def calm_down(self) -> None:
        """Wait until no earlier fault explains a loss, so that the next one has a single cause."""
        over = max((over_at(one, LEASE_SECONDS) for one in self.records if one.requeues), default=0.0)
        wait_for(lambda: time.time() > over, over - time.time() + 1, every=0.1)

    @contextmanager
    def lying(self, verb: str) -> Iterator[None]:
        """Close the connection after the next commit of this kind of transaction."""
        orders = self.world.orders
        orders.carried_out()
        orders.give(f"{verb} after", verb=verb, how="after", process="")
        try:
            yield
            self.hits[f"{verb} committed, answer lost"] += bool(wait_for(orders.carried_out, 5))
        finally:
            orders.withdraw()

    def a_worker_with(self, run_id: str, seconds: float = 10) -> Service | None:
        """Return the worker that executes a run, or None."""

        def owner() -> Service | None:
            for worker in self.world.workers:
                if any(run["id"] == run_id for run in self.world.live_runs(worker)):
                    return worker
            return None

        return wait_for(owner, seconds)

    def a_training_run(self, profile: str, steps: int = 2, seconds: float = 30) -> tuple[str, Service] | None:
        """Create a run with top priority and wait until it trains; return its id and its worker."""
        run_id = self.clients.create(profile, priority=900)
        worker = self.a_worker_with(run_id, seconds)
        reached = wait_for(lambda: self._step(run_id) >= steps, seconds) if worker else None
        return (run_id, worker) if worker and reached else None

    def _step(self, run_id: str) -> int:
        return max((line.get("step", 0) for line in self.world.journal(run_id)), default=0)

    def all_steps(self) -> int:
        """Return the number of journal lines of all live runs."""
        return sum(len(self.world.journal(run["id"])) for run in self.world.live_runs())


def wait_for(probe: Callable[[], T | None], seconds: float, every: float = 0.03) -> T | None:
    """Return the first truthy result of `probe`, or None after `seconds`: the fault then missed."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := probe():
            return value
        if time.monotonic() > deadline:
            return None
        _pause(rest(began, began, every))  # a moment that a fault aims at is short, however long it was waited for


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
