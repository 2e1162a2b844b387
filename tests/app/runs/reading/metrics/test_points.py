"""Curves: the newest pass over each step, thinned without losing an extreme."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.infra.ids import new_id
from app.runs.reading.metrics import curves as reading
from app.runs.reading.metrics import points
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer


@pytest.fixture
def trainer(api: ApiServer, engine: Engine) -> Trainer:
    return Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()


def series(api: ApiServer, trainer: Trainer, **query: Any) -> dict[str, Any]:
    answer = api.client.get(f"/v1/runs/{trainer.run_id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["run_id"] == trainer.run_id
    all_series: dict[str, Any] = answer.json()["series"]
    return all_series


class TestSeries:
    def test_each_number_of_a_metric_is_a_series(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.metric(10, loss=3.0, learning_rate=0.1, gpu_memory_mb=None, extra={"mfu": 0.4, "note": "text"})
        trainer.metric(20, loss=2.0, learning_rate=0.2, extra={"mfu": 0.5})
        trainer.events("eval", {"step": 20, "epoch": 0.2, "metrics": {"eval_loss": 2.5}})
        curves = series(api, trainer)
        assert set(curves) == {"epoch", "loss", "learning_rate", "extra.mfu", "eval.eval_loss"}
        assert curves["loss"] == {"steps": [10, 20], "values": [3.0, 2.0], "min": 2.0, "max": 3.0}
        assert curves["extra.mfu"]["values"] == [0.4, 0.5]
        assert curves["eval.eval_loss"] == {"steps": [20], "values": [2.5], "min": 2.5, "max": 2.5}
        named = series(api, trainer, names="eval_loss,eval.eval_loss,loss")
        assert named == {"eval_loss": curves["eval.eval_loss"]} | {
            name: curves[name] for name in ("eval.eval_loss", "loss")
        }

    def test_only_those_named_and_only_the_steps_asked_for(self, api: ApiServer, trainer: Trainer) -> None:
        for step in range(1, 11):
            trainer.metric(step, loss=float(step), grad_norm=1.0)
        curves = series(api, trainer, names="loss, unheard_of", from_step=3, to_step=5)
        assert curves["loss"] == {"steps": [3, 4, 5], "values": [3.0, 4.0, 5.0], "min": 3.0, "max": 5.0}
        assert curves["unheard_of"] == {"steps": [], "values": [], "min": None, "max": None}
        assert set(curves) == {"loss", "unheard_of"}

    def test_a_value_that_was_not_finite_is_a_gap(self, api: ApiServer, trainer: Trainer) -> None:
        trainer.metric(1, loss=1.0)
        trainer.metric(2, loss=None, extra={"kl": None}, non_finite=["loss", "extra.kl"])
        trainer.events("eval", {"step": 2, "metrics": {"loss": None}, "non_finite": ["metrics.loss"]})
        curves = series(api, trainer)
        assert curves["loss"] == {"steps": [1, 2], "values": [1.0, None], "min": 1.0, "max": 1.0}
        assert curves["extra.kl"]["values"] == curves["eval.loss"]["values"] == [None]

    def test_the_history_of_a_run_with_large_points_is_short(self, api: ApiServer, trainer: Trainer) -> None:
        for step in range(1, 31):
            trainer.metric(step, loss=float(step), extra={"note": "x" * 100_000})
        history = api.client.get(f"/v1/runs/{trainer.run_id}").json()["metrics_history"]
        assert [point["step"] for point in history] == list(range(20, 31))

    def test_what_is_not_as_agreed_makes_no_run_unreadable_or_unstoppable(
        self, api: ApiServer, trainer: Trainer
    ) -> None:
        trainer.metric(1, loss="n/a", extra=None, learning_rate=True)
        trainer.metric(2, loss=10**400, extra={"x": "y"})
        trainer.events("metric", {"step": "three"})
        run = f"/v1/runs/{trainer.run_id}"
        history = api.client.get(run).json()["metrics_history"]
        assert [(point["step"], point["loss"], point["learning_rate"]) for point in history] == [
            (1, None, None),
            (2, None, None),
        ]
        assert api.client.patch(run, json={"name": "odd"}).status_code == 200
        assert api.client.post(f"{run}/stop").status_code == 202
        assert api.client.get(run).json()["stop_requested_at"] is not None

    def test_a_run_without_metrics_has_no_series(self, api: ApiServer, trainer: Trainer) -> None:
        assert series(api, trainer) == {}


class TestNewestPass:
    def test_steps_that_a_later_attempt_trains_again_are_its_own(self, api: ApiServer, trainer: Trainer) -> None:
        for step in (10, 20, 30, 40):
            trainer.metric(step, loss=1.0)
        trainer.events("eval", {"step": 40, "metrics": {"loss": 1.0}})
        again = trainer.retry().begin(step=20)
        again.metric(30, loss=2.0)
        curves = series(api, trainer)
        assert (curves["loss"]["steps"], curves["loss"]["values"]) == ([10, 20, 30], [1.0, 1.0, 2.0])
        assert "eval.loss" not in curves
        assert (curves["loss"]["min"], curves["loss"]["max"]) == (1.0, 2.0)
        read = api.client.get(f"/v1/runs/{trainer.run_id}").json()
        assert [(point["step"], point["loss"]) for point in read["metrics_history"]] == [(10, 1), (20, 1), (30, 2)]

    def test_an_evaluation_at_a_step_does_not_hide_the_metric_of_that_step(
        self, api: ApiServer, trainer: Trainer
    ) -> None:
        for step in (10, 20):
            trainer.metric(step, loss=1.0)
            trainer.events("eval", {"step": step, "metrics": {"loss": 2.0}})
        curves = series(api, trainer)
        assert curves["loss"]["steps"] == curves["eval.loss"]["steps"] == [10, 20]


class TestThinning:
    @pytest.mark.parametrize("most", [4, 10, 100, 1999])
    def test_thinned_series_keeps_first_last_and_extremes(self, api: ApiServer, trainer: Trainer, most: int) -> None:
        values = [random.Random(step).gauss(0, 1) for step in range(2000)]
        values[777], values[1234] = 99.0, -99.0
        trainer.events("metric", *({"step": step, "loss": value} for step, value in enumerate(values)))
        loss = series(api, trainer, names="loss", max_points=most)["loss"]
        assert len(loss["steps"]) == len(loss["values"]) <= most
        assert loss["steps"] == sorted(set(loss["steps"]))
        assert [values[step] for step in loss["steps"]] == loss["values"]
        assert (loss["steps"][0], loss["steps"][-1]) == (0, 1999)
        assert (loss["min"], loss["max"]) == (-99.0, 99.0)
        assert {777, 1234} <= set(loss["steps"])

    def test_short_series_is_not_thinned(self, api: ApiServer, trainer: Trainer) -> None:
        for step in range(10):
            trainer.metric(step, loss=1.0)
        assert series(api, trainer, max_points=10)["loss"]["steps"] == list(range(10))


class TestCost:
    def test_the_index_of_metrics_and_evaluations_serves_the_query(self, engine: Engine, trainer: Trainer) -> None:
        trainer.log(*("x" * 50 for _ in range(3000)))
        for step in range(20):
            trainer.metric(step, loss=1.0)
            trainer.events("eval", {"step": step, "metrics": {"loss": 1.0}})
        with engine.begin() as connection:
            connection.execute(text("ANALYZE run_events"))
            for types in (("metric",), ("metric", "eval")):
                query = points._newest_first(trainer.run_id, types)
                for _ in range(12):  # often enough for a prepared statement with a plan for any parameters
                    connection.execute(query)
                written = query.compile(connection, compile_kwargs={"render_postcompile": True, "literal_binds": True})
                plan = "\n".join(connection.scalars(text(f"EXPLAIN {written}")))
                assert "run_id_seq_idx" in plan and "pkey" not in plan, plan
        with engine.connect() as connection:
            index = connection.scalar(text("SELECT pg_get_indexdef('ix_run_events_metric'::regclass)"))
        assert "'metric'" in index and "'eval'" in index

    def test_many_curves_at_once_leave_connections_for_everybody_else(
        self, api: ApiServer, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.metric(1, loss=1.0)
        real, now, most = reading.read_curves, 0, 0

        async def watched(*arguments: Any) -> Any:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.02)
            result = await real(*arguments)
            now -= 1
            return result

        monkeypatch.setattr(reading, "read_curves", watched)
        with ThreadPoolExecutor(60) as pool:
            curves = [pool.submit(series, api, trainer) for _ in range(60)]
            others = [pool.submit(api.client.get, "/v1/experiments") for _ in range(10)]
            assert all("loss" in one.result() for one in curves)
            assert {one.result().status_code for one in others} == {200}
        assert most == reading.READS_AT_A_TIME


class TestRefusals:
    def test_unknown_runs_and_absurd_numbers(self, api: ApiServer, trainer: Trainer) -> None:
        assert api.client.get(f"/v1/runs/{new_id('run')}/metrics").status_code == 404
        for wrong in ({"max_points": 3}, {"max_points": 10**9}, {"from_step": -1}, {"to_step": 10**30}):
            assert api.client.get(f"/v1/runs/{trainer.run_id}/metrics", params=wrong).status_code == 422
