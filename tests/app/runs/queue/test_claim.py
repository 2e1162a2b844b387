"""Claims in the database: which runs are read, and that the first of all that fit is taken."""

import random
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, text

from app.runs.queue import claim as claim_module
from app.runs.queue.candidates import read_candidates
from app.runs.queue.claim import claim_run
from app.runs.queue.fit import Needs
from app.runs.queue.fleet import read_near_fleet
from app.runs.queue.holds import StoredQuotaHold
from app.runs.state import machine
from app.tables.scheduling import DeviceUsage
from tests.rows import add_key, add_run, add_worker, claim, hold_workers


def random_requirements(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice([None, None, "cpu", "cuda"])
    requirements: dict[str, Any] = {
        "labels": draw.sample(["a", "b"], draw.randrange(3)),
        "prefers_gpu": draw.random() < 0.3,
        "estimated_mb": draw.choice([{}, {"cpu": 900, "cuda": 3000}, {"cuda": 1000}]),
    }
    if kind is not None:
        requirements["kind"] = kind
    if draw.random() < 0.2:
        requirements["memory_mb"] = draw.choice([500, 1500, 2500])
    if kind == "cuda" and draw.random() < 0.5:
        requirements["gpu"] = draw.choice(["h100", "a10"])
    if draw.random() < 0.1:
        requirements |= {"gguf": True, "gguf_quantizer": draw.random() < 0.5}
    return {name: value for name, value in requirements.items() if value not in ([], False, {})}


def random_worker(engine: Engine, draw: random.Random) -> str:
    kind = draw.choice(["cpu", "cuda"])
    count = draw.randrange(1, 4)
    names = [draw.choice(["NVIDIA H100", "NVIDIA A10"]) if kind == "cuda" else "cpu" for _ in range(count)]
    return add_worker(
        engine,
        kind=kind,
        memory_mb=[draw.choice([1000, 2000, 4000]) for _ in range(count)],
        names=names,
        labels=draw.sample(["a", "b"], draw.randrange(3)),
        gguf=(converts := draw.random() < 0.5),
        gguf_quantizer=converts and draw.random() < 0.5,
        backends=draw.choice([["fake"], ["fake", "celery"]]),
    )


def test_every_run_that_fits_a_worker_is_read_and_the_first_of_them_is_claimed(engine: Engine) -> None:
    draw = random.Random(34)
    workers = [random_worker(engine, draw) for _ in range(12)]
    runs = {}
    for _ in range(150):
        backend, devices = draw.choice(["fake", "fake", "celery"]), draw.choice([1, 1, 1, 2, 3])
        row = add_run(
            engine,
            backend=backend,
            devices_needed=devices,
            requirements=random_requirements(draw),
            priority=draw.randrange(3),
            created_by=draw.choice(["key-a", "key-b"]),
        )
        runs[row.id] = (-row.priority, row.id, Needs.of(backend, devices, 1, row.requirements))
    for worker_id in workers:
        with engine.begin() as connection:
            near = read_near_fleet(connection, worker_id, 60.0)
            assert near is not None
            read = read_candidates(connection, near, most=1000)
        fitting = [
            (place, run_id)
            for place, run_id, needs in runs.values()
            if needs.fitting_devices(near.worker, near.fleet.gpu_backends)
        ]
        assert {run_id for _, run_id in fitting} <= read.runs.keys()
        row = claim(engine, worker_id)
        assert (None if row is None else row.id) == (min(fitting)[1] if fitting else None)
        if row is not None:
            with engine.begin() as connection:
                connection.execute(machine.complete(row.id, row.lease_epoch, None, "done")).one()
            del runs[row.id]


def test_behind_many_runs_that_fit_in_part_the_first_that_fits_is_claimed(engine: Engine) -> None:
    """That too few devices are large enough is seen only of the runs that were read: the first pages have no other."""
    worker = add_worker(engine, memory_mb=[2000, 1000])
    for number in range(40):
        add_run(engine, requirements={"memory_mb": 1500}, devices_needed=2, created_by=f"key-{number % 3}")
    fits = add_run(engine, devices_needed=2, created_by="key-1")
    add_run(engine, created_by="key-2", priority=-1)
    assert claim(engine, worker).id == fits.id


def test_a_worker_that_is_held_looks_no_further_than_behind_the_holder(engine: Engine) -> None:
    worker = add_worker(engine, devices=2)
    add_run(engine)
    claim(engine, worker)
    holder = add_run(engine, devices_needed=2, priority=1)
    for _ in range(40):
        add_run(engine)
    hold_workers(engine, holder.id, worker, devices=[1])
    read: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: read.append(arguments[2]))
    assert claim(engine, worker) is None
    assert sum("is_first" in statement for statement in read) == 1


