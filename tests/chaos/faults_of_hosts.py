"""Faults of one host of a run on two, while the other one works."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.chaos.scene import Scene, is_alive, wait_for
from tests.chaos.world import LEASE_SECONDS, Service
from tests.waiting import _pause


def lose_host(scene: Scene) -> None:
    """Disturb one host of a run on two, most often the one that does not lead: another attempt completes the run."""
    run = scene.a_training_run("hosts", steps=6, seconds=60)
    if not run:
        return
    run_id, lead = run
    members = scene.world.members(run_id)
    if not members:
        return
    victim = members[0] if scene.random.random() < 0.75 else lead
    how = scene.random.choice((killed, frozen, cut_off, shut_down, without_trainer))
    attempt = _attempt(scene, run_id)
    with scene.fault(victim.name, requeues=True), how(scene, victim):
        again = wait_for(lambda: _attempt(scene, run_id) != attempt, 4 * LEASE_SECONDS, every=0.1)
        scene.hits["host of a run on two hosts lost"] += bool(again)
        scene.hits[f"{'lead' if victim is lead else 'other host'} {how.__name__}"] += bool(again)


def _attempt(scene: Scene, run_id: str) -> int | None:
    """Return the attempt of the run that trains; None if it waits or has ended."""
    return next((run["attempt"] for run in scene.world.live_runs() if run["id"] == run_id), None)


@contextmanager
def killed(_: Scene, worker: Service) -> Iterator[None]:
    worker.kill()
    yield
    worker.start()


@contextmanager
def frozen(scene: Scene, worker: Service) -> Iterator[None]:
    """Freeze the supervisor for three leases; its processes must end before."""
    trainers = _trainers(worker)
    worker.signal(signal.SIGSTOP)
    try:
        yield
        wait_for(lambda: not any(map(is_alive, trainers)), LEASE_SECONDS)
        scene.broken += [(3, f"process {one.pid} of a frozen host lives") for one in trainers if is_alive(one)]
        _pause(LEASE_SECONDS)
    finally:
        worker.signal(signal.SIGCONT)


@contextmanager
def cut_off(_: Scene, worker: Service) -> Iterator[None]:
    """Cut the host off from the database, while the network of the group works."""
    worker.postgres.fall_silent()
    try:
        yield
    finally:
        worker.postgres.heal()


@contextmanager
def shut_down(_: Scene, worker: Service) -> Iterator[None]:
    worker.terminate(timeout=60)
    yield
    worker.start()


@contextmanager
def without_trainer(scene: Scene, worker: Service) -> Iterator[None]:
    """Kill only the training processes of the host."""
    for process in _trainers(worker):
        scene.killed_trainers.add(process.pid)
        process.kill()
    yield


def _trainers(worker: Service) -> list[psutil.Process]:
    zygote = worker.zygote()
    return zygote.children() if zygote is not None else []
