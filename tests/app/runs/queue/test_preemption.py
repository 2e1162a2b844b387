"""Choice of the runs that are preempted, for constructed workers and in the database."""

import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from app.config import Settings
from app.infra.db import async_engine
from app.runs.queue.fit import DeviceOffer, Fleet, Needs, RunningRun, WorkerOffer
from app.runs.queue.planning import plan_queue
from app.runs.queue.preemption import Room, choose_room
from app.runs.state import machine
from app.tables.scheduling import DeviceUsage
from tests.rows import add_run, add_worker, claim, run_row


def worker(worker_id: str, *held: str | None, memory_mb: int = 1000, **change: Any) -> WorkerOffer:
    """A worker with a device per name of a run, or None if it is free."""
    devices = tuple(DeviceOffer(memory_mb, run_id, **change) for run_id in held)
    return WorkerOffer(worker_id, frozenset({"celery"}), "cuda", "H100", devices)


def room(*workers: WorkerOffer, devices: int = 1, least: float = 60.0, **seconds: float) -> Room | None:
    """Where a run of priority 5 finds room; runs named `p<priority>…` train for `seconds`, others for 100."""
    runs = {device.run_id for one in workers for device in one.devices if device.run_id}
    training = {id: RunningRun(id, int(id[1]), "", 1, seconds.get(id, 100.0)) for id in runs}
    return choose_room(Needs("celery", devices=devices, memory_mb=500), 5, Fleet(workers), training, least)


class TestChoice:
    def test_of_lower_priorities_the_lowest_and_of_these_the_one_that_started_last(self) -> None:
        assert room(worker("w", "p4", "p1a", "p1b", "p7"), p1a=900.0, p1b=800.0, p4=70.0) == Room(["w"], ["p1b"])

    @pytest.mark.parametrize("name", ["p5", "p9"])
    def test_none_of_its_own_priority_or_a_higher_one(self, name: str) -> None:
        assert room(worker("w", name)) is None

    def test_none_that_has_trained_for_too_short_a_time(self) -> None:
        assert room(worker("w", "p1"), p1=59.0) is None
        assert room(worker("w", "p1"), p1=60.0) == Room(["w"], ["p1"])

    def test_no_one_is_asked_where_room_would_still_be_lacking(self) -> None:
        assert room(worker("w", "p1", "p1", "p7"), devices=3) is None
        assert room(worker("w", "p1", memory_mb=400)) is None
        assert room(worker("w", "p1", paused=True)) is None

    def test_no_one_is_asked_for_a_run_that_fits_free_devices(self) -> None:
        assert room(worker("w", "p1"), worker("v", None)) is None

    def test_free_devices_count_and_no_more_are_given_up_than_needed(self) -> None:
        assert room(worker("w", None, "p1", "p2"), devices=2) == Room(["w"], ["p1"])
        shared = worker("w", "p1a", "p2b", "p2b", "p2b")
        assert room(shared, devices=3) == Room(["w"], ["p2b"]), "the first one is superfluous once the wide one leaves"

    def test_of_several_workers_the_one_that_gives_up_least(self) -> None:
        assert room(worker("w", "p1", "p1"), worker("v", "p2")) == Room(["v"], ["p2"])
        assert room(worker("w", "p1a"), worker("v", "p1b"), p1a=90.0, p1b=80.0) == Room(["v"], ["p1b"])

    def test_for_a_run_on_several_hosts_each_worker_gives_up_its_share(self) -> None:
        offered = worker("u", "p1", None), worker("v", "p2a", "p2a"), worker("w", "p3", "p3")
        hosts = [replace(one, joins_hosts=True) for one in offered]
        training = {name: RunningRun(name, int(name[1]), "", 1, 100.0) for name in ("p1", "p2a", "p3")}

        def chosen(count: int, *workers: WorkerOffer, each: int = 2) -> Room | None:
            needs = Needs("celery", devices=count * each, hosts=count, memory_mb=500)
            return choose_room(needs, 5, Fleet(workers), training, 60.0)

        assert chosen(2, *hosts) == Room(["u", "v"], ["p1", "p2a"])
        assert chosen(3, *hosts) == Room(["u", "v", "w"], ["p1", "p2a", "p3"])
        assert chosen(4, *hosts) is None
        assert chosen(2, *offered) is None, "they do not train together"
        others = [replace(one, device="L4") for one in hosts[1:]]
        assert chosen(2, hosts[0], *others) == Room(["v", "w"], ["p2a", "p3"]), "of one model"
        assert chosen(2, hosts[0], others[0]) is None
        free = replace(worker("x", None, None), joins_hosts=True)
        assert chosen(2, free, *hosts) == Room(["x", "u"], ["p1"])
        assert chosen(2, free, replace(free, worker_id="y"), *hosts) is None


