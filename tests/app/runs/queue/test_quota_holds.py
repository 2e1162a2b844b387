"""Quotas that are kept for a run which waits for them, so that later runs do not overtake it for ever."""

from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue import planning
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.durations import Estimate
from app.runs.queue.planning import plan_queue
from app.runs.queue.snapshot import Forecast, read_forecast
from app.runs.state import machine
from tests.rows import add_key, add_run, add_worker, claim, hold_workers, run_row, stored_holds

HOUR = "UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id"


async def plan(settings: Settings) -> None:
    """Do what the dispatcher does each second."""
    engine = async_engine(settings.database_url or "")
    async with engine.begin() as connection:
        await plan_queue(connection, settings, ["fake"])
    await engine.dispose()


def held_quotas(engine: Engine) -> list[tuple[str, str, int]]:
    return sorted((hold.quota_id, hold.run_id, hold.spare) for hold in stored_holds(engine).quota_holds)


def execute(engine: Engine, statement: str, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement), values)


def end(engine: Engine, run_id: str) -> None:
    with engine.begin() as connection:
        connection.execute(machine.complete(run_id, 1, None, "done")).one()


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Durations of runs by id, as they are predicted; those of others are unknown."""
    seconds: dict[str, float] = {}

    def estimate(_: Forecast, run: Any, *__: Any) -> Any:
        return Estimate(seconds[run.id], "high", "") if run.id in seconds else None

    monkeypatch.setattr(Forecast, "estimate", estimate)
    return seconds


class TestAQuota:
    async def test_is_kept_for_the_first_run_that_waits_for_it_and_says_so(
        self, settings: Settings, engine: Engine
    ) -> None:
        key, worker = add_key(engine, 4), add_worker(engine, devices=8)
        first = add_run(engine, created_by=key, devices_needed=2)
        claim(engine, worker)
        holder = add_run(engine, created_by=key, devices_needed=4)
        later = [add_run(engine, created_by=key, devices_needed=needed) for needed in (1, 2)]
        other = add_run(engine)
        execute(engine, "UPDATE runs SET not_before = now() - interval '6 s'")
        await plan(settings)
        assert held_quotas(engine) == [(key, holder.id, 0)]
        assert [claim(engine, worker).id, claim(engine, worker)] == [other.id, None]
        own = async_engine(settings.database_url or "", pool_size=1)
        await Dispatcher(own, Broker(settings), settings, ["fake"]).round()
        await own.dispose()
        reason: Any = run_row(engine, later[0].id).pending_reason
        assert reason["code"] == "quota" and f"is kept for run {holder.id}" in reason["message"]
        assert stored_holds(engine).holds == [], "one that may not start keeps no devices"
        urgent = add_run(engine, created_by=key, priority=1)
        assert claim(engine, worker).id == urgent.id, "it precedes the wide run"
        for run in (first, urgent):
            end(engine, run.id)
        assert claim(engine, worker).id == holder.id
        end(engine, holder.id)
        assert claim(engine, worker).id == later[0].id

    async def test_of_an_experiment_is_kept_from_later_runs_of_every_key(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=8)
        first = add_run(engine, created_by="a", devices_needed=2)
        claim(engine, worker)
        execute(engine, "UPDATE experiments SET max_devices = 3 WHERE id = :id", id=first.experiment_id)
        holder = add_run(engine, created_by="a", devices_needed=3, experiment_id=first.experiment_id)
        add_run(engine, created_by="b", experiment_id=first.experiment_id)
        elsewhere = add_run(engine, created_by="b")
        await plan(settings)
        assert held_quotas(engine) == [(first.experiment_id, holder.id, 0)]
        assert [claim(engine, worker).id, claim(engine, worker)] == [elsewhere.id, None]

    async def test_lets_those_start_that_end_in_time_or_leave_enough(
        self, settings: Settings, engine: Engine, lengths: dict[str, float]
    ) -> None:
        key, worker = add_key(engine, 7), add_worker(engine, devices=9)
        first = add_run(engine, created_by=key, devices_needed=4)
        lengths[first.id] = 50.0
        claim(engine, worker)
        holder = add_run(engine, created_by=key, devices_needed=5)
        long, also_long, short = (add_run(engine, created_by=key, devices_needed=needed) for needed in (2, 1, 1))
        lengths |= {long.id: 400.0, also_long.id: 400.0, short.id: 20.0}
        await plan(settings)
        assert held_quotas(engine) == [(key, holder.id, 2)], "seven less five"
        assert [claim(engine, worker).id, claim(engine, worker).id] == [long.id, short.id]
        assert claim(engine, worker) is None

    async def test_is_not_used_up_by_one_that_ends_in_time_on_a_worker_with_other_devices(
        self, settings: Settings, engine: Engine, lengths: dict[str, float]
    ) -> None:
        key, worker = add_key(engine, 7), add_worker(engine, devices=9)
        other = add_worker(engine, names=["another"], labels=["other"])
        first = add_run(engine, created_by=key, devices_needed=4)
        claim(engine, worker)
        holder = add_run(engine, created_by=key, devices_needed=5)
        short = add_run(engine, created_by=key, requirements={"labels": ["other"]})
        long = add_run(engine, created_by=key, devices_needed=2)
        lengths |= {first.id: 50.0, short.id: 20.0, long.id: 400.0}
        await plan(settings)
        assert held_quotas(engine) == [(key, holder.id, 2)]
        assert [claim(engine, other).id, claim(engine, worker).id] == [short.id, long.id]

    async def test_that_has_room_again_is_kept_until_the_devices_are_free(
        self, settings: Settings, engine: Engine
    ) -> None:
        key, worker, other = add_key(engine, 3), add_worker(engine, devices=3), add_worker(engine, devices=2)
        add_run(engine), claim(engine, worker)
        mine = add_run(engine, created_by=key)
        claim(engine, other)
        holder, _ = add_run(engine, created_by=key, devices_needed=3), add_run(engine, created_by=key)
        await plan(settings)
        end(engine, mine.id)
        await plan(settings)
        assert held_quotas(engine) == [(key, holder.id, 0)]
        assert [claim(engine, one) for one in (worker, other)] == [None, None]

    @pytest.mark.parametrize("change", ["needs more than the quota", "fits no worker", "waits after a loss"])
    async def test_is_not_kept_for_a_run_that_could_not_start(
        self, settings: Settings, engine: Engine, change: str
    ) -> None:
        key, worker = add_key(engine, 4), add_worker(engine, devices=8)
        add_run(engine, created_by=key, devices_needed=2)
        claim(engine, worker)
        needed = 5 if change == "needs more than the quota" else 3
        requirements = {"labels": ["elsewhere"]} if change == "fits no worker" else {}
        holder = add_run(engine, created_by=key, devices_needed=needed, requirements=requirements)
        if change == "waits after a loss":
            execute(engine, HOUR, id=holder.id)
        small = add_run(engine, created_by=key)
        await plan(settings)
        assert held_quotas(engine) == []
        assert claim(engine, worker).id == small.id

    async def test_that_no_process_renews_binds_no_one(self, settings: Settings, engine: Engine) -> None:
        key, worker = add_key(engine, 3), add_worker(engine, devices=8)
        add_run(engine, created_by=key, devices_needed=2), claim(engine, worker)
        add_run(engine, created_by=key, devices_needed=2)
        small = add_run(engine, created_by=key)
        await plan(settings)
        assert claim(engine, worker) is None
        execute(engine, "UPDATE queue_plan SET made_at = now() - interval '31 s'")
        assert claim(engine, worker).id == small.id

    async def test_is_kept_from_a_run_on_several_hosts_too(self, settings: Settings, engine: Engine) -> None:
        key = add_key(engine, 4)
        workers = [add_worker(engine, devices=2, group_address="10.0.0.1") for _ in range(3)]
        first = add_run(engine, created_by=key, devices_needed=2)
        claim(engine, workers[2])
        add_run(engine, created_by=key, devices_needed=4, hosts_needed=2)
        later = add_run(engine, created_by=key, devices_needed=2, hosts_needed=2)
        await plan(settings)
        quota_holds = stored_holds(engine).quota_holds
        hold_workers(engine, later.id, *workers[:2], quota_holds=quota_holds)
        assert claim(engine, workers[0]) is None
        end(engine, first.id)
        hold_workers(engine, later.id, *workers[:2])
        assert claim(engine, workers[0]).id == later.id

    async def test_that_a_claim_uses_while_a_round_computes_is_not_given_again(
        self, settings: Settings, engine: Engine, lengths: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key, worker = add_key(engine, 6), add_worker(engine, devices=8)
        first = add_run(engine, created_by=key, devices_needed=3)
        lengths[first.id] = 50.0
        claim(engine, worker)
        holder, *small = (add_run(engine, created_by=key, devices_needed=needed) for needed in (4, 2, 1))

        async def read(*arguments: Any, **options: Any) -> Forecast | None:
            forecast = await read_forecast(*arguments, **options)
            assert claim(engine, worker).id == small[0].id
            return forecast

        monkeypatch.setattr(planning, "read_forecast", read)
        await plan(settings)
        assert held_quotas(engine) == [(key, holder.id, 2)]
        assert claim(engine, worker) is None, "the two devices to spare are in use"
