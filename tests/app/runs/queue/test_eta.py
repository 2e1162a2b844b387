"""What is predicted of runs as they are stored: on real tables, without any trainer."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, insert, select, text

import app.runs.queue.eta
from anneal.contracts.schemas.runs.reads import Prediction
from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.runs.queue.durations import Timings, config_digest
from app.runs.queue.eta import EtaService
from app.runs.state import machine
from app.tables.runs import AttemptTimings, Run
from tests.factories import mark_run
from tests.rows import add_key, add_run, add_worker, claim, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually, eventually_async

CONFIG = {"base_model": "none", "method": "sft"}
IN_EPOCH = {"current_step": 50, "current_epoch": 2.5}


def timed(engine: Engine, run: Any, attempt: int = 1, **values: Any) -> None:
    """What an attempt took: a second a step, unless `values` say otherwise."""
    twin = config_digest(run.config, run.dataset_id, None)
    timings = Timings(twin=twin, training=float(values["step"]), step_seconds=1.0, **values)
    row = {"run_id": run.id, "attempt": attempt, "similarity_key": "fake sft none", "device": "cpu"}
    with engine.begin() as connection:
        connection.execute(
            insert(AttemptTimings).values(**row, timings=asdict(timings), measured_at=func.clock_timestamp())
        )


def past(engine: Engine) -> Any:
    """A run that has ended; answers its row."""
    run = add_run(engine, config={**CONFIG, "extra": {}})
    claimed = claim(engine, add_worker(engine))
    with engine.begin() as connection:
        connection.execute(machine.complete(run.id, claimed.lease_epoch, None, "done")).one()
    return run


def ask(settings: Settings, times: int = 1) -> list[dict[str, Prediction | None]]:
    """What is predicted of all runs, by so many forecasts."""

    async def predict() -> list[dict[str, Prediction | None]]:
        engine = async_engine(settings.database_url or "")
        sessions = session_maker(engine)
        eta, forecasts = EtaService(settings, ["fake"], sessions), []
        for _ in range(times):
            async with sessions() as session:
                runs = (await session.execute(select(Run.id, Run.status))).all()
            eta._made_at = float("-inf")
            predictions = await eta.of({run.id: run.status for run in runs})
            forecasts.append({run.id: predictions.get(run.id) for run in runs})
        await engine.dispose()
        return forecasts

    return asyncio.run(predict())


def test_a_run_counts_once_in_the_history_of_others_and_not_in_its_own(settings: Settings, engine: Engine) -> None:
    ended = past(engine)
    # It was lost twice.
    for attempt, step in ((1, 5), (2, 20), (3, 10)):
        timed(engine, ended, attempt, step=step, total_steps=20)
    waits, lost = add_run(engine, config=ended.config), add_run(engine, config={**CONFIG, "extra": {"steps": 1}})
    mark_run(engine, waits.id, dataset_id=ended.dataset_id)
    timed(engine, lost, step=15, total_steps=20)
    predictions = ask(settings)[0]
    reported = predictions[waits.id]
    assert reported is not None and reported.start_at is not None and reported.finish_at is not None
    assert (reported.finish_at - reported.start_at).total_seconds() == pytest.approx(20, abs=0.1)
    assert "20 of 20 steps left, based on 1 earlier run with this configuration" in reported.basis
    own = predictions[lost.id]
    assert own is not None and own.finish_at is None


@pytest.mark.parametrize(
    ("columns", "extra", "left"),
    [
        ({"total_steps": 100}, {}, "50 of 100 steps left"),  # extended: the configuration says 20
        ({"total_steps": 100}, {"stop_at_step": 80}, "30 of 80 steps left"),
        ({"total_steps": 100, "stop_mode": "epoch_end", **IN_EPOCH}, {}, "10 of 60 steps left"),
        ({"total_steps": 55, "stop_mode": "epoch_end", **IN_EPOCH}, {}, "5 of 55 steps left"),
        ({"total_steps": 100, "stop_mode": "epoch_end"}, {}, None),
    ],
)  # fmt: skip
def test_a_run_that_trains_has_left_what_the_trainer_reports_up_to_its_stop(
    settings: Settings, engine: Engine, columns: dict[str, Any], extra: dict[str, Any], left: str | None
) -> None:
    run = add_run(engine, config={**CONFIG, "extra": {"steps": 20}, **extra})
    claim(engine, add_worker(engine))
    timed(engine, run, step=50, total_steps=20)
    mark_run(engine, run.id, **columns)
    reported = ask(settings)[0][run.id]
    if left is None:
        assert reported is None
    else:
        assert reported is not None and reported.basis.startswith(left)


@pytest.mark.parametrize(
    ("stop", "seconds"),
    [
        ({"stop_mode": "checkpoint"}, 6.0),  # twice the lease
        ({"stop_requested_at": text("now() - interval '1 hour'")}, 0.0),
        ({"stop_requested_at": None, "stop_mode": "epoch_end", **IN_EPOCH}, 10.0),
    ],
    ids=["checkpoint", "long-asked", "epoch-end"],
)
def test_a_run_that_is_to_stop_makes_room_for_those_that_wait(
    settings: Settings, engine: Engine, stop: dict[str, Any], seconds: float
) -> None:
    run = add_run(engine, config={**CONFIG, "extra": {"steps": 100}})
    claim(engine, add_worker(engine))
    timed(engine, run, step=50, total_steps=100)
    mark_run(engine, run.id, **{"stop_requested_at": func.clock_timestamp(), "total_steps": 100, **stop})
    waits = add_run(engine).id
    (predictions,) = ask(settings)
    assert (predictions[run.id] is None) is (stop.get("stop_mode") != "epoch_end"), (
        "when it ends itself is for nobody to ask"
    )
    reported = predictions[waits]
    assert reported is not None and reported.start_at is not None
    assert (reported.start_at - datetime.now(UTC)).total_seconds() == pytest.approx(seconds, abs=2)


def test_a_quota_delays_the_predicted_start_of_the_runs_that_it_limits(settings: Settings, engine: Engine) -> None:
    ended = past(engine)
    timed(engine, ended, step=20, total_steps=20)
    key, worker = add_key(engine, 1), add_worker(engine, devices=3)
    first, second = (add_run(engine, config=ended.config, created_by=key) for _ in range(2))
    for run in (first, second):
        mark_run(engine, run.id, dataset_id=ended.dataset_id)

    def predicted() -> tuple[Prediction, Prediction]:
        (predictions,) = ask(settings)
        first_prediction, second_prediction = predictions[first.id], predictions[second.id]
        assert first_prediction is not None and second_prediction is not None and second_prediction.start_at is not None
        return first_prediction, second_prediction

    first_prediction, second_prediction = predicted()
    assert second_prediction.start_at == first_prediction.finish_at
    assert claim(engine, worker).id == first.id
    timed(engine, first, step=5, total_steps=20)
    mark_run(engine, first.id, total_steps=20)
    first_prediction, second_prediction = predicted()
    assert second_prediction.start_at == first_prediction.finish_at, (
        "it is not claimed before, although devices are free"
    )
    assert second_prediction.basis.startswith("It waits until the quota of its key or experiment has room, ")
    mark_run(engine, first.id, total_steps=None, config={**CONFIG, "base_model": "unlike"})
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM run_timings"))
    unknown = ask(settings)[0][second.id]
    assert unknown is not None and unknown.start_at is None and "until the quota of its key" in unknown.basis


def test_only_those_are_before_a_run_that_could_take_its_place(settings: Settings, engine: Engine) -> None:
    add_worker(engine)
    for _ in range(2):
        add_run(engine, requirements={"kind": "cuda"})
    first, second = (add_run(engine).id for _ in range(2))
    (predictions,) = ask(settings)
    bases = [reported.basis for reported in (predictions[first], predictions[second]) if reported]
    assert [basis.partition(",")[0].partition(";")[0] for basis in bases] == ["It is next", "1 run is before it"]


def test_a_forecast_that_goes_wrong_fails_no_answer_and_the_next_is_made_as_ever(
    api: ApiServer, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = add_run(engine).id
    add_worker(engine)
    eta = api.application.state.eta

    def predictions() -> list[Any]:
        eta._made_at = float("-inf")
        listed = api.client.get("/v1/runs").json()["data"][0]["prediction"]
        answers = [api.client.get(f"/v1/runs/{run_id}"), api.client.patch(f"/v1/runs/{run_id}", json={"pinned": True})]
        return [listed, *(answer.raise_for_status().json()["prediction"] for answer in answers)]

    assert None not in predictions()
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE run_timings RENAME TO elsewhere"))
    with caplog.at_level(logging.ERROR, "app.runs.queue.eta"):
        assert [*predictions(), *predictions()] == [None] * 6
    assert len([record for record in caplog.records if record.name == "app.runs.queue.eta"]) == 1, "told once"
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO run_timings"))
    assert None not in predictions()
    with monkeypatch.context() as patch, engine.begin() as connection:
        patch.setattr(app.runs.queue.eta, "_MOST_SECONDS", 0.2)
        connection.execute(text("LOCK TABLE run_timings IN ACCESS EXCLUSIVE MODE"))
        assert predictions() == [None] * 3, "nobody waits longer than that"
    assert None not in predictions()


def test_an_edit_keeps_no_one_from_the_run_while_a_forecast_is_made(api: ApiServer, engine: Engine) -> None:
    run_id = add_run(engine).id
    add_worker(engine)
    with ThreadPoolExecutor() as editor:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE run_timings IN ACCESS EXCLUSIVE MODE"))
            edited = editor.submit(api.client.patch, f"/v1/runs/{run_id}", json={"name": "another"})
            eventually(lambda: waiting_for_locks(engine))
            mine = select(Run.name).where(Run.id == run_id).with_for_update(skip_locked=True)
            # The dispatcher may hold the row for a moment, to note that it sends a hint.
            assert eventually(lambda: connection.scalar(mine)) == "a run"
        shown = edited.result().raise_for_status().json()
    assert shown["name"] == "another" and shown["prediction"] is not None


async def test_no_one_waits_for_a_forecast_and_there_is_at_most_one_a_second(
    settings: Settings, engine: Engine
) -> None:
    run_id = add_run(engine).id
    add_worker(engine)
    database = async_engine(settings.database_url or "")
    forecast_times: list[float] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "run_timings.similarity_key" in statement:
            forecast_times.append(time.monotonic())

    event.listen(database.sync_engine, "before_cursor_execute", note)
    eta = EtaService(settings, ["fake"], session_maker(database))

    async def reported(*run_ids: str) -> dict[str, Prediction]:
        return await eta.of(dict.fromkeys(run_ids, "pending"))

    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE run_timings IN ACCESS EXCLUSIVE MODE"))
        slow = asyncio.create_task(reported(run_id))
        await eventually_async(lambda: asyncio.to_thread(waiting_for_locks, engine))
        assert await asyncio.wait_for(reported(run_id), 5) == {}
    assert (await slow)[run_id] is not None
    # As one behind the thousandth of the queue: no forecast has it, and asking again makes none.
    for _ in range(12):
        assert (await reported(run_id, "run_unknown")).keys() == {run_id}
        await asyncio.sleep(0.05)

    async def is_made_again() -> bool:
        await reported(run_id, "run_unknown")
        return len(forecast_times) > 1

    await eventually_async(is_made_again)
    await database.dispose()
    assert forecast_times[1] - forecast_times[0] >= 1.0
