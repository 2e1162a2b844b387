"""Reservations of workers for runs on several devices, for constructed queues and in the database."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.runs.queue.durations import Estimate
from app.runs.queue.fit import Needs
from app.runs.scheduler import reserving
from app.runs.scheduler.eta import EtaService
from app.runs.scheduler.forecast import Forecast, read_forecast
from app.runs.scheduler.reservations import PendingRun, Reservation, choose_reservations
from app.runs.scheduler.reserving import reserve
from app.runs.state import machine
from app.tables.runs import Run
from app.tables.scheduling import DeviceUsage
from tests.rows import add_run, add_worker, claim, claim_with_others, run_row, waiting_for_locks
from tests.waiting import eventually


def wide(run_id: str = "wide", devices: int = 2, not_before: float = 0.0, hosts: int = 1) -> PendingRun:
    return PendingRun(run_id, Needs("celery", devices=devices, hosts=hosts), not_before)


def choose(
    free: list[list[float]], *queue: PendingRun, now: float = 0.0, held: dict[str, list[int]] | None = None
) -> dict[str, Reservation]:
    """Reservations by run, of runs that fit every device."""
    fitting = {
        run.run_id: {at: list(range(len(one))) for at, one in enumerate(free) if len(one) >= run.needs.devices_each}
        for run in queue
    }
    return {one.run.run_id: one for one in choose_reservations(queue, fitting, free, now, held or {})}


class TestChoice:
    def test_each_takes_the_worker_whose_devices_are_free_first_and_not_that_of_another(self) -> None:
        found = choose([[30.0, 80.0], [50.0, 20.0], [90.0]], wide("a"), wide("b"), wide("c"))
        assert {name: (one.worker, one.start) for name, one in found.items()} == {"a": (1, 50.0), "b": (0, 80.0)}

    def test_a_run_that_needs_one_device_or_may_not_start_yet_reserves_none(self) -> None:
        assert choose([[9.0, 9.0]], wide("one", devices=1), wide("later", not_before=5.0)) == {}

    @pytest.mark.parametrize(("other", "worker"), [(90.0, 0), (70.0, 1)])
    def test_a_worker_that_is_held_is_left_only_for_one_that_is_free_clearly_sooner(
        self, other: float, worker: int
    ) -> None:
        assert choose([[100.0, 100.0], [other, other]], wide(), held={"wide": [0]})["wide"].worker == worker

    def test_of_workers_whose_ends_are_unknown_it_is_the_one_with_most_free_devices(self) -> None:
        found = choose([[math.inf, math.inf], [0.0, math.inf]], wide())["wide"]
        assert (found.worker, found.start, found.spare) == (1, math.inf, 0)

    def test_devices_that_will_be_free_beyond_its_own_are_spare(self) -> None:
        assert choose([[0.0, 10.0, 20.0, 20.0, 99.0]], wide())["wide"].spare == 0
        assert choose([[0.0, 10.0, 20.0, 20.0, 99.0]], wide(devices=3))["wide"].spare == 1


class TestOfSeveralHosts:
    def places(
        self, free: list[list[float]], *queue: PendingRun, **more: Any
    ) -> dict[str, list[tuple[int, float, int]]]:
        """Workers of each run, with the start and the spare devices."""
        fitting = {
            run.run_id: {at: list(range(len(one))) for at, one in enumerate(free) if len(one) >= run.needs.devices_each}
            for run in queue
        }
        found: dict[str, list[tuple[int, float, int]]] = {}
        for one in choose_reservations(queue, fitting, free, 0.0, more.get("held", {})):
            found.setdefault(one.run.run_id, []).append((one.worker, one.start, one.spare))
        return found

    def test_it_reserves_the_workers_that_are_free_first_until_all_of_them_are(self) -> None:
        free = [[50.0, 90.0], [10.0, 20.0, 30.0], [40.0, 60.0]]
        assert self.places(free, wide(devices=4, hosts=2)) == {"wide": [(1, 60.0, 1), (2, 60.0, 0)]}

    def test_it_keeps_those_that_it_holds(self) -> None:
        free = [[50.0], [49.0], [48.0]]
        assert [at for at, *_ in self.places(free, wide(hosts=2), held={"wide": [0, 1]})["wide"]] == [1, 0]

    def test_with_too_few_workers_it_reserves_none_and_leaves_them_to_the_next(self) -> None:
        found = self.places([[1.0, 1.0], [1.0]], wide("a", devices=4, hosts=2), wide("b", devices=2, hosts=2))
        assert list(found) == ["b"]

    def test_two_runs_share_no_worker(self) -> None:
        found = self.places([[0.0], [0.0], [0.0]], wide("a", hosts=2), wide("b", hosts=2))
        assert {run: sorted(at for at, *_ in places) for run, places in found.items()} == {"a": [0, 1]}

    def test_only_one_whose_start_is_unknown_keeps_workers_idle(self) -> None:
        unknown = [[0.0], [math.inf], [math.inf], [math.inf]]
        assert set(self.places(unknown, wide("a", hosts=2), wide("b", hosts=2))) == {"a"}

    def test_all_its_workers_have_devices_of_one_model(self) -> None:
        run = wide(hosts=2)
        free = [[0.0], [10.0], [20.0]]
        fitting = {run.run_id: {at: [0] for at in range(3)}}
        found = choose_reservations([run], fitting, free, 0.0, {}, ["L4", "H100", "H100"])
        assert [one.worker for one in found] == [1, 2]
        assert choose_reservations([run], fitting, free, 0.0, {}, ["L4", "H100", "A100"]) == []


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
        lengths[add_run(engine).id] = 50.0
        claim(engine, worker)
        add_run(engine, devices_needed=3, requirements={"memory_mb": 2000})
        add_run(engine, devices_needed=2, requirements={"labels": ["elsewhere"]})
        fits = add_run(engine, devices_needed=3)
        small = [add_run(engine) for _ in range(2)]
        await renew(settings)
        assert [(row.run_id, row.spare) for row in stored(engine)] == [(fits.id, 1)], "others fit no worker"
        with engine.begin() as connection:  # so that it does not start first
            connection.execute(
                text("UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id"), {"id": fits.id}
            )
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
