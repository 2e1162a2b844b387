"""Runs in a mixed fleet: none is claimed where it cannot fit, none starves, and one that cannot start says why."""

import random
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.fit import DeviceOffer, Fleet, Needs, WorkerOffer, pending_reason
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim, run_row

CPU = WorkerOffer("wrk_cpu", frozenset({"celery", "fake"}), "cpu", "Xeon", (DeviceOffer(256_000),), host="node-1")
GPU = WorkerOffer(
    "wrk_gpu", frozenset({"celery"}), "cuda", "A10", (DeviceOffer(24_000, name="NVIDIA A10"),), frozenset({"site-b"})
)
FLEET = Fleet((CPU, GPU), frozenset({"celery"}))
HOSTS = Fleet((replace(GPU, joins_hosts=True), replace(GPU, joins_hosts=True, devices=GPU.devices * 2)))
MIXED = Fleet((replace(GPU, devices=(DeviceOffer(80_000, name="NVIDIA H100"), *GPU.devices)),))
JOINS = replace(GPU, joins_hosts=True)
UNLIKE = Fleet((JOINS, JOINS, replace(JOINS, device="H100", labels=frozenset({"ib"}))))
UPGRADED = Fleet(
    (replace(JOINS, version="1.0"), replace(JOINS, version="1.1"), replace(JOINS, version="1.0", device="H100"))
)
PAUSED = Fleet((JOINS, replace(JOINS, devices=(DeviceOffer(24_000, paused=True),)), replace(JOINS, device="H100")))
NEEDS = Needs("celery", estimated_mb={"cpu": 12_000, "cuda": 12_000}, prefers_gpu=True)
QUANTIZES = replace(NEEDS, gguf=True, gguf_quantizer=True)


@pytest.mark.parametrize(
    ("needs", "fleet", "code", "says"),
    [
        (NEEDS, FLEET, None, ""),
        (replace(NEEDS, backend="fake"), FLEET, None, ""),
        (NEEDS, Fleet(()), "no_worker", "No worker of backend `celery` is online"),
        (replace(NEEDS, prefers_gpu=False, kind="cuda"), Fleet((CPU,)), "no_device_of_kind", "of kind `cuda`"),
        (NEEDS, Fleet((CPU,), frozenset({"celery"})), "no_device_of_kind", "within the last hour"),
        (NEEDS, Fleet((CPU,)), None, ""),
        (replace(NEEDS, gpu="a10", kind="cuda"), FLEET, None, ""),
        (replace(NEEDS, gpu="a100", kind="cuda"), FLEET, "no_device_of_kind", "GPU `a100` (`resources.gpu`)"),
        (
            replace(NEEDS, gpu="h100", kind="cuda"),
            Fleet((CPU,)),
            "no_device_of_kind",
            "asks for the GPU `h100` (`resources.gpu`), and no online worker of backend `celery` has a GPU. Start a "
            "worker with such a GPU, or create the run without `resources.gpu`, with `resources.kind: cpu`",
        ),
        (
            replace(NEEDS, gpu="a10", kind="cuda", devices=2),
            MIXED,
            "no_device_fits",
            "2 devices of one worker with the GPU `a10` (`resources.gpu`), and no online worker has more than 1. Start",
        ),
        (
            replace(NEEDS, gpu="a10", kind="cuda", memory_mb=70_000, labels=frozenset({"site-b"})),
            MIXED,
            "no_device_fits",
            "asks for 70,000 MiB of device memory (`resources.memory_mb`) with the GPU `a10` (`resources.gpu`) and the "
            "labels `site-b` (`resources.labels`), and the largest such device, NVIDIA A10",
        ),
        (
            replace(NEEDS, devices=2, memory_mb=70_000),
            MIXED,
            "no_device_fits",
            "of the 2 largest that could train it together, the smallest, NVIDIA A10 of wrk_gpu, has 24,000 MiB",
        ),
        (
            replace(NEEDS, devices=2, hosts=2, memory_mb=70_000),
            replace(HOSTS, workers=(*HOSTS.workers, replace(MIXED.workers[0], joins_hosts=True))),
            "no_device_fits",
            "of the 2 largest that could train it together, the smallest, NVIDIA A10 of wrk_gpu, has 24,000 MiB",
        ),
        (replace(NEEDS, labels=frozenset({"site-c"})), FLEET, "no_worker_with_labels", "the labels `site-c`"),
        (replace(NEEDS, labels=frozenset({"site-b"})), FLEET, None, ""),
        (replace(NEEDS, gguf=True), FLEET, "no_gguf_converter", "ANNEAL_GGUF_CONVERTER"),
        (replace(NEEDS, gguf=True), Fleet((CPU, replace(GPU, gguf=True))), None, ""),
        (QUANTIZES, Fleet((CPU, replace(GPU, gguf=True))), "no_gguf_converter", "ANNEAL_GGUF_QUANTIZER"),
        (QUANTIZES, Fleet((CPU, replace(GPU, gguf=True, gguf_quantizer=True))), None, ""),
        (replace(NEEDS, estimated_mb={"cuda": 70_000}), FLEET, "no_device_fits", "about 70,000 MiB"),
        (replace(NEEDS, memory_mb=70_000), FLEET, "no_device_fits", "asks for 70,000 MiB"),
        (replace(NEEDS, devices=2), FLEET, "no_device_fits", "2 devices of one worker"),
        (replace(NEEDS, devices=2, hosts=2), FLEET, "too_few_hosts", "0 online workers join such runs"),
        (replace(NEEDS, devices=2, hosts=2), HOSTS, None, ""),
        (replace(NEEDS, devices=4, hosts=2), HOSTS, "no_device_fits", "2 devices of each of 2 workers, and only 1"),
        (replace(NEEDS, devices=2, hosts=2, memory_mb=70_000), HOSTS, "no_device_fits", "asks for 70,000 MiB"),
        (
            replace(NEEDS, devices=3, hosts=3),
            UNLIKE,
            "too_few_hosts",
            "there are 2 with A10, 1 with H100. Start others",
        ),
        (replace(NEEDS, devices=2, hosts=2), UNLIKE, None, ""),
        (
            replace(NEEDS, devices=2, hosts=2),
            UPGRADED,
            "too_few_hosts",
            "there are 1 with A10 and version 1.0, 1 with A10 and version 1.1, 1 with H100 and version 1.0. Install",
        ),
        (
            replace(NEEDS, devices=2, hosts=2, labels=frozenset({"ib"})),
            UNLIKE,
            "too_few_hosts",
            "1 online worker joins such runs and has the labels `ib`",
        ),
        (replace(NEEDS, devices=2, hosts=2), PAUSED, "devices_paused", "On all but too few workers"),
        (NEEDS, Fleet((replace(GPU, devices=(DeviceOffer(24_000, paused=True),)),)), "devices_paused", "is paused"),
    ],
)
def test_a_run_that_no_worker_can_take_has_a_reason(needs: Needs, fleet: Fleet, code: str | None, says: str) -> None:
    reason = pending_reason(needs, fleet)
    assert (reason and reason.code) == code
    assert reason is None or says in reason.message


