"""Order of claims among runs of equal priority, and quotas of devices of keys and experiments."""

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.state import machine
from app.tables.scheduling import DeviceUsage
from tests.rows import add_key, add_run, add_worker, claim, run_row, stored_holds


def use(engine: Engine, **seconds: float) -> None:
    """Store the device-seconds of owners, as of now."""
    with engine.begin() as connection:
        for owner, used in seconds.items():
            row = {"owner": owner, "device_seconds": used, "updated_at": text("now()")}
            connection.execute(insert(DeviceUsage).values(**row))


def used(engine: Engine) -> dict[str, float]:
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT owner, device_seconds FROM device_usage")).tuples().all())


def end(engine: Engine, run_id: str) -> None:
    with engine.begin() as connection:
        connection.execute(machine.complete(run_id, 1, None, "done")).one()


class TestShares:
    def test_the_owner_that_has_used_less_comes_first_whoever_came_earlier(self, engine: Engine) -> None:
        much, little = add_run(engine, created_by="much"), add_run(engine, created_by="little")
        service = add_run(engine)
        use(engine, much=100.0, little=50.0)
        worker = add_worker(engine, devices=3)
        assert [claim(engine, worker).id for _ in range(3)] == [service.id, little.id, much.id]

    def test_a_higher_priority_comes_before_any_share(self, engine: Engine) -> None:
        add_run(engine, created_by="little")
        urgent = add_run(engine, created_by="much", priority=1)
        use(engine, much=1e9)
        assert claim(engine, add_worker(engine)).id == urgent.id

    def test_of_many_owners_the_runs_that_fit_are_claimed_in_order(self, engine: Engine) -> None:
        """Of most owners the run of the highest priority fits nowhere, and some others precede their next runs."""
        owners = {f"key{number:02}": float(number) for number in range(60)}
        use(engine, **owners)
        worker, fitting = add_worker(engine, devices=1), []
        for number, owner in enumerate(owners):
            if number < 50:
                add_run(engine, created_by=owner, priority=3, devices_needed=2)
            for priority in (2 - number % 3, 1 if number > 45 else -number):
                row = add_run(engine, created_by=owner, priority=priority)
                fitting.append((-row.priority, owners[owner], row.id))
        claimed = []
        while (row := claim(engine, worker)) is not None:
            claimed.append((-row.priority, owners[row.created_by], row.id))
            end(engine, row.id)
        assert claimed == sorted(fitting)

    def test_half_of_what_was_used_is_forgotten_in_a_week(self, engine: Engine) -> None:
        past, recent = add_run(engine, created_by="past"), add_run(engine, created_by="recent")
        use(engine, past=100.0, recent=60.0)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE device_usage SET updated_at = now() - interval '7 days' WHERE owner = 'past'")
            )
        worker = add_worker(engine, devices=2)
        assert [claim(engine, worker).id for _ in range(2)] == [past.id, recent.id]

    async def test_devices_are_accounted_for_while_they_are_held(self, settings: Settings, engine: Engine) -> None:
        worker = add_worker(engine, devices=3)
        add_run(engine, created_by="wide", devices_needed=2), add_run(engine, created_by="small")
        claim(engine, worker), claim(engine, worker)

        async def account(ago: str) -> dict[str, float]:
            with engine.begin() as connection:
                connection.execute(text(f"UPDATE device_usage SET updated_at = now() - interval '{ago}'"))
            own = async_engine(settings.database_url or "", pool_size=1)
            await Dispatcher(own, Broker(settings), settings).round()
            await own.dispose()
            return used(engine)

        first = await account("0 s")
        assert set(first) == {"wide", "small"}
        second = await account("10 s")
        assert second["wide"] == pytest.approx(2 * second["small"])
        assert second["small"] - first["small"] == pytest.approx(10, abs=1)
        for _ in range(2):  # the clock of the server was set back by an hour
            early = await account("-1 hours")
            assert early["small"] - second["small"] == pytest.approx(0, abs=1)
        second = early
        third = await account("2 hours")
        assert third["small"] - second["small"] == pytest.approx(20, abs=1), (
            "the use of the devices meanwhile is unknown"
        )


