"""Faults of the service's own processes: SIGKILL, SIGSTOP and SIGTERM."""

import signal
import time
from typing import Any

import psutil

from tests.chaos.scene import Scene, is_alive, wait_for
from tests.chaos.world import LEASE_SECONDS, Service

GRACE_SECONDS = 2 * LEASE_SECONDS
CLOSE_STREAMS_WITHIN = 5.0


def kill_worker(scene: Scene) -> None:
    """Kill a worker, possibly with a run that allows no restart; stop another of its runs before it is reaped."""
    scene.a_training_run("fragile")
    run = scene.a_training_run("long", steps=1)
    if not run:
        return
    run_id, worker = run
    victims = scene.world.live_runs(worker)
    with scene.fault(worker.name, requeues=True):
        worker.kill()
        scene.hits["worker killed with a run"] += bool(victims)
        scene.hits["stop while the worker is lost"] += scene.clients.stop(run_id) == 202
        if scene.random.random() < 0.4:
            # The worker does not restart and release its run, so the lease has to expire.
            with scene.lying("reap"):
                wait_for(lambda: not _still(scene, victims), LEASE_SECONDS * 3)
            scene.hits["lease ran out"] += not _still(scene, victims)
        worker.start()


def _still(scene: Scene, victims: list[dict[str, Any]]) -> bool:
    live = {(run["id"], run["attempt"]) for run in scene.world.live_runs()}
    return any((run["id"], run["attempt"]) in live for run in victims)


def kill_zygote(scene: Scene) -> None:
    """Kill the zygote, and with it all trainers that it forked."""
    worker = scene.world.workers[0]
    zygote = wait_for(lambda: worker.zygote() if _has_trainer(scene, worker) else None, 15)
    if zygote is None:
        return
    with scene.fault(worker.name, requeues=True), scene.lying("retry"):
        zygote.kill()
        scene.hits["zygote killed with a run"] += 1


def _has_trainer(scene: Scene, worker: Service) -> bool:
    return any(scene.world.trainer(run["id"]) for run in scene.world.live_runs(worker))


def kill_trainer(scene: Scene) -> None:
    """Kill only a training process: another attempt continues the run, unless it ends at the same step again."""
    run = scene.a_training_run("plain")
    trainer = scene.world.trainer(run[0]) if run else None
    if trainer is None:
        return
    with scene.fault(str(trainer.pid), requeues=False), scene.lying("retry"):
        scene.killed_trainers.add(trainer.pid)
        trainer.kill()
        scene.hits["trainer killed"] += 1


def kill_api(scene: Scene) -> None:
    """Kill an API replica while clients create, stop and stream."""
    api = scene.random.choice(scene.world.apis)
    with scene.fault(api.name, requeues=False):
        open_connections = _connections(api)
        api.kill()
        scene.hits["API killed with clients connected"] += open_connections > 0
        api.start()
        scene.world.wait_until_answers(api)


def _connections(service: Service) -> int:
    try:
        return sum(one.status == "ESTABLISHED" for one in psutil.Process(service.pid).net_connections("tcp"))
    except psutil.Error:
        return 0


def freeze_worker(scene: Scene) -> None:
    """Freeze a worker past its lease: its trainers must exit before others start, and its writes are fenced."""
    victim = scene.a_training_run("long")
    if not victim:
        return
    run_id, worker = victim
    trainer = scene.world.trainer(run_id)
    attempts = _attempts(scene, run_id)
    said = len(worker.said())
    with scene.fault(worker.name, requeues=True):
        worker.signal(signal.SIGSTOP)
        try:
            frozen_at = time.monotonic()
            wait_for(lambda: trainer is None or not is_alive(trainer), LEASE_SECONDS)
            if trainer is not None and is_alive(trainer):
                scene.broken.append((3, f"the trainer of a frozen worker lives after a lease: {trainer.pid}"))
            scene.time("trainer of a frozen worker gone", time.monotonic() - frozen_at)
            wait_for(lambda: not any(run["id"] == run_id for run in scene.world.live_runs(worker)), LEASE_SECONDS * 3)
            # No process kills the trainer, so if it outlived its lease, it would run at the same time as its successor.
            succeeded = wait_for(lambda: _attempts(scene, run_id) > attempts, LEASE_SECONDS * 2)
            scene.hits["another trained while the first worker stood still"] += bool(succeeded)
        finally:
            worker.signal(signal.SIGCONT)

        def noticed() -> bool:
            news = worker.said()[said:]
            return f"{run_id}: fenced" in news or f"{run_id}: its lease ran out" in news or "fenced" in news

        scene.hits["stale worker woke up and was fenced"] += bool(wait_for(noticed, 8))


def _attempts(scene: Scene, run_id: str) -> int:
    return max((line["attempt"] for line in scene.world.journal(run_id)), default=0)


def deploy(scene: Scene) -> None:
    """Send SIGTERM to a replica: streams close in time and readers reconnect to another replica."""
    api = scene.random.choice(scene.world.apis)
    with scene.fault(api.name, requeues=False):
        streams = _connections(api)
        took = api.terminate(timeout=30)
        scene.time("API ended after SIGTERM", took)
        if took > CLOSE_STREAMS_WITHIN + 2:
            scene.broken.append((18, f"{api.name} took {took:.1f} s to end"))
        scene.hits["API replaced with clients connected"] += streams > 0
        api.start()
        scene.world.wait_until_answers(api)


def drain(scene: Scene) -> None:
    """Send SIGTERM to a worker: its trainers save and its runs are released."""
    run = scene.a_training_run("long")
    if not run:
        return
    worker = run[1]
    with scene.fault(worker.name, requeues=True):
        with scene.lying("release"):
            took = worker.terminate(timeout=60)
        scene.time("worker ended after SIGTERM", took)
        if took > GRACE_SECONDS + 6:
            scene.broken.append((18, f"{worker.name} took {took:.1f} s to end"))
        rows = scene.world.rows(
            "SELECT 1 FROM run_attempts WHERE run_id = :run AND outcome = 'handed_back'", run=run[0]
        )
        scene.hits["run handed back"] += bool(rows)
        worker.start()
