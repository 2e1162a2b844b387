"""Reservations of workers for runs on several devices, as they are stored and as claims respect them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.runs.queue.durations import Estimate
from app.runs.scheduler import reserving
from app.runs.scheduler.eta import EtaService
from app.runs.scheduler.forecast import Forecast, read_forecast
from app.runs.scheduler.reserving import reserve
from app.runs.state import machine
from app.tables.runs import Run
from app.tables.scheduling import DeviceUsage
from tests.rows import add_run, add_worker, claim, claim_with_others, run_row, waiting_for_locks
from tests.waiting import eventually


def stored(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        query = "SELECT run_id, worker_id, devices, starts_at > clock_timestamp() AS is_later, spare, durations"
        return list(connection.execute(text(f"{query} FROM reservations ORDER BY run_id")).all())


async def renew(settings: Settings) -> None:
    """Do what the dispatcher does each second."""
    engine = async_engine(settings.database_url or "")
    async with engine.begin() as connection:
        await reserve(connection, settings, ["fake"])
    await engine.dispose()


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Durations of runs by id, as they are predicted; those of others are unknown."""
    found: dict[str, float] = {}

    def estimate(_: Forecast, run: Any, *__: Any) -> Any:
        return Estimate(found[run.id], "high", "") if run.id in found else None

    monkeypatch.setattr(Forecast, "estimate", estimate)
    return found