def test_a_run_that_writes_a_gguf_file_is_claimed_where_its_programs_are(engine: Engine) -> None:
    without, converts = add_worker(engine), add_worker(engine, gguf=True)
    quantizes = add_worker(engine, gguf=True, gguf_quantizer=True)
    quantized = add_run(engine, requirements={"gguf": True, "gguf_quantizer": True})
    converted = add_run(engine, requirements={"gguf": True})
    assert claim(engine, without) is None
    assert claim(engine, converts).id == converted.id
    assert claim(engine, quantizes).id == quantized.id
    add_run(engine)
    assert claim(engine, without) is not None


FLEET_ROWS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("cpu", (64_000,)), ("cuda", (24_000, 80_000)), ("cuda", (40_000,)),
)  # fmt: skip


def test_in_a_mixed_fleet_no_run_is_claimed_where_it_cannot_fit_and_none_starves(engine: Engine) -> None:
    workers = {add_worker(engine, kind=kind, memory_mb=memory): (kind, memory) for kind, memory in FLEET_ROWS}
    dice = random.Random(16)
    requirements: list[dict[str, Any]] = [
        {"prefers_gpu": True, "estimated_mb": {"cpu": 8000, "cuda": dice.choice([6000, 30_000, 70_000])}}
        for _ in range(12)
    ] + [{"kind": "cpu", "memory_mb": 9000}, {"kind": "cuda", "memory_mb": 79_000}, {"prefers_gpu": True}]
    dice.shuffle(requirements)
    runs = {add_run(engine, requirements=one).id: one for one in requirements}
    for turn in range(40):
        for worker, (kind, memory) in dice.sample(sorted(workers.items()), len(workers)):
            while (row := claim(engine, worker)) is not None:
                del runs[row.id]
                needs, (index,) = Needs.of("fake", 1, 1, row.requirements), row.device_indexes
                assert needs.kind in (None, kind) and not (needs.prefers_gpu and kind == "cpu")
                assert needs.memory_on(kind) <= memory[index]
                older = [Needs.of("fake", 1, 1, wants) for run_id, wants in runs.items() if run_id < row.id]
                large = memory[index] == 80_000
                assert not large or max((one.memory_on("cuda") for one in older), default=0) <= 40_000
                with engine.begin() as connection:
                    connection.execute(machine.complete(row.id, row.lease_epoch, None, "done"))
                break
        if turn < 8:
            # Small runs keep coming, which fit every device: they must not keep the large one from the big runs.
            for _ in range(3):
                small = {"prefers_gpu": True, "estimated_mb": {"cpu": 500, "cuda": 500}}
                runs[add_run(engine, requirements=small).id] = small
    assert runs == {}, "these wait for ever"