def limit(engine: Engine, experiment_id: str, max_devices: int) -> None:
    with engine.begin() as connection:
        query = "UPDATE experiments SET max_devices = :most WHERE id = :id"
        connection.execute(text(query), {"most": max_devices, "id": experiment_id})


class TestQuotas:
    def test_of_a_key_let_its_runs_wait_and_others_pass(self, engine: Engine) -> None:
        key, worker = add_key(engine, 3), add_worker(engine, devices=8)
        mine = [add_run(engine, created_by=key, devices_needed=needed) for needed in (2, 2, 1, 1)]
        other = add_run(engine)
        claimed = [claim(engine, worker) for _ in range(4)]
        assert {one.id for one in claimed if one} == {mine[0].id, mine[2].id, other.id}
        assert claimed[3] is None
        end(engine, mine[0].id)
        assert claim(engine, worker).id == mine[1].id

    def test_of_an_experiment_count_its_runs_of_every_key(self, engine: Engine) -> None:
        worker = add_worker(engine, devices=8)
        first = add_run(engine, created_by="a")
        limit(engine, first.experiment_id, 1)
        second = add_run(engine, created_by="b", experiment_id=first.experiment_id)
        assert [claim(engine, worker).id, claim(engine, worker)] == [first.id, None]
        end(engine, first.id)
        assert claim(engine, worker).id == second.id

    def test_of_an_experiment_neither_limit_nor_count_serving_runs(self, engine: Engine) -> None:
        worker = add_worker(engine, devices=3)
        first = add_run(engine)
        limit(engine, first.experiment_id, 1)
        waits = add_run(engine, experiment_id=first.experiment_id)
        serving = add_run(engine, task="serve", experiment_id=first.experiment_id, priority=-1001)
        assert [claim(engine, worker).id for _ in range(2)] == [first.id, serving.id]
        assert claim(engine, worker) is None
        end(engine, first.id)
        assert claim(engine, worker).id == waits.id, "the serving run does not count"

    def test_of_none_keep_a_key_from_starting_anything(self, engine: Engine) -> None:
        add_run(engine, created_by=add_key(engine, 0))
        assert claim(engine, add_worker(engine)) is None

    def test_hold_while_many_workers_claim_at_once(self, engine: Engine) -> None:
        key = add_key(engine, 5)
        first = add_run(engine, created_by=key)
        limit(engine, first.experiment_id, 3)
        for _ in range(11):
            add_run(engine, created_by=key, experiment_id=first.experiment_id)
            add_run(engine, created_by=key)
        workers = [add_worker(engine, devices=8) for _ in range(6)]
        threads = [
            threading.Thread(target=lambda worker=worker: [claim(engine, worker) for _ in range(4)])
            for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        with engine.connect() as connection:
            held = "SELECT count(*) FROM devices JOIN runs ON runs.id = devices.run_id"
            assert connection.scalar(text(held)) == 5
            of_experiment = text(f"{held} WHERE runs.experiment_id = :id")
            assert connection.scalar(of_experiment, {"id": first.experiment_id}) == 3

    @pytest.mark.parametrize(
        ("needed", "sentence"),
        [(1, "is 1 device at a time, and other runs use too many"), (2, "is 1 device at a time, so it cannot start")],
    )
    async def test_a_run_that_waits_for_one_says_so(
        self, settings: Settings, engine: Engine, needed: int, sentence: str
    ) -> None:
        key, worker = add_key(engine, 1), add_worker(engine, devices=3)
        add_run(engine, created_by=key)
        claim(engine, worker)
        waits = add_run(engine, created_by=key, devices_needed=needed)
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET not_before = now() - interval '6 s'"))
        own = async_engine(settings.database_url or "", pool_size=1)
        await Dispatcher(own, Broker(settings), settings, ["fake"]).round()
        await own.dispose()
        reason: Any = run_row(engine, waits.id).pending_reason
        assert reason["code"] == "quota" and f"quota of its API key {sentence}" in reason["message"]
        assert stored_holds(engine).holds == [], "it keeps no devices idle"
