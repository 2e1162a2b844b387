"""Workers that runs on several devices hold, as rounds store them and as claims respect them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.runs.queue import planning
from app.runs.queue.durations import Estimate
from app.runs.queue.eta import EtaService
from app.runs.queue.holds_table import take_turn
from app.runs.queue.planning import PlannedQueue, plan_queue
from app.runs.queue.snapshot import Forecast, read_forecast
from app.runs.state import machine
from app.tables.runs import Run
from app.tables.scheduling import DeviceUsage
from tests.rows import add_run, add_worker, claim, hold_workers, run_row, stored_holds, waiting_for_locks
from tests.waiting import eventually


def held_workers(engine: Engine) -> list[tuple[str, str]]:
    """Return run and worker of each hold."""
    return sorted((hold.run_id, worker_id) for hold in stored_holds(engine).holds for worker_id in hold.devices)


async def plan(settings: Settings) -> PlannedQueue | None:
    """Do what the dispatcher does each second."""
    engine = async_engine(settings.database_url or "")
    async with engine.begin() as connection:
        planned = await plan_queue(connection, settings, ["fake"])
    await engine.dispose()
    return planned


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Durations of runs by id, as they are predicted; those of others are unknown."""
    seconds: dict[str, float] = {}

    def estimate(_: Forecast, run: Any, *__: Any) -> Any:
        return Estimate(seconds[run.id], "high", "") if run.id in seconds else None

    monkeypatch.setattr(Forecast, "estimate", estimate)
    return seconds