def random_queue(engine: Engine, draw: random.Random) -> list[str]:
    """Fill a queue of forty owners, with usage, quotas, and runs of which some hold workers; return the workers."""
    boot = {"boot_id": "machine/1", "kind": "cpu"}
    workers = [add_worker(engine, memory_mb=[2000, 1000], **boot) for _ in range(2)]
    workers += [random_worker(engine, draw) for _ in range(3)]
    owners = [f"owner-{number}" for number in range(36)] + [add_key(engine, draw.randrange(4)) for _ in range(4)]
    experiments = [add_run(engine, created_by=owners[0], devices_needed=9).experiment_id for _ in range(4)]
    multi_device_runs = []
    for number in range(90):
        devices = draw.choice([1, 1, 1, 2])
        row = add_run(
            engine,
            created_by=owners[number % len(owners)],
            experiment_id=draw.choice(experiments),
            devices_needed=devices,
            priority=draw.choice([0, 0, 0, 1]),
            task="serve" if number % 9 == 4 and devices == 1 else "train",  # which uses no quota of its experiment
            requirements=draw.choice([{}, {"memory_mb": 900}, {"memory_mb": 1500}, random_requirements(draw)]),
        )
        if devices == 2:
            multi_device_runs.append(row)
    with engine.begin() as connection:
        for owner in owners:
            usage = {"owner": owner, "device_seconds": draw.random() * 100, "updated_at": text("now()")}
            connection.execute(insert(DeviceUsage).values(**usage))
        quota = text("UPDATE experiments SET max_devices = :most WHERE id = :id")
        for experiment in experiments[:2]:
            connection.execute(quota, {"most": draw.randrange(3), "id": experiment})
    for holder, worker_id in zip(draw.sample(multi_device_runs, 2), draw.sample(workers, 2), strict=True):
        held = StoredQuotaHold(quota_id=holder.experiment_id, run_id=holder.id, starts_at=None, spare=draw.randrange(2))
        hold_workers(engine, holder.id, worker_id, devices=[0], quota_holds=[held])
    return workers


@pytest.mark.parametrize("seed", [0, 6, 7])
def test_claim_takes_what_the_policy_chooses_of_the_whole_queue_however_few_runs_it_reads_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    workers = random_queue(engine, draw)
    monkeypatch.setattr(claim_module, "_PAGE_FACTOR", 2)
    for _ in range(12):
        worker_id, claimed = draw.choice(workers), []
        for first_page in (10_000, 1):
            monkeypatch.setattr(claim_module, "_FIRST_PAGE", first_page)
            with engine.connect() as connection:
                claimed.append(claim_run(connection, worker_id, 60.0))
                (connection.rollback if first_page > 1 else connection.commit)()
        whole, paged = claimed
        assert (whole and (whole.id, whole.device_indexes)) == (paged and (paged.id, paged.device_indexes))


def test_a_run_behind_many_of_its_owner_that_a_quota_keeps_waiting_is_claimed(engine: Engine) -> None:
    key, worker = add_key(engine, 1), add_worker(engine, devices=2)
    for _ in range(40):
        add_run(engine, created_by=key, devices_needed=2)
    small = add_run(engine, created_by=key)
    add_run(engine, created_by="other", priority=-1)
    assert claim(engine, worker).id == small.id


@pytest.mark.parametrize("state", ["draining", "offline"])
def test_the_run_of_a_worker_that_drains_or_is_silent_uses_the_memory_of_their_machine(
    engine: Engine, state: str
) -> None:
    leaving, other = (add_worker(engine, boot_id="machine/1") for _ in range(2))
    for _ in range(2):
        add_run(engine, requirements={"memory_mb": 900})
    assert claim(engine, leaving) is not None
    with engine.begin() as connection:
        connection.execute(text("UPDATE workers SET state = :state WHERE id = :id"), {"state": state, "id": leaving})
    assert claim(engine, other) is None


def test_a_worker_gives_up_when_others_are_just_changing_all_of_the_first_runs(engine: Engine) -> None:
    worker = add_worker(engine)
    for _ in range(30):
        add_run(engine)
    with engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM runs FOR UPDATE"))
        assert claim(engine, worker) is None
    assert claim(engine, worker) is not None