def test_a_small_run_leaves_the_large_device_free(engine: Engine) -> None:
    worker = add_worker(engine, kind="cuda", memory_mb=[80_000, 24_000])
    add_run(engine, requirements={"estimated_mb": {"cuda": 5000}})
    big = add_run(engine, requirements={"estimated_mb": {"cuda": 70_000}})
    assert list(claim(engine, worker).device_indexes) == [1]
    taken = claim(engine, worker)
    assert (taken.id, list(taken.device_indexes)) == (big.id, [0])


def test_a_run_that_names_a_gpu_trains_on_devices_of_this_name_only(engine: Engine) -> None:
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA A10", "NVIDIA H200"]
    mixed = add_worker(engine, kind="cuda", memory_mb=[80_000, 141_000, 24_000, 141_000], names=names)
    pair = add_run(engine, requirements={"gpu": "h200", "kind": "cuda"}, devices_needed=2)
    small = add_run(engine, requirements={"gpu": "a10", "kind": "cuda"})
    another = add_run(engine, requirements={"gpu": "nvidia a100", "kind": "cuda"})
    absent = add_run(engine, requirements={"gpu": "h20", "kind": "cuda"})
    taken = {row.id: sorted(row.device_indexes) for _ in range(3) if (row := claim(engine, mixed))}
    assert taken == {pair.id: [1, 3], small.id: [2], another.id: [0]}
    other = add_worker(engine, kind="cuda", memory_mb=[141_000], names=["NVIDIA H200"])
    assert claim(engine, other) is None
    assert run_row(engine, absent.id).status == "pending"


def test_a_cpu_takes_a_run_that_prefers_a_gpu_once_the_last_gpu_is_gone_for_an_hour(engine: Engine) -> None:
    cpu, gpu = add_worker(engine), add_worker(engine, kind="cuda")
    run = add_run(engine, requirements={"prefers_gpu": True})
    assert claim(engine, cpu) is None
    with engine.begin() as connection:
        away = text("UPDATE workers SET heartbeat_at = now() - interval '59 min', state = 'offline' WHERE id = :id")
        connection.execute(away, {"id": gpu})
    assert claim(engine, cpu) is None, "a GPU worker that restarts does not hand its runs to a CPU"
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE workers SET heartbeat_at = now() - interval '61 min' WHERE id = :id"), {"id": gpu}
        )
    assert claim(engine, cpu).id == run.id


async def test_a_hint_that_reached_the_wrong_worker_is_sent_again_at_once(settings: Settings, engine: Engine) -> None:
    add_worker(engine)
    add_run(engine, requirements={"kind": "cuda"})
    own = async_engine(settings.database_url or "")

    async def due(seconds: int) -> int:
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET notified_at = now() - make_interval(secs => :s)"), {"s": seconds})
        return (await Dispatcher(own, Broker(settings), settings).round())[0]

    assert [await due(2), await due(31)] == [0, 1], "no device that fits is free"
    add_worker(engine, kind="cuda")
    assert [await due(0), await due(2)] == [0, 1]
    await own.dispose()


def test_the_reason_is_cleared_when_the_run_starts(engine: Engine) -> None:
    run, worker = add_run(engine), add_worker(engine)
    with engine.begin() as connection:
        reason = pending_reason(Needs("fake"), Fleet(()))
        assert len(connection.execute(machine.report_pending_reason(run.id, reason)).all()) == 1
    assert run_row(engine, run.id).pending_reason["code"] == "no_worker"
    assert claim(engine, worker).pending_reason is None
    with engine.begin() as connection:
        assert connection.execute(machine.report_pending_reason(run.id, reason)).all() == [], (
            "it does not wait any more"
        )