async def ask(settings: Settings, **values: Any) -> list[str]:
    """Do what the dispatcher does each second; return the runs that are to make room."""
    own = settings.model_copy(update={"preempt_after_seconds": 10.0, "preempt_min_seconds": 0.0, **values})
    engine = async_engine(settings.database_url or "")
    async with engine.begin() as connection:
        planned = await plan_queue(connection, own, ["fake"])
    await engine.dispose()
    return planned.preempted if planned else []


def wait_for(engine: Engine, run_id: str, seconds: float) -> None:
    """Make a run have waited for so long."""
    with engine.begin() as connection:
        passed = "created_at = now() - :passed * interval '1 s', not_before = now() - :passed * interval '1 s'"
        connection.execute(text(f"UPDATE runs SET {passed} WHERE id = :id"), {"id": run_id, "passed": seconds})


def train(engine: Engine, worker_id: str, **options: Any) -> Any:
    """Claim a run and make its first step."""
    row = claim(engine, worker_id, **options)
    with engine.begin() as connection:
        connection.execute(machine.begin(row.id, row.lease_epoch, 0, 0.0, 100, None)).one()
        connection.execute(text("UPDATE runs SET current_step = 1 WHERE id = :id"), {"id": row.id})
    return row


class TestOfTheQueue:
    async def test_a_run_that_waits_too_long_gets_the_device_of_one_below_it(
        self, settings: Settings, engine: Engine
    ) -> None:
        low, device = add_run(engine), add_worker(engine)
        train(engine, device)
        high = add_run(engine, priority=3)
        wait_for(engine, high.id, 5.0)
        assert await ask(settings) == [], "it waits for less than the limit"
        wait_for(engine, high.id, 11.0)
        assert await ask(settings, preempt_after_seconds=None) == []
        assert await ask(settings) == [low.id]
        with engine.begin() as connection:
            assert connection.execute(machine.renew(low.id, 1, 60.0)).one().preempted_for == high.id
        assert await ask(settings) == [], "the device is on its way"
        with engine.begin() as connection:
            connection.execute(machine.release(low.id, 1, f"preempted for run {high.id}")).one()
        row = run_row(engine, low.id)
        assert (row.status, row.preempted_for, row.lost_count) == ("pending", None, 0)
        assert claim(engine, device).id == high.id

    async def test_a_run_of_a_cluster_asks_nobody(self, settings: Settings, engine: Engine) -> None:
        """The worker of another run could not claim it: it was started for that run alone."""
        add_run(engine, backend="ray")
        train(engine, add_worker(engine, backends=["ray"]))
        wait_for(engine, add_run(engine, backend="ray", priority=3).id, 11.0)
        assert await ask(settings) == []

    async def test_a_wide_run_reserves_the_worker_that_is_cleared_for_it(
        self, settings: Settings, engine: Engine
    ) -> None:
        device = add_worker(engine, devices=2)
        low = [add_run(engine), add_run(engine)]
        train(engine, device), train(engine, device)
        large_run, small = add_run(engine, priority=3, devices_needed=2), add_run(engine)
        wait_for(engine, large_run.id, 11.0)
        assert sorted(await ask(settings)) == sorted(run.id for run in low)
        with engine.begin() as connection:
            connection.execute(machine.release(low[0].id, 1, "preempted")).one()
        assert claim(engine, device) is None, "the first free device is kept"
        with engine.begin() as connection:
            connection.execute(machine.release(low[1].id, 1, "preempted")).one()
        assert claim(engine, device).id == large_run.id
        assert run_row(engine, small.id).status == "pending"

    async def test_a_stopping_run_and_one_whose_successor_is_gone_are_left_alone(
        self, settings: Settings, engine: Engine
    ) -> None:
        low, device = add_run(engine), add_worker(engine)
        train(engine, device)
        high = add_run(engine, priority=3)
        wait_for(engine, high.id, 11.0)
        with engine.begin() as connection:
            connection.execute(machine.request_stop(low.id, "checkpoint"))
        assert await ask(settings) == []
        with engine.begin() as connection:
            connection.execute(machine.request_stop(high.id, "checkpoint"))
            assert connection.execute(machine.preempt([low.id], high.id)).all() == []

    @pytest.mark.parametrize("change", ["cancelled", "started", "lowered"])
    async def test_a_request_is_withdrawn_once_its_run_waits_no_more(
        self, settings: Settings, engine: Engine, change: str
    ) -> None:
        """Before the worker has received it with a renewal."""
        low, device = add_run(engine), add_worker(engine)
        train(engine, device)
        high = add_run(engine, priority=3)
        wait_for(engine, high.id, 11.0)
        assert await ask(settings) == [low.id]
        if change == "started":
            assert claim(engine, add_worker(engine)).id == high.id
        else:
            with engine.begin() as connection:
                if change == "cancelled":
                    connection.execute(machine.request_stop(high.id, "checkpoint"))
                else:
                    connection.execute(text("UPDATE runs SET priority = 0 WHERE id = :id"), {"id": high.id})
        with engine.begin() as connection:
            assert connection.execute(machine.renew(low.id, 1, 60.0)).one().preempted_for is None
        row = run_row(engine, low.id)
        assert row.status != "pending" and row.preempted_for is None, "it trains on, and may be asked again"

    async def test_no_one_is_asked_on_a_worker_that_is_kept_for_another(
        self, settings: Settings, engine: Engine
    ) -> None:
        device = add_worker(engine, devices=2)
        add_run(engine)
        train(engine, device)
        add_run(engine, priority=9, devices_needed=2)
        second = add_run(engine, priority=3, requirements={"memory_mb": 1000})
        wait_for(engine, second.id, 11.0)
        with engine.begin() as connection:  # so that nothing is free
            connection.execute(text("UPDATE devices SET memory_mb = 10 WHERE run_id IS NULL"))
        assert await ask(settings) == []

    async def test_a_wide_run_that_has_reserved_the_worker_gets_it_although_its_owner_has_used_devices(
        self, settings: Settings, engine: Engine
    ) -> None:
        device = add_worker(engine, devices=2)
        low = [add_run(engine, created_by="key"), add_run(engine, created_by="key")]
        train(engine, device), train(engine, device)
        large_run = add_run(engine, priority=3, devices_needed=2, created_by="key")
        with engine.begin() as connection:
            connection.execute(
                insert(DeviceUsage).values(
                    owner="key", device_seconds=3600.0, updated_at=text("now() - interval '1 h'")
                )
            )
        wait_for(engine, large_run.id, 11.0)
        assert sorted(await ask(settings)) == sorted(run.id for run in low)

    async def test_no_one_is_asked_for_a_wide_run_that_could_not_keep_its_worker(
        self, settings: Settings, engine: Engine
    ) -> None:
        devices = [add_worker(engine, devices=2) for _ in range(4)]
        for device in devices:
            add_run(engine), add_run(engine)
            train(engine, device), train(engine, device)
        first = [add_run(engine, priority=5, devices_needed=2) for _ in range(3)]
        fourth = add_run(engine, priority=3, devices_needed=2)
        wait_for(engine, fourth.id, 11.0)
        assert await ask(settings) == []
        for run in first:
            with engine.begin() as connection:
                connection.execute(machine.request_stop(run.id, "checkpoint"))
        assert len(await ask(settings)) == 2

    async def test_a_run_that_would_lose_all_its_work_is_not_asked(self, settings: Settings, engine: Engine) -> None:
        evaluation, device = add_run(engine, task="evaluate"), add_worker(engine, devices=2)
        assert train(engine, device).id == evaluation.id
        loading = add_run(engine)
        claim(engine, device)
        high = add_run(engine, priority=3)
        wait_for(engine, high.id, 11.0)
        assert await ask(settings) == []
        with engine.begin() as connection:
            connection.execute(machine.begin(loading.id, 1, 0, 0.0, 100, None)).one()
            connection.execute(text("UPDATE runs SET current_step = 1 WHERE id = :id"), {"id": loading.id})
        assert await ask(settings) == [loading.id]

    async def test_runs_that_no_worker_could_train_do_not_hide_those_behind_them(
        self, settings: Settings, engine: Engine
    ) -> None:
        low, device = add_run(engine), add_worker(engine)
        train(engine, device)
        reason = {"code": "no_worker_with_labels", "message": "no worker has the label"}
        for _ in range(25):
            hopeless = add_run(engine, priority=9, requirements={"labels": ["elsewhere"]})
            wait_for(engine, hopeless.id, 20.0)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE runs SET pending_reason = cast(:reason AS jsonb) WHERE priority = 9"),
                {"reason": json.dumps(reason)},
            )
        high = add_run(engine, priority=3)
        wait_for(engine, high.id, 11.0)
        assert await ask(settings) == [low.id]


