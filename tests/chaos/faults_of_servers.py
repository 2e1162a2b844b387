"""Faults of dependencies: PostgreSQL, Valkey, network, clocks and disk."""

import os
import signal
from pathlib import Path

import psutil

from app.infra.broker import QUEUE, TASK, celery_app
from tests.chaos.scene import Scene, is_alive, wait_for
from tests.chaos.world import LEASE_SECONDS
from tests.waiting import _pause

KILL_AFTER_SECONDS = 2 / 3 * LEASE_SECONDS


def kill_postgres(scene: Scene) -> None:
    """Kill PostgreSQL and restart it on the same data."""
    live = wait_for(scene.world.live_runs, 10)
    with scene.fault("postgres", requeues=True):
        scene.hits["Postgres killed with runs"] += bool(live)
        scene.world.down(scene.world.servers.postgres)
        scene.world.up(scene.world.servers.postgres)


def kill_valkey(scene: Scene) -> None:
    """Kill Valkey; training and streaming continue during the outage."""
    scene.a_training_run("plain")
    with scene.fault("valkey", requeues=False):
        scene.world.down(scene.world.servers.valkey)
        before = scene.all_steps()
        went_on = wait_for(lambda: scene.all_steps() > before, 1.5)
        scene.hits["trained while Valkey was away"] += bool(went_on)
        scene.world.up(scene.world.servers.valkey)


def freeze_postgres(scene: Scene) -> None:
    """Freeze the database for less than two thirds of a lease: training continues and its events are kept."""
    if not scene.a_training_run("long"):
        return
    processes = scene.world.server_processes(scene.world.servers.postgres)
    live = [run["id"] for run in scene.world.live_runs()]
    with scene.fault("postgres", requeues=True):
        before = sum(len(scene.world.journal(run_id)) for run_id in live)
        for process in processes:
            _signal(process, signal.SIGSTOP)
        try:
            _pause(scene.random.uniform(0.8, 0.6 * KILL_AFTER_SECONDS))
            after = sum(len(scene.world.journal(run_id)) for run_id in live)
            scene.hits["trained while Postgres stood still"] += after > before
        finally:
            for process in processes:
                _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def long_absence(scene: Scene) -> None:
    """Stop PostgreSQL for longer than two thirds of a lease: every trainer must exit."""
    scene.a_training_run("long")
    live = [(run["id"], scene.world.trainer(run["id"])) for run in scene.world.live_runs()]
    with scene.fault("postgres", requeues=True):
        scene.world.down(scene.world.servers.postgres)
        try:
            _pause(KILL_AFTER_SECONDS + 0.7)
            for run_id, trainer in live:
                if trainer is not None and is_alive(trainer):
                    scene.broken.append((19, f"{run_id}: its trainer outlived its lease without the database"))
            scene.hits["lease unrenewed while Postgres was away"] += any(trainer for _, trainer in live)
            _pause(scene.random.choice((0.0, 1.5)))
        finally:
            scene.world.up(scene.world.servers.postgres)


def silent_cut(scene: Scene) -> None:
    """Drop all packets between a worker and the database, for a short time or longer than the lease."""
    run = scene.a_training_run("long")
    if not run:
        return
    way = run[1].postgres
    before = way.swallowed
    with scene.fault(run[1].name, requeues=True):
        way.fall_silent()
        try:
            _pause(scene.random.choice((0.8, 1.5 * LEASE_SECONDS)))
        finally:
            if scene.random.random() < 0.5:
                way.cut()
            way.heal()
        scene.hits["connection fell silent"] += way.swallowed > before


def latency_and_clocks(scene: Scene) -> None:
    """Delay every response of the database and set every process clock off by an hour, forward or back.

    No other fault is active at that time, so a lease that depends on the wall clock would be detected.
    """
    scene.calm_down()
    ways = [service.postgres for service in scene.world.services]
    before = sum(way.delayed for way in ways)
    live = wait_for(scene.world.live_runs, 10)
    with scene.fault("all", requeues=False):
        clocks = scene.world.orders_folder / "clock"
        for service in scene.world.services:
            (clocks / service.name).write_text(str(scene.random.choice((-3600, 3600))))
            service.postgres.delay(0.03)
        _pause(scene.random.uniform(1.5, 2.5))
        for service in scene.world.services:
            service.postgres.heal()
            (clocks / service.name).unlink()
    scene.hits["slow answers of the database"] += sum(way.delayed for way in ways) > before
    scene.hits["clocks jumped under runs"] += bool(live)


def lose_and_double_hints(scene: Scene) -> None:
    """Delete all hints with FLUSHALL, then send too many."""
    valkey = scene.world.redis()
    for _ in range(4):
        scene.clients.want("plain")
    with scene.fault("valkey", requeues=False):
        scene.hits["hints lost"] += bool(wait_for(lambda: valkey.llen(QUEUE), 6, every=0.005))
        valkey.flushall()
        celery = celery_app(scene.world.settings.redis_url or "")
        for _ in range(40):
            celery.send_task(TASK, ignore_result=True, retry=False)
        celery.close()
        scene.hits["doubled hints"] += 40
    valkey.close()


def disk_full(scene: Scene) -> None:
    """Fill the storage while a run saves."""
    if not scene.world.has_small_disk:
        return
    run = scene.a_training_run("saver")
    if not run:
        return
    ballast = scene.world.storage / "ballast"
    failed = "SELECT count(*) AS n FROM runs WHERE error_code = 'disk_full'"
    before = scene.world.rows(failed)[0]["n"]
    with scene.fault("storage", requeues=True):
        try:
            _fill(ballast)
            hit = wait_for(lambda: scene.world.rows(failed)[0]["n"] > before, 6)
            scene.hits["disk full"] += bool(hit)
        finally:
            ballast.unlink(missing_ok=True)


def _fill(ballast: Path) -> None:
    block = b"\0" * 2**16
    with ballast.open("wb", buffering=0) as file:
        while len(block) > 1:
            try:
                os.write(file.fileno(), block)
            except OSError:
                block = block[: len(block) // 2]
