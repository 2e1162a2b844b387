"""Curves of long runs: read from roll-ups, true to every point that was stored."""

import asyncio
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, select, text, update
from sqlalchemy.orm import Session

from app.infra.db import async_engine, session_maker, sync_engine
from app.runs.events.log import NewEvent, append_events
from app.runs.reading.metrics import curves
from app.runs.reading.metrics.points import Points, read_points
from app.runs.reading.metrics.rollups import MOST_STEP, Rollups, highest_level, points_of
from app.tables.events import RunEvent
from app.tables.runs import MetricRollup, Run
from tests.chaos.curves import MISMATCHES
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_run, add_worker, claim
from tests.server import ApiServer

Series = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


def new_trainer(api: ApiServer, engine: Engine, rolls_up: bool = True) -> Trainer:
    return Trainer(engine, make_run(api.client, make_dataset(engine))["id"], rolls_up).begin()


def series(api: ApiServer, run_id: str, **query: Any) -> Series:
    answer = api.client.get(f"/v1/runs/{run_id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    all_series: Series = answer.json()["series"]
    return all_series


def truth(api: ApiServer, run_id: str, low: int = 0, high: int = MOST_STEP) -> Points:
    """Every point that counts, from the events alone."""

    async def read() -> Points:
        engine = async_engine(api.settings.database_url or "")
        try:
            async with session_maker(engine)() as session:
                return await read_points(session, run_id, None, low, high)
        finally:
            await engine.dispose()

    return asyncio.run(read())


def assert_true(curve: Series, points: Points, most: int) -> None:
    """What is shown is what was stored: both ends, the extremes, no more than asked for, and all where that is all."""
    assert {name for name, one in curve.items() if one["steps"]} == {name for name in points if points[name]}
    for name, stored in points.items():
        shown = curve[name]
        steps, values = shown["steps"], shown["values"]
        assert steps == sorted(set(steps)) and len(steps) == len(values) <= most
        assert all(stored[step] == value for step, value in zip(steps, values, strict=True)), name
        assert (steps[0], steps[-1]) == (min(stored), max(stored)), name
        finite = [value for value in stored.values() if value is not None]
        assert (shown["min"], shown["max"]) == (min(finite, default=None), max(finite, default=None)), name
        assert not finite or {min(finite), max(finite)} <= set(values)
        # What is told of rarely is thinned with what it is told with.
        if len(points["grad_norm"]) <= most and not name.startswith("eval."):
            assert steps == sorted(stored), name


def train(trainer: Trainer, chance: random.Random, points: int, first_step: int) -> int:
    """Points in batches of any size, with evaluations, gaps, rewinds, and steps at any distance."""
    step, new = first_step, []
    for _ in range(points):
        step += chance.choice([1, 1, 1, 10, 1000])
        if chance.random() < 0.003:
            step = max(1, step - chance.randrange(2000))
        loss = None if chance.random() < 0.02 else chance.gauss(0, 1)
        gaps = {"non_finite": ["loss"]} if loss is None else {}
        extra = {"extra": {"mfu": chance.random()}} if chance.random() < 0.5 else {}
        new.append(("metric", {"step": step, "loss": loss, "grad_norm": 1.0, **extra, **gaps}))
        if chance.random() < 0.1:
            new.append(("eval", {"step": step, "metrics": {"loss": chance.gauss(0, 1)}}))
    while new:
        count = chance.randrange(1, 400)
        batch, new = new[:count], new[count:]
        trainer.mixed(batch)
    return step


class TestTruth:
    @pytest.mark.parametrize("seed", range(2))
    def test_a_curve_shows_what_was_stored_whatever_was_trained_again(
        self, shared_api: ApiServer, engine: Engine, seed: int
    ) -> None:
        chance = random.Random(seed)
        trainer = new_trainer(shared_api, engine)
        reached = train(trainer, chance, chance.randrange(200, 2500), 0)
        for _ in range(chance.randrange(3)):
            trainer = trainer.retry().begin(step=0)
            reached = max(reached, train(trainer, chance, chance.randrange(1, 700), chance.randrange(reached)))
        for _ in range(25):
            low, high = sorted(chance.randrange(reached + 10) for _ in range(2))
            if chance.random() < 0.3:
                low, high = 0, reached
            most = chance.choice([4, 7, 30, 100, 500, 3000])
            curves = series(shared_api, trainer.run_id, from_step=low, to_step=high, max_points=most)
            assert_true(curves, truth(shared_api, trainer.run_id, low, high), most)

    def test_attempts_of_workers_that_rolled_nothing_up_count_like_all_others(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        chance = random.Random(1)
        old = new_trainer(shared_api, engine, rolls_up=False)
        train(old, chance, 300, 0)
        new = _next_attempt(old)
        train(new, chance, 300, 500)
        curves = series(shared_api, old.run_id, max_points=20)
        assert_true(curves, truth(shared_api, old.run_id), 20)

    def test_extremes_outlive_the_events_behind_them(self, shared_api: ApiServer, engine: Engine) -> None:
        trainer = new_trainer(shared_api, engine)
        train(trainer, random.Random(7), 1000, 0)
        stored = truth(shared_api, trainer.run_id)
        with engine.begin() as connection:
            connection.execute(delete(RunEvent).where(RunEvent.run_id == trainer.run_id))
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(first_seq=Run.event_seq + 1))
        curves = series(shared_api, trainer.run_id, max_points=5000)
        for name in ("loss", "eval.loss"):
            finite = {step: value for step, value in stored[name].items() if value is not None}
            assert (curves[name]["min"], curves[name]["max"]) == (min(finite.values()), max(finite.values()))
            assert curves[name]["steps"][0] == min(stored[name]) and curves[name]["steps"][-1] == max(stored[name])
        # Of a row that lies only partly in the range there is what it still knows.
        steps = sorted(stored["grad_norm"])
        low, high = steps[5], steps[40]
        part = series(shared_api, trainer.run_id, names="loss", from_step=low, to_step=high)["loss"]
        assert part["steps"] and low <= part["steps"][0] and part["steps"][-1] <= high
        assert all(stored["loss"][step] == value for step, value in zip(part["steps"], part["values"], strict=True))

    def test_rows_of_earlier_versions_with_a_count_at_the_end_are_read(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        trainer = new_trainer(shared_api, engine)
        train(trainer, random.Random(8), 300, 0)
        queries: list[dict[str, Any]] = [{"max_points": 20}, {"max_points": 20, "names": "loss", "from_step": 7}]
        before = [series(shared_api, trainer.run_id, **query) for query in queries]
        with Session(engine) as session:
            for row in session.scalars(select(MetricRollup).where(MetricRollup.run_id == trainer.run_id)):
                row.series = {name: [*extent, row.points] for name, extent in row.series.items()}
            session.commit()
        assert [series(shared_api, trainer.run_id, **query) for query in queries] == before

    @pytest.mark.parametrize("seed", range(3))
    def test_roll_ups_count_of_odd_points_what_the_events_count(
        self, shared_api: ApiServer, engine: Engine, seed: int
    ) -> None:
        chance = random.Random(seed)
        odd = ["1.7e308", "-1.7e308", "1e999", "-1e999", "3", "true", "null", '"1.0"', "[1.0]", "-0.0", "1" + "0" * 400]

        def number() -> str:
            return chance.choice(odd) if chance.random() < 0.05 else repr(chance.gauss(0, 1))

        def named(*names: str) -> str:
            return ", ".join(f'"{name}": {number()}' for name in chance.sample(names, len(names)))

        reported = []
        for step in range(200):
            extra = f"{{{named('a', 'b')}}}" if chance.random() < 0.9 else chance.choice(["null", "7", "{}"])
            gaps = ', "non_finite": ["loss", "extra.a"]' if chance.random() < 0.1 else ""
            data = f'{{"step": {step}, {named("loss", "grad_norm")}, "extra": {extra}{gaps}}}'
            reported.append(NewEvent("metric", datetime.now(UTC), data))
        trainer = new_trainer(shared_api, engine)
        while reported:
            count = chance.randrange(1, 60)
            trainer.store(reported[:count])
            reported = reported[count:]
        stored = truth(shared_api, trainer.run_id)
        with engine.begin() as connection:
            connection.execute(delete(RunEvent).where(RunEvent.run_id == trainer.run_id))
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(first_seq=Run.event_seq + 1))
        curves = series(shared_api, trainer.run_id, max_points=5000)
        assert set(curves) == set(stored)
        for name, points in stored.items():
            shown, finite = curves[name], [value for value in points.values() if value is not None]
            assert (shown["min"], shown["max"]) == (min(finite), max(finite))
            assert all(points[step] == value for step, value in zip(shown["steps"], shown["values"], strict=True))
            assert (shown["steps"][0], shown["steps"][-1]) == (min(points), max(points))


def _next_attempt(trainer: Trainer) -> Trainer:
    again = trainer.retry()
    again.rolls_up = True
    return again.begin(step=0)


class TestCost:
    def test_a_long_curve_is_read_from_few_rows(self, shared_api: ApiServer, engine: Engine) -> None:
        trainer = new_trainer(shared_api, engine)
        for start in range(0, 20_000, 2000):
            trainer.events("metric", *({"step": step, "loss": float(step % 77)} for step in range(start, start + 2000)))
        rows = 0

        def count(_connection: Any, cursor: Any, *_: Any) -> None:
            nonlocal rows
            rows += max(cursor.rowcount, 0)

        server = shared_api.application.state.engine.sync_engine
        event.listen(server, "after_cursor_execute", count)
        try:
            loss = series(shared_api, trainer.run_id, names="loss", max_points=200)["loss"]
        finally:
            event.remove(server, "after_cursor_execute", count)
        assert (loss["min"], loss["max"]) == (0.0, 76.0) and 50 <= len(loss["steps"]) <= 200
        assert 0 < rows < 150

    def test_the_points_of_all_series_are_bounded(
        self, shared_api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(curves, "_MOST_VALUES", 400)
        trainer = new_trainer(shared_api, engine)
        extra = {f"value.{number}": 1.0 for number in range(19)}
        trainer.events("metric", *({"step": step, "loss": float(step % 77), "extra": extra} for step in range(500)))
        thinned = series(shared_api, trainer.run_id, max_points=100_000)
        assert len(thinned) == 20 and all(4 <= len(one["steps"]) <= 20 for one in thinned.values())
        assert (thinned["loss"]["min"], thinned["loss"]["max"]) == (0.0, 76.0)
        assert 20 < len(series(shared_api, trainer.run_id, names="loss", max_points=100_000)["loss"]["steps"]) <= 400


class TestWriting:
    def test_a_level_has_a_row_for_so_many_points_and_covers_them_all_at_any_time(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        trainer = new_trainer(shared_api, engine)
        for count in (1, 15, 1, 50, 200):
            start = self.points(engine, trainer.run_id, 0)[:1]
            first = sum(start)
            trainer.events("metric", *({"step": first + n, "loss": 1.0} for n in range(count)))
            total = first + count
            for level in range(highest_level(total) + 1):
                rows = self.points(engine, trainer.run_id, level)
                assert sum(rows) == total
                if level:
                    assert all(points == points_of(level) for points in rows[:-1])

    @staticmethod
    def points(engine: Engine, run_id: str, level: int) -> list[int]:
        query = select(MetricRollup.points).where(MetricRollup.run_id == run_id, MetricRollup.level == level)
        with engine.connect() as connection:
            return list(connection.scalars(query.order_by(MetricRollup.number)))

    def test_what_is_sent_again_counts_once_however_the_commit_before_it_went(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        chance = random.Random(3)
        events = [NewEvent.from_payload("metric", 1.0, {"step": step, "loss": chance.random()}) for step in range(500)]
        stored = {}
        for name in ("smoothly", "roughly"):
            run = add_run(engine)
            worker = add_worker(engine)
            while (claimed := claim(engine, worker)) is None or claimed.id != run.id:
                pass
            rollups = Rollups(run.id, claimed.attempt)
            done = tried = 0
            while done < len(events):
                tried = max(tried, done + chance.randrange(1, 60))  # what is sent again may have grown
                batch = events[done:tried]
                fate = chance.choice(["heard", "unheard", "undone"]) if name == "roughly" else "heard"
                with engine.connect() as connection:
                    where = append_events(connection, run.id, claimed.lease_epoch, done + 1, batch)
                    rollups.store_changes(connection, done + 1, batch, where)
                    connection.rollback() if fate == "undone" else connection.commit()
                if fate == "heard":
                    rollups.note_commit()
                    done += len(batch)
            table: Any = MetricRollup.__table__
            columns = [column for column in table.columns if column.name != "run_id"]
            with engine.connect() as connection:
                query = select(*columns).where(table.c.run_id == run.id).order_by(*table.primary_key.columns)
                stored[name] = connection.execute(query).all()
        assert stored["roughly"] == stored["smoothly"] != []

    def test_the_chaos_suite_would_see_a_point_that_one_of_both_lacks(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        trainer = new_trainer(shared_api, engine)
        train(trainer, random.Random(2), 100, 0)
        with engine.connect() as connection:

            def mismatches() -> int:
                return len(connection.execute(text(MISMATCHES), {"ids": [trainer.run_id]}).all())

            assert mismatches() == 0
            for change in ("points = points + 1", "last_seq = last_seq - 1", "level = level + 50"):
                connection.execute(
                    text(f"UPDATE metric_rollups SET {change} WHERE run_id = :id AND level = 0 AND kind = 'metric'"),
                    {"id": trainer.run_id},
                )
                assert mismatches() == 1
                connection.rollback()

    def test_values_that_the_database_refuses_do_not_stop_the_run(self, shared_api: ApiServer, engine: Engine) -> None:
        trainer = new_trainer(shared_api, engine)
        for data in ('{"step": 1, "loss": 1%s, "extra": {"a\\udc80b": 1.0, "☃": 2}}' % ("0" * 400),):
            trainer.store([NewEvent("metric", datetime.now(UTC), data)])
        trainer.events("metric", {"step": "one", "loss": 1.0})
        trainer.events("metric", {"step": 2, "loss": 1.0})
        assert series(shared_api, trainer.run_id)["loss"]["steps"][-1] == 2
        with engine.connect() as connection:
            rollup = connection.scalar(
                text("SELECT series FROM metric_rollups WHERE run_id = :id AND level = 0"), {"id": trainer.run_id}
            )
        assert set(rollup or ()) == {"loss", "extra.a?b", "extra.☃"}