class TestOfServingRuns:
    async def test_they_make_room_at_once_whatever_the_settings_and_for_any_priority(
        self, settings: Settings, engine: Engine
    ) -> None:
        serving, device = add_run(engine, task="serve", dataset_id=None, priority=-1001), add_worker(engine)
        row = claim(engine, device)
        assert row.id == serving.id
        assert await ask(settings, preempt_after_seconds=None) == []
        waiting = add_run(engine, priority=-1000)
        assert await ask(settings, preempt_after_seconds=None, preempt_min_seconds=600.0) == [serving.id]
        with engine.begin() as connection:
            assert connection.execute(machine.renew(serving.id, 1, 60.0)).one().preempted_for == waiting.id
        assert await ask(settings) == [], "it is asked once"

    async def test_they_come_last_in_the_queue_and_get_no_device_of_another_run(
        self, settings: Settings, engine: Engine
    ) -> None:
        first = add_run(engine, task="serve", dataset_id=None, priority=-1001)
        training, device = add_run(engine, priority=-1000), add_worker(engine)
        assert claim(engine, device).id == training.id
        wait_for(engine, first.id, 3600.0)
        assert await ask(settings, preempt_after_seconds=0.0) == []

    async def test_none_makes_room_for_a_run_that_has_a_free_device(self, settings: Settings, engine: Engine) -> None:
        add_run(engine, task="serve", dataset_id=None, priority=-1001)
        claim(engine, add_worker(engine))
        add_worker(engine)
        add_run(engine)
        assert await ask(settings) == []

    async def test_they_use_no_quota_of_their_experiment_so_that_its_runs_get_their_device(
        self, settings: Settings, engine: Engine
    ) -> None:
        serving, device = add_run(engine, task="serve", dataset_id=None, priority=-1001), add_worker(engine)
        limit_experiment(engine, serving.experiment_id, 0)
        assert claim(engine, device).id == serving.id
        limit_experiment(engine, serving.experiment_id, 1)
        training = add_run(engine, experiment_id=serving.experiment_id)
        assert await ask(settings) == [serving.id]
        assert claim(engine, add_worker(engine)).id == training.id

    async def test_they_make_room_for_each_other_by_turns_once_they_have_answered(
        self, settings: Settings, engine: Engine
    ) -> None:
        first, device = add_run(engine, task="serve", dataset_id=None, priority=-1001), add_worker(engine)
        assert claim(engine, device).id == first.id
        second = add_run(engine, task="serve", dataset_id=None, priority=-1001)
        wait_for(engine, second.id, 16.0)
        started = text("UPDATE run_attempts SET started_at = now() - interval '40 s'")
        with engine.begin() as connection:
            connection.execute(started)
        assert await ask(settings, preempt_after_seconds=None) == [], "it still loads its model"
        with engine.begin() as connection:
            connection.execute(machine.begin(first.id, 1, 0, 0.0, None, None)).one()
        wait_for(engine, second.id, 14.0)
        assert await ask(settings, preempt_after_seconds=None) == [], "it waits for less than a turn"
        wait_for(engine, second.id, 16.0)
        assert await ask(settings, preempt_after_seconds=None) == [first.id]
        with engine.begin() as connection:
            assert connection.execute(machine.renew(first.id, 1, 60.0)).one().preempted_for == second.id


def limit_experiment(engine: Engine, experiment_id: str, devices: int) -> None:
    with engine.begin() as connection:
        quota = text("UPDATE experiments SET max_devices = :devices WHERE id = :id")
        connection.execute(quota, {"id": experiment_id, "devices": devices})
