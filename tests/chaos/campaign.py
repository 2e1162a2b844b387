"""Campaign: rounds of faults under load, in segments that are checked after all their runs have ended."""

import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos import curves
from tests.chaos.checker import MOMENTS, MOMENTS_OF_WRONG_CLOCKS, check
from tests.chaos.clients import Clients
from tests.chaos.collect import collect, profile, reference_plans
from tests.chaos.faults import FAULTS
from tests.chaos.faults_of_hosts import lose_host
from tests.chaos.history import History, Profile, Violation
from tests.chaos.machine import SLOWNESS
from tests.chaos.processes import Sizes
from tests.chaos.profiles import PLANS, wanted_in
from tests.chaos.scene import Scene, wait_for
from tests.chaos.world import LEASE_SECONDS, World
from tests.waiting import _pause

SEGMENT_ROUNDS = 100
QUIET_SECONDS = 150.0 * SLOWNESS
_SECOND_TRIES = 2
API_BYTES = 400 * 2**20


_WINDOWS_OF_CLIENTS = (
    "creation replayed",
    "creation tried again after an error",
    "reader that never reads",
    "hanging trainer found",
    "run preempted",
    "run on two devices completed",
    "run on two hosts completed",
)


@dataclass
class Result:
    """Result of a campaign."""

    seed: int
    rounds: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    observed: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    times: dict[str, list[float]] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[str]:
        """Windows that this campaign should have hit but did not."""
        if self.rounds < len(FAULTS):
            return self.missed_after(Counter())
        clients = [window for window in _WINDOWS_OF_CLIENTS if not self.hits[window]]
        uncounted = [what for what in (MOMENTS, MOMENTS_OF_WRONG_CLOCKS) if not self.counted[what]]
        return self.missed_after(Counter()) + clients + uncounted

    def missed_after(self, hits: Counter[str]) -> list[str]:
        """Return windows of the faults so far that are in neither the previous hits nor `hits`."""
        windows = [window for fault in FAULTS if fault.__name__ in self.faults for window in FAULTS[fault]]
        left_out = {"disk full"} if self.not_tried else set()
        return [window for window in windows if window not in left_out and not (self.hits + hits)[window]]

    def add(self, other: "Result") -> None:
        """Add the result of another part of the same campaign."""
        self.faults += other.faults
        self.hits += other.hits
        self.observed += other.observed
        self.counted += other.counted
        self.violations += other.violations
        self.not_tried = other.not_tried
        for what, seconds in other.times.items():
            self.times.setdefault(what, []).extend(seconds)

    @property
    def held(self) -> bool:
        """True if no promise was broken and every window was hit."""
        return not self.violations and not self.missed


def schedule(seed: int, rounds: int) -> list[Callable[[Scene], None]]:
    """Return the faults in order: each kind once in as many rounds as there are kinds, shuffled by the seed."""
    rng = random.Random(seed)
    order: list[Callable[[Scene], None]] = []
    while len(order) < rounds:
        deck = list(FAULTS)
        rng.shuffle(deck)
        order += deck
    return order[:rounds]


def print_line(line: str) -> None:
    """Print and flush."""
    print(line, flush=True)


def run(seed: int, rounds: int, jobs: int = 1, say: Callable[[str], None] = print_line) -> Result:
    """Run a campaign; all randomness derives from the seed, except the timing of the machine.

    Its segments run in `jobs` parallel worlds. A campaign shorter than one round of each fault is a sample: a fault
    that missed its window is not tried again.
    """
    began = time.monotonic()
    if SLOWNESS > 1:
        say(
            f"other programs use this machine, or it is {SLOWNESS:g} times slower than the reference: "
            f"leases of {LEASE_SECONDS:g} s"
        )
    segments = range(0, rounds, SEGMENT_ROUNDS)
    parts = [segments[number::jobs] for number in range(min(jobs, len(segments)))]
    if len(parts) == 1:
        result = _part(seed, rounds, parts[0], say)
    else:
        result = Result(seed, rounds)
        # Spawned, not forked: a world has threads, and its children exit with it.
        with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
            for part in [pool.submit(_part, seed, rounds, part, print_line) for part in parts]:
                result.add(part.result())
    result.seconds = time.monotonic() - began
    return result


def _part(seed: int, rounds: int, segments: Sequence[int], say: Callable[[str], None]) -> Result:
    """Run some segments of a campaign, given by their first rounds, sequentially in one world."""
    result = Result(seed, rounds)
    with tempfile.TemporaryDirectory(prefix="anneal-chaos-", ignore_cleanup_errors=True) as folder:
        order = schedule(seed, rounds)
        world = World(Path(folder), seed, with_hosts="hosts" in _created(order))
        try:
            if not world.has_small_disk:
                result.not_tried = ["disk full: this user may not mount the small file system that it needs"]
            profiles = _references(world, order, say)
            for first in segments:
                part = order[first : first + SEGMENT_ROUNDS]
                _segment(world, profiles, part, first, first == segments[-1], result, say)
        finally:
            world.close()
    return result


def _created(order: Sequence[Callable[[Scene], None]]) -> set[str | None]:
    """Return the kinds of training runs that a campaign may create."""
    expected = {wanted_in(number) for number in range(1, len(order) + 1)}
    return expected | ({"hosts"} if lose_host in order else set())


def _references(
    world: World, order: Sequence[Callable[[Scene], None]], say: Callable[[str], None]
) -> dict[str, Profile]:
    """Run each kind that these rounds may create once without faults, and return the profiles."""
    say("reference runs without faults …")
    clients = Clients(world, 0)
    created = _created(order)
    plans = [plan for plan in reference_plans() if plan.backend == "fake" or plan.name in created]
    ids = {plan.name: clients.create(plan.name) for plan in plans}
    statement = "SELECT name, status, attempt, error_message FROM runs WHERE status NOT IN ('completed')"
    if wait_for(lambda: not world.rows(statement), 120 * SLOWNESS) is None:
        raise AssertionError(f"undisturbed runs did not complete: {world.rows(statement)}")
    clients.join_streams(30)
    return {plan.name: profile(world, plan, ids.get(plan.name)) for plan in PLANS.values()}


