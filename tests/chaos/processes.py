"""Checks of idle service processes: resource growth and leftover trainers."""

import contextlib
import time
from collections.abc import Iterable

import psutil

from tests.chaos.history import Growth
from tests.chaos.inject import is_held
from tests.chaos.scene import is_alive, wait_for
from tests.chaos.world import World

_CLOSES_WITHIN = 15.0
_ENDS_WITHIN = 10.0
_AGES_DIFFER_BY = 2.0
"""Seconds; the kernel reports its boot time in whole seconds."""


class Sizes:
    """Numbers of descriptors and threads of each service at the start of a segment.

    Few processes survive a segment, so a restarted process is compared with its predecessor.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._first = self._now()

    def growth(self) -> tuple[Growth, ...]:
        """Return the growth, after the processes had time to close unused resources."""
        wait_for(lambda: not any(one.is_too_much for one in self._compared()), _CLOSES_WITHIN, every=0.5)
        return tuple(self._compared())

    def _compared(self) -> list[Growth]:
        return [
            Growth(name, (self._first[name][0], descriptors), (self._first[name][1], threads))
            for name, (descriptors, threads) in self._now().items()
            if name in self._first
        ]

    def _now(self) -> dict[str, tuple[int, int]]:
        sizes = {}
        for service in self._world.services:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(service.pid)
                sizes[service.name] = (process.num_fds(), process.num_threads())
        return sizes


def trainers_left(world: World, run_ids: Iterable[str]) -> dict[int, str]:
    """Return process ids of trainers that are alive after all runs have ended, and the source for each."""
    born: dict[int, tuple[str, float]] = {}
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for run_id in run_ids:
        for line in world.journal(run_id):
            born.setdefault(line["pid"], (run_id, booted + line["t"]))
    wait_for(lambda: not _alive(world, born), _ENDS_WITHIN, every=0.5)
    return _alive(world, born)


def _alive(world: World, born: dict[int, tuple[str, float]]) -> dict[int, str]:
    alive = {}
    for pid, (run_id, wrote) in born.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # A process that started after the trainer wrote is another one with a reused id.
            if is_alive(process) and process.create_time() <= wrote + _AGES_DIFFER_BY:
                alive[pid] = f"the journal of {run_id}"
    for path in world.lives.glob("run_*"):
        if is_held(path):
            alive[int(path.name.split(".")[2])] = f"its lock {path.name}"
    for worker in world.workers:
        with contextlib.suppress(psutil.Error):
            zygote = worker.zygote()
            for child in psutil.Process(worker.pid).children(recursive=True):
                if is_alive(child) and (zygote is None or child.pid != zygote.pid):
                    alive[child.pid] = f"{worker.name}, whose child it is: {' '.join(child.cmdline())[:200]}"
    return alive
