"""Direct database access for tests below the API."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, insert, literal, select, text
from sqlalchemy.dialects.postgresql import JSONB

from app.infra.ids import new_id
from app.runs.queue.claim import claim_run
from app.runs.queue.holds import StoredHold, StoredHolds, StoredQuotaHold
from app.runs.queue.holds_table import read_holds, store_holds
from app.runs.state import machine
from app.tables.administration.api_keys import ApiKey
from app.tables.datasets import Dataset
from app.tables.events import RunEvent
from app.tables.experiments import Experiment
from app.tables.runs import Attempt, Run, RunRewardModel
from app.tables.usage import DeletedAttempt, count_attempts
from app.workers import registry


def add_run(engine: Engine, **values: Any) -> Any:
    """Insert a pending run of the fake backend with a new experiment and dataset."""
    with engine.begin() as connection:
        experiment, dataset = parents(connection)
        defaults = {
            "id": new_id("run"),
            "experiment_id": experiment,
            "dataset_id": dataset,
            "name": "a run",
            "backend": "fake",
            "user_set_fields": ["base_model"],
        }
        config = {"base_model": "none", "method": "sft", "extra": {}, **values.pop("config", {})}
        return connection.execute(machine.create({**defaults, **values, "config": config})).one()


def add_key(engine: Engine, max_devices: int) -> str:
    """Insert an API key with a quota of devices and return its id."""
    key = new_id("key")
    row = {"id": key, "name": "laptop", "prefix": "x", "digest": key.ljust(64, "0")[:64], "scopes": ["write"]}
    with engine.begin() as connection:
        connection.execute(insert(ApiKey).values(**row, max_devices=max_devices))
    return key


def learn_from(engine: Engine, run_id: str, reward_run_id: str) -> None:
    """Record that a run uses the reward model of another run."""
    with engine.begin() as connection:
        connection.execute(insert(RunRewardModel).values(run_id=run_id, reward_run_id=reward_run_id))


def add_worker(
    engine: Engine,
    devices: int = 1,
    kind: str = "cpu",
    memory_mb: Sequence[int | None] = (),
    names: Sequence[str] = (),
    **values: Any,
) -> str:
    """Register a worker with devices of one kind and return its id; without `memory_mb`, each has 1000 MiB.

    `names` are those of the devices; without them, each has the kind as its name.
    """
    memory = list(memory_mb) or [1000] * devices
    worker_id = new_id("wrk")
    defaults = {
        "id": worker_id, "host": "test", "pid": 1, "boot_id": worker_id, "process_started": 1, "version": "0",
        "slots": len(memory), "backends": ["fake"], "launch_mode": "cold",
    }  # fmt: skip
    offered = [
        {
            "worker_id": worker_id,
            "index": i,
            "uid": f"{kind}-{i}",
            "kind": kind,
            "name": names[i] if names else kind,
            "memory_mb": room,
        }
        for i, room in enumerate(memory)
    ]
    if "group_address" in values:
        # Such a worker gets no part half a lease after its last heartbeat, which is 1.5 s in most tests.
        defaults["heartbeat_at"] = text("now() + interval '10 min'")
    with engine.begin() as connection:
        connection.execute(registry.register_worker({**defaults, **values}))
        connection.execute(registry.register_devices(offered))
    return worker_id


def claim(engine: Engine, worker_id: str, lease: float = 60.0, only_run: tuple[str, int] | None = None) -> Any:
    """Claim a run for the worker; return its row or None."""
    with engine.begin() as connection:
        return claim_run(connection, worker_id, lease, only_run)


def count_usage(engine: Engine) -> None:
    """Add the attempts that have ended to the daily usage."""
    with engine.begin() as connection:
        for table in (Attempt, DeletedAttempt):
            connection.execute(count_attempts(table, 100))


def hold_workers(
    engine: Engine,
    run_id: str,
    *worker_ids: str,
    devices: Sequence[int] = (0,),
    quota_holds: Sequence[StoredQuotaHold] = (),
) -> None:
    """Let a run hold workers, whose devices of these indexes are free when it can start; others keep other workers."""
    run = run_row(engine, run_id)
    held = {worker_id: list(devices) for worker_id in worker_ids}
    hold = StoredHold(run_id=run_id, hosts=run.hosts_needed, starts_at=time.time(), devices=held)
    with engine.begin() as connection:
        others = [
            other
            for other in read_holds(connection)[0].holds
            if other.run_id != run_id and not held.keys() & other.devices.keys()
        ]
        store_holds(connection, StoredHolds(holds=[*others, hold], quota_holds=list(quota_holds)))


def stored_holds(engine: Engine) -> StoredHolds:
    """Return what runs hold."""
    with engine.begin() as connection:
        return read_holds(connection)[0]


def run_row(engine: Engine, run_id: str) -> Any:
    """Return the current row of a run, without extra evaluation sets."""
    query = select(Run.__table__, literal({}, JSONB).label("extra_eval_datasets")).where(Run.id == run_id)
    with engine.connect() as connection:
        return connection.execute(query).one()


def events_of(engine: Engine, run_id: str) -> list[Any]:
    """Return (seq, type, attempt, data) of all events of a run."""
    with engine.connect() as connection:
        rows = connection.execute(
            select(RunEvent.seq, RunEvent.type, RunEvent.attempt, RunEvent.data)
            .where(RunEvent.run_id == run_id)
            .order_by(RunEvent.seq)
        )
        return list(rows.all())


def parents(connection: Connection) -> tuple[str, str]:
    """Insert an experiment and a dataset for runs; return their ids."""
    experiment, dataset = new_id("exp"), new_id("ds")
    connection.execute(insert(Experiment).values(id=experiment, name="an experiment"))
    connection.execute(
        insert(Dataset).values(
            id=dataset, name="data", format="text", extension="jsonl", rows=1, bytes=1, sha256="0" * 64,
            columns=["text"], preview=[],
            source={"file_format": "jsonl", "delimiter": None, "gzip": False, "layout": None},
        )
    )  # fmt: skip
    return experiment, dataset


def waiting_for_locks(engine: Engine) -> int:
    """Return the number of statements that wait for a lock of another transaction."""
    with engine.connect() as connection:
        count = connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()"))
    return int(count or 0)
