"""Which devices of online workers a run may use."""

from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.schemas.runs.placement import Placement
from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.workers.online import OnlineDevice, OnlineWorker, count_devices, have_package, read_online_workers
from tests.rows import add_worker

H100 = OnlineDevice("cuda", "NVIDIA H100 80GB HBM3", 81_559)
A10 = OnlineDevice("cuda", "NVIDIA A10", 24_000)
CPU = OnlineDevice("cpu", "cpu", None)


def worker(*devices: OnlineDevice, **fields: Any) -> OnlineWorker:
    facts: dict[str, Any] = {
        "labels": frozenset({"site-a"}), "plugins": None, "packages": None, "model_sources": None, "joins_hosts": False,
    }  # fmt: skip
    return OnlineWorker(devices, **{**facts, **fields})


@pytest.mark.parametrize(
    ("kind", "placement", "allowed"),
    [
        (None, {}, [H100, A10, CPU]),
        ("cuda", {}, [H100, A10]),
        (None, {"gpu": "h100"}, [H100]),
        (None, {"gpu": "a1"}, []),
        (None, {"memory_mb": 24_000}, [H100, A10]),
        (None, {"memory_mb": 24_001}, [H100]),
        (None, {"labels": ["site-a"]}, [H100, A10, CPU]),
        (None, {"labels": ["site-a", "site-b"]}, []),
    ],
    ids=["any", "kind", "gpu", "part-of-a-word", "memory", "more-memory", "label", "labels"],
)
def test_devices_are_those_of_the_kind_name_memory_and_labels(
    kind: str | None, placement: dict[str, Any], allowed: list[OnlineDevice]
) -> None:
    assert worker(H100, A10, CPU).devices_for(kind, Placement(**placement)) == allowed


def test_devices_are_counted_by_kind_and_worker_largest_first() -> None:
    workers = [worker(A10), worker(H100, H100, joins_hosts=True), worker(CPU)]
    assert count_devices(workers, None, Placement(), joining=False) == {"cuda": [2, 1], "cpu": [1]}
    assert count_devices(workers, None, Placement(), joining=True) == {"cuda": [2]}


@pytest.mark.parametrize(
    ("packages", "has_all"), [([{"a"}, {"a", "b"}], True), ([{"a"}, None], False), ([{"a"}, {"b"}], False), ([], False)]
)
def test_package_counts_if_each_worker_with_a_device_for_the_run_has_it(packages: list[Any], has_all: bool) -> None:
    workers = [worker(H100, packages=installed) for installed in packages]
    assert have_package([*workers, worker(CPU)], "cuda", Placement(), "a") is has_all


async def test_workers_that_are_alike_are_counted_each_and_decoded_once(settings: Settings, engine: Engine) -> None:
    for labels, devices in (([], 2), ([], 2), ([], 2), (["site-b"], 2), ([], 1)):
        add_worker(engine, devices=devices, labels=labels)
    own = async_engine(settings.database_url or "", pool_size=1)
    async with session_maker(own)() as session:
        workers = await read_online_workers(session, settings, "fake")
    await own.dispose()
    assert sorted((len(online.devices), sorted(online.labels)) for online in workers) == [
        (1, []), (2, []), (2, []), (2, []), (2, ["site-b"]),
    ]  # fmt: skip
    assert len({id(online) for online in workers}) == 3
