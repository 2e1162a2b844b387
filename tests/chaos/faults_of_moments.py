"""Faults at a chosen moment: between a write and its commit, or during a save."""

from pathlib import Path

import psutil

from tests.chaos.scene import Scene, is_alive, wait_for
from tests.chaos.world import Service
from worker.wire.journal import read_journal

LIED_ABOUT = (
    "create", "claim", "begin", "append", "renew", "begin_save", "checkpoint", "complete", "request_stop", "cancel",
    "mark_notified",
)  # fmt: skip


def ambiguous_commits(scene: Scene) -> None:
    """Break the connection at a commit, once after and once before it, for each kind of transaction."""
    orders = scene.world.orders
    orders.carried_out()
    taken: set[str] = set()
    with scene.fault("all", requeues=True):
        expected = {f"{verb} {how}": (verb, how) for verb in LIED_ABOUT for how in ("after", "before")}
        for name, (verb, how) in expected.items():
            orders.give(name, verb=verb, how=how, process="")
        stopped = [scene.clients.create(profile, priority=500) for profile in ("plain", "saver")]
        wait_for(lambda: all(scene.world.journal(run_id) for run_id in stopped), 5)
        for run_id in stopped:
            scene.clients.stop(run_id)
        wait_for(lambda: taken.update(orders.carried_out()) or len(taken) == len(expected), 5)
        orders.withdraw()
        taken.update(orders.carried_out())
    for name in taken:
        verb, how = expected[name]
        scene.hits[f"{verb} committed, answer lost" if how == "after" else f"{verb} lost before its commit"] += 1


def stop_during_claim(scene: Scene) -> None:
    """Request a stop between a claim and its commit."""
    orders = scene.world.orders
    orders.carried_out()
    with scene.fault("workers", requeues=False):
        orders.give("claim hold", verb="claim", how="hold", seconds=0.6, process="worker")
        run_id = scene.clients.create("plain", priority=950)
        if wait_for(orders.carried_out, 30, every=0.005):
            scene.hits["stop during claim"] += scene.clients.stop(run_id) == 202
        orders.withdraw()


def _saving(scene: Scene) -> tuple[str, Service, Path] | None:
    """Return a run, its worker and the staging folder of the checkpoint that it is writing."""
    run = scene.a_training_run("saver")
    if not run:
        return None
    run_id, worker = run
    folder = scene.world.storage / "runs" / run_id
    staging = wait_for(lambda: next(folder.glob("a*/.checkpoint-*"), None), 5, every=0.005)
    return (run_id, worker, staging) if staging else None


def stop_during_save(scene: Scene) -> None:
    """Request a stop while a checkpoint is being written."""
    saving = _saving(scene)
    if saving:
        with scene.fault(saving[1].name, requeues=False):
            scene.hits["stop during save"] += scene.clients.stop(saving[0]) == 202


def torn_save(scene: Scene) -> None:
    """Kill the trainer while it writes a checkpoint; runs never resume from the partial checkpoint."""
    saving = _saving(scene)
    if not saving:
        return
    _, worker, staging = saving
    with scene.fault(worker.name, requeues=True):
        zygote = worker.zygote()
        if zygote is not None:
            zygote.kill()
        else:
            worker.kill()
        wait_for(lambda: not _trainers_of(staging), 2)
        scene.hits["torn save"] += staging.exists() and not staging.with_name(staging.name[1:-4]).exists()
        if zygote is None:
            worker.start()


def _trainers_of(staging: Path) -> bool:
    lines = read_journal(staging.parent.parent / "journal.jsonl")
    return bool(lines) and psutil.pid_exists(lines[-1]["pid"]) and is_alive(psutil.Process(lines[-1]["pid"]))


def flip_a_byte(scene: Scene) -> None:
    """Corrupt the newest checkpoint and kill the worker: the run falls back to the previous checkpoint."""
    run = scene.a_training_run("long", steps=42)
    if not run:
        return
    run_id, worker = run
    rows = scene.world.rows(
        "SELECT id, attempt, name FROM checkpoints WHERE run_id = :run AND deleted_at IS NULL ORDER BY step DESC",
        run=run_id,
    )
    if not rows or worker is not scene.a_worker_with(run_id, 0):
        return
    with scene.fault(f"{worker.name} {rows[0]['id']}", requeues=True):
        weights = scene.world.storage / "runs" / run_id / f"a{rows[0]['attempt']}" / rows[0]["name"] / "weights.bin"
        with weights.open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))
        scene.damaged.add(rows[0]["id"])
        worker.kill()
        worker.start()

    def noticed() -> bool:
        return bool(scene.world.rows("SELECT 1 FROM checkpoints WHERE id = :id AND bad_reason IS NOT NULL", **rows[0]))

    scene.hits["damaged checkpoint passed over"] += bool(wait_for(noticed, 6))
