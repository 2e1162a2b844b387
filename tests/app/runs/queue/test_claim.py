"""Claims in the database: which runs are read, and that the first of all that fit is taken."""

import random
from typing import Any

from sqlalchemy import Engine, event

from app.runs.queue.candidates import read_candidates
from app.runs.queue.fit import Needs
from app.runs.queue.fleet import read_near_fleet
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim, hold_workers


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
        requirements["gguf"] = True
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
        gguf=draw.random() < 0.5,
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
            worker, fleet = read_near_fleet(connection, worker_id, [], 60.0)
            assert worker is not None
            read = read_candidates(connection, worker, fleet, most=1000)
        fitting = [
            (place, run_id)
            for place, run_id, needs in runs.values()
            if needs.fitting_devices(worker, fleet.gpu_backends)
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
    wide = add_run(engine, devices_needed=2, priority=1)
    for _ in range(40):
        add_run(engine)
    hold_workers(engine, wide.id, worker, devices=[1])
    read: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: read.append(arguments[2]))
    assert claim(engine, worker) is None
    assert sum("is_first" in statement for statement in read) == 1