def _segment(
    world: World,
    profiles: dict[str, Profile],
    order: list[Callable[[Scene], None]],
    first: int,
    is_last: bool,
    result: Result,
    say: Callable[[str], None],
) -> None:
    before = {row["id"] for row in world.rows("SELECT id FROM runs")}
    clients = Clients(world, result.seed * 1000 + first)
    scene = Scene(world, clients, random.Random(f"{result.seed} {first}"))
    sizes = Sizes(world)
    clients.start()
    for number, fault in enumerate(order, first + 1):
        _round(scene, number, fault, result, say)
    tries = _SECOND_TRIES if is_last and result.rounds >= len(FAULTS) else 0
    for number in range(1, tries + 1):
        # Faults depend on timing, so those that missed are tried again.
        missed = set(result.missed_after(scene.hits))
        for fault in [fault for fault, windows in FAULTS.items() if missed & set(windows)]:
            _round(scene, first + len(order) + number, fault, result, say)
    clients.create("hanger")  # no faults from here on: only its missing heartbeat reveals it
    clients.finish()
    unfinished = "SELECT id FROM runs WHERE status NOT IN ('completed', 'failed', 'cancelled')"
    quiet = time.monotonic()
    wait_for(lambda: not world.rows(unfinished), QUIET_SECONDS, every=0.2)
    clients.join_streams(30)
    say(f"all runs ended {time.monotonic() - quiet:.1f} s after the last fault; checking …")
    history = collect(world, clients, scene, profiles, before, sizes)
    for growth in history.growth:
        say(f"{growth.process}: {growth.descriptors} descriptors and {growth.threads} threads, before and after")
    report = check(history)
    found_hanging = [
        event
        for events in history.events.values()
        for event in events
        if event.type == "status" and "neither reported nor printed" in str(event.data.get("reason"))
    ]
    scene.hits["hanging trainer found"] += len(found_hanging)
    scene.hits["run preempted"] += sum(
        event.type == "status" and str(event.data.get("reason")).startswith("preempted")
        for events in history.events.values()
        for event in events
    )
    for what, hosts in (("run on two devices", 1), ("run on two hosts", 2)):
        on_two = [row for row in history.runs.values() if (row["devices_needed"], row["hosts_needed"]) == (2, hosts)]
        scene.hits[f"{what} completed"] += sum(row["status"] == "completed" for row in on_two)
        scene.hits[f"{what} tried again"] += sum(row["attempt"] - 1 for row in on_two)
    result.hits += scene.hits + clients.hits
    result.observed += report.observed
    result.counted += Counter(report.counted)
    for what, seconds in scene.seconds.items():
        result.times.setdefault(what, []).extend(seconds)
    violations = [*report.violations, *(Violation(promise, "", what) for promise, what in scene.broken)]
    for row in world.rows(curves.MISMATCHES, ids=list(history.runs)):
        violations.append(Violation(5, row["run_id"], f"its curves have other points than its event log: {row}"))
    result.violations += violations
    for violation in violations:
        say(f"BROKEN promise {violation.promise} {violation.run_id}: {violation.what}")
    for run_id in sorted({violation.run_id for violation in violations} & history.runs.keys()):
        say(_course(history, run_id))
    for run_id in history.runs:
        shutil.rmtree(world.storage / "runs" / run_id, ignore_errors=True)


def _course(history: History, run_id: str) -> str:
    """Format what happened to a run: its attempts, its checkpoints, and its events other than lines and metrics."""
    attempts = [f"  attempt {row['attempt']}: {dict(row)}" for row in history.attempts.get(run_id, ())]
    saved = [
        f"  checkpoint of step {row['step']}, attempt {row['attempt']}: bad {row['bad_reason']}, deleted "
        f"{row['deleted_at']}"
        for row in history.checkpoints.get(run_id, ())
    ]
    events = [
        f"  event {event.seq} {event.ts:%H:%M:%S.%f} {event.type}, attempt {event.attempt}: {dict(event.data)}"
        for event in history.events.get(run_id, ())
        if event.type not in ("log", "metric", "progress", "config")
    ]
    row = history.runs[run_id]
    head = f"run {run_id}, {row.get('name')}: {row['status']} at step {row['current_step']} in attempt {row['attempt']}"
    return "\n".join([head, *attempts, *saved, *events])


def _round(
    scene: Scene, number: int, fault: Callable[[Scene], None], result: Result, say: Callable[[str], None]
) -> None:
    if (name := wanted_in(number)) and number <= result.rounds:
        scene.clients.want(name, priority=10)
    scene.round, scene.kind = number, fault.__name__
    scene.random.seed(f"{result.seed} {number}")
    began, before = time.monotonic(), Counter(scene.hits)
    fault(scene)
    result.faults[fault.__name__] += 1
    hit = ", ".join(scene.hits - before) or "missed"
    say(f"round {number:4d}  {fault.__name__:22s} {time.monotonic() - began:5.1f} s  {hit}")
    _look_at_memory(scene.world, scene)
    _pause(scene.random.uniform(0.0, 0.5))


def _look_at_memory(world: World, scene: Scene) -> None:
    for api in world.apis:
        size = psutil.Process(api.pid).memory_info().rss
        if size > API_BYTES:
            scene.broken.append((17, f"{api.name} has grown to {size >> 20} MiB"))
