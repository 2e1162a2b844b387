"""Collects the history of a segment from the database, the trainers' journals, the storage and the clients."""

import hashlib
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.chaos.clients import Clients
from tests.chaos.history import Event, History, Profile
from tests.chaos.processes import Sizes, trainers_left
from tests.chaos.profiles import PLANS, Plan
from tests.chaos.scene import Scene
from tests.chaos.world import LEASE_SECONDS, World
from worker.checkpoint_files import manifest

_EXPORTED = {"fake": ("fake_model.json",), "celery": ("adapter_model.safetensors", "model.safetensors")}


def profile(world: World, plan: Plan, run_id: str | None) -> Profile:
    """Build the profile of a kind of run from a reference run without faults."""
    steps = [line for line in world.journal(run_id) if line["event"] == "step"] if run_id else []
    return Profile(
        plan.name,
        plan.backend,
        plan.steps,
        plan.max_restarts,
        {line["step"]: line["loss_hex"] for line in steps},
        {line["step"]: tuple(line["samples"]) for line in steps},
        # A run that is retried automatically needs more than one attempt even without faults.
        _output(world, run_id, max(line["attempt"] for line in world.journal(run_id)), plan.backend)
        if run_id
        else None,
        plan.must_fail_with,
    )


def collect(
    world: World, clients: Clients, scene: Scene, profiles: dict[str, Profile], before: set[str], sizes: Sizes
) -> History:
    """Collect the history of all runs except those in `before`.

    Runs are selected by id: neither the order of ids (an API with a clock in the future assigns later ones) nor a time
    separates the runs of one segment from those of the next.
    """
    rows = {row["id"]: row for row in world.rows("SELECT * FROM runs ORDER BY id") if row["id"] not in before}
    ids = list(rows)
    checkpoints = _grouped(
        world.rows("SELECT * FROM checkpoints WHERE run_id = ANY(:ids) ORDER BY created_at, id", ids=ids)
    )
    return History(
        profiles=profiles,
        lease_seconds=LEASE_SECONDS,
        creations=clients.creations(),
        stops=tuple(clients.stops),
        transcripts=clients.transcripts(),
        faults=tuple(scene.records),
        runs=rows,
        growth=sizes.growth(),
        left=trainers_left(world, ids),
        workers=world.worker_names(),
        booted=time.time() - time.clock_gettime(time.CLOCK_BOOTTIME),
        attempts=_grouped(
            world.rows("SELECT * FROM run_attempts WHERE run_id = ANY(:ids) ORDER BY run_id, attempt", ids=ids)
        ),
        events=_events(world, ids),
        checkpoints=checkpoints,
        parts=_grouped(
            world.rows("SELECT run_id, lease_epoch, worker_id FROM run_parts WHERE run_id = ANY(:ids)", ids=ids)
        ),
        overlaps=world.overlaps(),
        journals={run_id: tuple(world.journal(run_id)) for run_id in rows},
        broken=_broken(world.storage, [row for group in checkpoints.values() for row in group]),
        outputs={
            run_id: _output(world, run_id, row["output_attempt"], row["backend"])
            for run_id, row in rows.items()
            if row["output_attempt"] is not None
        },
        damaged=frozenset(scene.damaged),
        killed_trainers=frozenset(scene.killed_trainers),
    )


def _grouped(rows: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], ...]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["run_id"]].append(row)
    return {run_id: tuple(group) for run_id, group in groups.items()}


def _events(world: World, ids: list[str]) -> dict[str, tuple[Event, ...]]:
    events_by_run: dict[str, list[Event]] = defaultdict(list)
    statement = (
        "SELECT run_id, seq, type, attempt, ts, data::text AS data FROM run_events WHERE run_id = ANY(:ids) "
        "ORDER BY run_id, seq"
    )
    for row in world.rows(statement, ids=ids):
        event = Event(row["seq"], row["type"], row["attempt"], row["ts"], json.loads(row["data"]))
        events_by_run[row["run_id"]].append(event)
    return {run_id: tuple(events) for run_id, events in events_by_run.items()}


def _broken(storage: Path, rows: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    broken = {}
    for row in rows:
        if row["deleted_at"] is None:
            folder = storage / "runs" / row["run_id"] / f"a{row['attempt']}" / row["name"]
            if wrong := manifest.verify(folder, row["manifest_sha256"]):
                broken[row["id"]] = tuple(wrong)
    return broken


def _output(world: World, run_id: str, attempt: int, backend: str) -> str:
    folder = world.storage / "runs" / run_id / f"a{attempt}" / "output"
    exported = [folder / name for name in _EXPORTED[backend] if (folder / name).exists()]
    return hashlib.sha256(exported[0].read_bytes()).hexdigest() if exported else "missing"


def reference_plans() -> list[Plan]:
    """Return the kinds that need a reference run."""
    return [plan for plan in PLANS.values() if plan.must_fail_with is None]
