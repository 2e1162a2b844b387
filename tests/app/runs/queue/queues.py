"""Made-up queues and workers, without a database."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.runs.queue.fit import DeviceOffer, Fleet, Needs, WorkerOffer
from app.runs.queue.policy import Snapshot, TrainingRun, WaitingRun


@dataclass(frozen=True)
class BusyWorker:
    """Worker and the runs that use its devices."""

    offer: WorkerOffer
    training: tuple[TrainingRun, ...]


def worker(
    *frees_at: float, worker_id: str = "w", memory_mb: int | Sequence[int] = 80_000, **change: Any
) -> BusyWorker:
    """Return a GPU worker with a device for each number: the seconds until its run ends, or 0 if it is free."""
    memory = (memory_mb,) * len(frees_at) if isinstance(memory_mb, int) else memory_mb
    runs = [f"{worker_id}-{index}" if at > 0 else None for index, at in enumerate(frees_at)]
    devices = tuple(DeviceOffer(mb, run) for mb, run in zip(memory, runs, strict=True))
    offer = replace(WorkerOffer(worker_id, frozenset({"celery"}), "cuda", "H100", devices), **change)
    return BusyWorker(offer, tuple(TrainingRun(run, 1, end=at) for run, at in zip(runs, frees_at, strict=True) if run))


def waiting(run_id: str = "a", **change: Any) -> WaitingRun:
    """Return a pending run; what is no field of `WaitingRun` is one of its needs."""
    fields = {name: change.pop(name) for name in list(change) if name in WaitingRun.__dataclass_fields__}
    return WaitingRun(run_id, replace(Needs("celery"), **change), **fields)


def in_order(runs: Sequence[WaitingRun]) -> list[WaitingRun]:
    """Give runs priorities by which they are considered in this order."""
    return [replace(run, priority=-place) for place, run in enumerate(runs)]


def snapshot(
    workers: Sequence[BusyWorker],
    runs: Sequence[WaitingRun],
    seconds: Mapping[str, float] | Callable[[WaitingRun, WorkerOffer], float] | None = None,
    training: Sequence[TrainingRun] = (),
    gpu_backends: frozenset[str] = frozenset(),
    **fields: Any,
) -> Snapshot:
    """Return a snapshot; a run without a duration of its own takes 10 s."""
    durations = seconds or {}
    predict = durations if callable(durations) else lambda run, _: durations.get(run.run_id, 10.0)
    all_training = [*training, *(run for worker in workers for run in worker.training)]
    fleet = Fleet([worker.offer for worker in workers], gpu_backends)
    return Snapshot(fleet, runs, predict, all_training, **fields)


UNKNOWN = math.inf