class TestOfTheQueue:
    async def test_a_later_run_does_not_take_the_device_that_a_wide_one_waits_for(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=2)
        first = add_run(engine)
        claim(engine, worker)
        big, small = add_run(engine, devices_needed=2), add_run(engine)
        await plan(settings)
        (hold,) = stored_holds(engine).holds
        assert (hold.run_id, list(hold.devices), hold.starts_at) == (big.id, [worker], None)
        assert claim(engine, worker) is None, "the free device is kept, since the end of the other run is unknown"
        urgent = add_run(engine, priority=1)
        assert claim(engine, worker).id == urgent.id, "it precedes the wide run"
        for run in (first, urgent):
            with engine.begin() as connection:
                connection.execute(machine.complete(run.id, 1, None, "done")).one()
        assert claim(engine, worker).id == big.id
        await plan(settings)
        assert held_workers(engine) == []
        assert claim(engine, worker) is None and run_row(engine, small.id).status == "pending"

    async def test_no_worker_is_kept_for_a_run_on_several_hosts_while_a_paused_device_is_missing(
        self, settings: Settings, engine: Engine
    ) -> None:
        workers = [add_worker(engine, devices=1, group_address="10.0.0.1") for _ in range(2)]
        add_run(engine, devices_needed=2, hosts_needed=2)
        pause = text("UPDATE devices SET paused_until = now() + :time * interval '1 h' WHERE worker_id = :id")
        for hours, workers_held in ((1, []), (-1, sorted(workers))):
            with engine.begin() as connection:
                connection.execute(pause, {"time": hours, "id": workers[0]})
            await plan(settings)
            assert [worker_id for _, worker_id in held_workers(engine)] == workers_held

    async def test_a_run_on_several_hosts_holds_workers_of_one_version(
        self, settings: Settings, engine: Engine
    ) -> None:
        _, new = (add_worker(engine, devices=1, group_address="10.0.0.1", version=version) for version in "12")
        run = add_run(engine, devices_needed=2, hosts_needed=2)
        await plan(settings)
        assert held_workers(engine) == []
        other = add_worker(engine, devices=1, group_address="10.0.0.1", version="2")
        await plan(settings)
        assert held_workers(engine) == sorted([(run.id, new), (run.id, other)])
        assert claim(engine, new).id == run.id

    def test_two_claims_at_once_do_not_both_take_the_spare_device(self, engine: Engine) -> None:
        worker = add_worker(engine, devices=4)
        big = add_run(engine, devices_needed=3)
        add_run(engine), add_run(engine)
        hold_workers(engine, big.id, worker, devices=range(4))
        with ThreadPoolExecutor(2) as threads:
            with engine.begin() as connection:
                take_turn(connection)
                # It waits for its devices, and so does not start itself.
                connection.execute(text("UPDATE runs SET not_before = now() WHERE id = :id"), {"id": big.id})
                connection.execute(text("UPDATE devices SET paused_until = now() + interval '1 h' WHERE index > 1"))
                claims = [threads.submit(claim, engine, worker) for _ in range(2)]
                eventually(lambda: waiting_for_locks(engine) == 2)
            rows = [claimed.result() for claimed in claims]
        assert [row is None for row in rows].count(True) == 1

    async def test_an_older_run_of_the_same_owner_precedes_the_wide_one(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine, created_by="key")
        claim(engine, worker)
        older = add_run(engine, created_by="key")
        holder, later = add_run(engine, created_by="key", devices_needed=2), add_run(engine, created_by="key")
        with engine.begin() as connection:
            connection.execute(
                insert(DeviceUsage).values(
                    owner="key", device_seconds=3600.0, updated_at=text("now() - interval '1 h'")
                )
            )
            delay = text("UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id")
            connection.execute(delay, {"id": older.id})
        await plan(settings)
        assert claim(engine, worker) is None, "the device is kept for the wide one"
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET not_before = now()"))
        assert claim(engine, worker).id == older.id
        assert {run_row(engine, run.id).status for run in (holder, later)} == {"pending"}

    async def test_one_that_ends_in_time_or_leaves_enough_devices_starts_before_it(
        self, settings: Settings, engine: Engine, lengths: dict[str, float]
    ) -> None:
        worker = add_worker(engine, devices=4)
        for seconds in (50.0, 500.0):
            lengths[add_run(engine).id] = seconds
            claim(engine, worker)
        add_run(engine, devices_needed=3)
        long, short = add_run(engine), add_run(engine)
        lengths |= {long.id: 400.0, short.id: 20.0}
        await plan(settings)
        holds = stored_holds(engine)
        assert holds.seconds == {"cpu": {short.id: 20.0}} and len(holds.holds) == 1
        assert claim(engine, worker).id == short.id
        assert claim(engine, worker) is None, "the long one would delay it"

    async def test_a_round_that_a_claim_overtakes_gives_none_of_its_devices_again(
        self, settings: Settings, engine: Engine, lengths: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = add_worker(engine, devices=4)
        lengths[add_run(engine, devices_needed=2).id] = 50.0
        claim(engine, worker)
        big, small = add_run(engine, devices_needed=3), [add_run(engine) for _ in range(2)]

        async def read(*arguments: Any, **options: Any) -> Forecast | None:
            forecast = await read_forecast(*arguments, **options)
            assert claim(engine, worker).id == small[0].id
            return forecast

        monkeypatch.setattr(planning, "read_forecast", read)
        await plan(settings)
        assert held_workers(engine) == [(big.id, worker)]
        assert claim(engine, worker) is None, "the device that the round had left to others is in use"

    @pytest.mark.parametrize("epoch", [1e-320, 1e308])
    async def test_no_trainer_keeps_others_from_their_holds_whatever_it_reports(
        self, settings: Settings, engine: Engine, epoch: float
    ) -> None:
        worker = add_worker(engine, devices=2)
        odd = add_run(engine)
        claim(engine, worker)
        with engine.begin() as connection:
            reported = (
                "UPDATE runs SET current_step = 10, current_epoch = :epoch, stop_mode = 'epoch_end' WHERE id = :id"
            )
            connection.execute(text(reported), {"epoch": epoch, "id": odd.id})
        holder = add_run(engine, devices_needed=2)
        await plan(settings)
        assert held_workers(engine) == [(holder.id, worker)]

    async def test_runs_that_fit_nowhere_do_not_hide_one_on_several_hosts_behind_them(
        self, settings: Settings, engine: Engine
    ) -> None:
        workers = [add_worker(engine, devices=1, group_address="10.0.0.1") for _ in range(2)]
        first = add_run(engine, requirements={"memory_mb": 5000})
        columns = [column.name for column in Run.__table__.columns if column.computed is None and column.name != "id"]
        copied = ", ".join(f'"{name}"' for name in columns)
        with engine.begin() as connection:
            copy = f"SELECT 'run_' || lpad(n::text, 26, '0'), {copied} FROM runs, generate_series(1, 1200) AS n"
            connection.execute(text(f"INSERT INTO runs (id, {copied}) {copy} WHERE id = :id"), {"id": first.id})
        run = add_run(engine, devices_needed=2, hosts_needed=2)
        await plan(settings)
        assert held_workers(engine) == sorted((run.id, worker) for worker in workers)
        own = async_engine(settings.database_url or "")
        near = f"run_{1:026}"
        predictions = await EtaService(settings, ["fake"], session_maker(own)).of({near: "pending", run.id: "pending"})
        await own.dispose()
        assert set(predictions) == {near}, "the runs before the other are not all known"
        assert claim(engine, workers[0]).id == run.id

    async def test_spare_devices_are_given_once(
        self, settings: Settings, engine: Engine, lengths: dict[str, float]
    ) -> None:
        worker = add_worker(engine, devices=5)
        lengths[add_run(engine, devices_needed=3).id] = 50.0
        claim(engine, worker)
        add_run(engine, devices_needed=3, requirements={"memory_mb": 2000})
        add_run(engine, devices_needed=2, requirements={"labels": ["elsewhere"]})
        fits = add_run(engine, devices_needed=4)
        small = [add_run(engine) for _ in range(2)]
        await plan(settings)
        assert held_workers(engine) == [(fits.id, worker)], "others fit no worker"
        assert [claim(engine, worker).id, claim(engine, worker)] == [small[0].id, None]

    async def test_a_hold_that_nobody_renews_binds_no_one(self, settings: Settings, engine: Engine) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine)
        claim(engine, worker)
        add_run(engine, devices_needed=2)
        small = add_run(engine)
        await plan(settings)
        assert claim(engine, worker) is None
        with engine.begin() as connection:
            connection.execute(text("UPDATE queue_plan SET made_at = now() - interval '31 s'"))
        taken = claim(engine, worker)
        assert taken is not None and taken.id == small.id

    async def test_a_free_device_that_is_kept_brings_no_hints(self, settings: Settings, engine: Engine) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine)
        claim(engine, worker)
        add_run(engine, devices_needed=2)
        add_run(engine)

        def hints(startable: list[str]) -> int:
            with engine.begin() as connection:
                connection.execute(text("UPDATE runs SET notified_at = now() - interval '2 s'"))
                return len(connection.execute(machine.mark_notified(10, startable)).all())

        planned = await plan(settings)
        assert planned is not None and hints(planned.startable_runs()) == 0
        add_worker(engine)
        planned = await plan(settings)
        assert planned is not None and hints(planned.startable_runs()) == 1