class TestOfTheQueue:
    async def test_a_later_run_does_not_take_the_device_that_a_wide_one_waits_for(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=2)
        first = add_run(engine)
        claim(engine, worker)
        big, small = add_run(engine, devices_needed=2), add_run(engine)
        await renew(settings)
        ((run_id, on, devices, is_later, spare, _),) = stored(engine)
        assert (run_id, on, devices, is_later, spare) == (big.id, worker, 2, None, 0)
        assert claim(engine, worker) is None, (
            "the free device stays reserved, since the end of the other run is unknown"
        )
        urgent = add_run(engine, priority=1)
        assert claim(engine, worker).id == urgent.id, "it precedes the wide run"
        for run in (first, urgent):
            with engine.begin() as connection:
                connection.execute(machine.complete(run.id, 1, None, "done")).one()
        assert claim(engine, worker).id == big.id
        await renew(settings)
        assert stored(engine) == []
        assert claim(engine, worker) is None and run_row(engine, small.id).status == "pending"

    async def test_no_worker_is_kept_for_a_run_on_several_hosts_while_a_paused_device_is_missing(
        self, settings: Settings, engine: Engine
    ) -> None:
        workers = [add_worker(engine, devices=1, group_address="10.0.0.1") for _ in range(2)]
        add_run(engine, devices_needed=2, hosts_needed=2)
        pause = text("UPDATE devices SET paused_until = now() + :time * interval '1 h' WHERE worker_id = :id")
        for hours, kept in ((1, []), (-1, sorted(workers))):
            with engine.begin() as connection:
                connection.execute(pause, {"time": hours, "id": workers[0]})
            await renew(settings)
            assert sorted(row.worker_id for row in stored(engine)) == kept

    async def test_a_run_on_several_hosts_reserves_workers_of_one_version(
        self, settings: Settings, engine: Engine
    ) -> None:
        _, new = (add_worker(engine, devices=1, group_address="10.0.0.1", version=version) for version in "12")
        run = add_run(engine, devices_needed=2, hosts_needed=2)
        await renew(settings)
        assert stored(engine) == []
        other = add_worker(engine, devices=1, group_address="10.0.0.1", version="2")
        await renew(settings)
        assert sorted(row.worker_id for row in stored(engine)) == sorted([new, other])
        assert claim_with_others(engine, new).id == run.id

    def test_two_claims_at_once_do_not_both_take_the_spare_device(self, engine: Engine) -> None:
        worker = add_worker(engine, devices=4)
        big = add_run(engine, devices_needed=3)
        add_run(engine), add_run(engine)
        put = text("INSERT INTO reservations (worker_id, run_id, devices, spare) VALUES (:worker, :run, 3, 1)")
        with engine.begin() as connection:
            connection.execute(put, {"worker": worker, "run": big.id})
            connection.execute(
                text("UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id"), {"id": big.id}
            )
        with ThreadPoolExecutor(2) as threads:
            with engine.begin() as connection:
                connection.execute(text("SELECT 1 FROM devices FOR UPDATE"))
                claims = [threads.submit(claim, engine, worker) for _ in range(2)]
                eventually(lambda: waiting_for_locks(engine) == 2)
            found = [one.result() for one in claims]
        assert [row is None for row in found].count(True) == 1

    async def test_an_older_run_of_the_same_owner_precedes_the_wide_one(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine, created_by="key")
        claim(engine, worker)
        older = add_run(engine, created_by="key")
        wide, later = add_run(engine, created_by="key", devices_needed=2), add_run(engine, created_by="key")
        with engine.begin() as connection:
            connection.execute(
                insert(DeviceUsage).values(
                    owner="key", device_seconds=3600.0, updated_at=text("now() - interval '1 h'")
                )
            )
            delay = text("UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id")
            connection.execute(delay, {"id": older.id})
        await renew(settings)
        assert claim(engine, worker) is None, "the device is kept for the wide one"
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET not_before = now()"))
        assert claim(engine, worker).id == older.id
        assert {run_row(engine, run.id).status for run in (wide, later)} == {"pending"}

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
        await renew(settings)
        ((_, _, _, is_later, spare, durations),) = stored(engine)
        assert (is_later, spare, durations) == (True, 0, {short.id: 20.0})
        assert claim(engine, worker).id == short.id
        assert claim(engine, worker) is None, "the long one would delay it"

    async def test_a_round_that_a_claim_overtakes_gives_none_of_its_devices_again(
        self, settings: Settings, engine: Engine, lengths: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = add_worker(engine, devices=4)
        lengths[add_run(engine, devices_needed=2).id] = 50.0
        claim(engine, worker)
        big, small = add_run(engine, devices_needed=3), [add_run(engine) for _ in range(2)]

        async def read(*given: Any) -> Forecast | None:
            forecast = await read_forecast(*given)
            assert claim(engine, worker).id == small[0].id
            return forecast

        monkeypatch.setattr(reserving, "read_forecast", read)
        await renew(settings)
        assert [(row.run_id, row.spare) for row in stored(engine)] == [(big.id, 0)]
        assert claim(engine, worker) is None, "the device that the round had found to spare is in use"

    async def test_a_round_neither_waits_for_a_claim_in_flight_nor_changes_what_it_reads(
        self, settings: Settings, engine: Engine
    ) -> None:
        workers = [add_worker(engine, devices=2) for _ in range(2)]
        for one in workers:
            add_run(engine), claim(engine, one)
        add_run(engine, devices_needed=2), add_run(engine, devices_needed=2)
        add_run(engine, priority=1)

        def made_at() -> list[Any]:
            with engine.connect() as connection:
                query = text("SELECT made_at FROM reservations WHERE worker_id = :id")
                return [connection.scalar(query, {"id": one}) for one in workers]

        async def renew_beside_a_claim(*statements: Any) -> None:
            before = made_at()
            with engine.connect() as connection:
                for statement in statements:
                    connection.execute(statement)
                await renew(settings)
                connection.rollback()
            after = made_at()
            assert after[0] == before[0], "of the worker that is being changed"
            assert after[1] != before[1]

        locks = machine.lock_for_claim(workers[0])
        taking = machine.claim(workers[0], ["fake"], 60.0, "cpu", [])
        await renew_beside_a_claim(*locks, taking)
        await renew(settings)
        await renew_beside_a_claim(*locks)
        await renew_beside_a_claim(*locks, taking)

    async def test_a_claim_that_waited_for_a_round_respects_the_reservation_that_it_made(
        self, settings: Settings, engine: Engine
    ) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine)
        claim(engine, worker)
        add_run(engine, devices_needed=2), add_run(engine)
        own = async_engine(settings.database_url or "")
        with ThreadPoolExecutor(1) as thread:
            async with own.begin() as connection:
                await reserve(connection, settings, ["fake"])
                found = thread.submit(claim, engine, worker)
                await asyncio.to_thread(eventually, lambda: waiting_for_locks(engine))
            assert found.result() is None
        await own.dispose()

    async def test_a_reservation_that_a_round_could_not_take_back_starts_no_run_with_others(
        self, settings: Settings, engine: Engine
    ) -> None:
        """It has a claim in flight, whose worker would then lead a run without a device for it."""
        busy, other = (add_worker(engine, devices=2, group_address="10.0.0.1") for _ in range(2))
        for worker in (busy, other):
            add_run(engine, devices_needed=2)
            claim(engine, worker)
        run = add_run(engine, devices_needed=2, hosts_needed=2)
        await renew(settings)
        assert sorted(row.worker_id for row in stored(engine)) == sorted([busy, other])
        free = [add_worker(engine, devices=1, group_address="10.0.0.1") for _ in range(2)]
        add_run(engine, devices_needed=2)  # fits the workers that it leaves
        with engine.begin() as connection:
            connection.execute(machine.lock_for_claim(busy)[1])
            await renew(settings)
        assert {row.worker_id for row in stored(engine) if row.run_id == run.id} == {busy, *free}
        assert claim_with_others(engine, busy) is None
        await renew(settings)
        assert claim_with_others(engine, free[0]).id == run.id

    @pytest.mark.parametrize("epoch", [1e-320, 1e308])
    async def test_no_trainer_keeps_others_from_their_reservations_whatever_it_reports(
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
        wide = add_run(engine, devices_needed=2)
        await renew(settings)
        assert [row.run_id for row in stored(engine)] == [wide.id]

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
        await renew(settings)
        assert sorted(row.worker_id for row in stored(engine)) == sorted(workers)
        own = async_engine(settings.database_url or "")
        near = f"run_{1:026}"
        found = await EtaService(settings, ["fake"], session_maker(own)).of({near: "pending", run.id: "pending"})
        await own.dispose()
        assert set(found) == {near}, "the runs before the other are not all known"
        assert claim_with_others(engine, workers[0]).id == run.id

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
        await renew(settings)
        assert [(row.run_id, row.spare) for row in stored(engine)] == [(fits.id, 1)], "others fit no worker"
        assert [claim(engine, worker).id, claim(engine, worker)] == [small[0].id, None]

    async def test_a_reservation_that_nobody_renews_binds_no_one(self, settings: Settings, engine: Engine) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine)
        claim(engine, worker)
        add_run(engine, devices_needed=2)
        small = add_run(engine)
        await renew(settings)
        assert claim(engine, worker) is None
        with engine.begin() as connection:
            connection.execute(text("UPDATE reservations SET made_at = now() - interval '31 s'"))
        taken = claim(engine, worker)
        assert taken is not None and taken.id == small.id

    async def test_a_free_device_that_is_kept_brings_no_hints(self, settings: Settings, engine: Engine) -> None:
        worker = add_worker(engine, devices=2)
        add_run(engine)
        claim(engine, worker)
        add_run(engine, devices_needed=2)
        add_run(engine)

        def hints() -> int:
            with engine.begin() as connection:
                connection.execute(text("UPDATE runs SET notified_at = now() - interval '2 s'"))
                return len(connection.execute(machine.mark_notified(10)).all())

        assert hints() == 2
        await renew(settings)
        assert hints() == 0
