"""Promises about what pages read of runs: rows of a table, counts, curves of several runs, attempts, history."""

import json
import math
import sys
from typing import Any

import pytest
from sqlalchemy import Engine, update

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.groups import GROUPS
from app.config import Settings
from app.infra.ids import new_id
from app.tables.runs import Run
from tests.factories import Trainer, make_dataset, make_experiment, make_run
from tests.server import ApiServer

MOST_BYTES_OF_50 = 20_000
"""On the way to a browser, with gzip."""


@pytest.fixture
def settings(shared_api: ApiServer) -> Settings:
    """Settings of the shared API, so that `engine` is on its database."""
    return shared_api.settings


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


def rows(api: ApiServer, **query: Any) -> list[dict[str, Any]]:
    answer = api.client.get("/v1/runs", params={"view": "row", **query})
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def losses(trainer: Trainer, *values: float | None, first: int = 1) -> None:
    for step, value in enumerate(values, first):
        gap = {"non_finite": ["loss"]} if value is None else {}
        trainer.metric(step, loss=value, epoch=step / 10, extra={"tokens_per_second": 1000.4 + step}, **gap)


class TestRows:
    def test_rows_have_the_table_fields_and_omit_unknown_values(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        experiment = make_experiment(engine)
        waiting = make_run(emptied_api.client, dataset, name="waiting", experiment_id=experiment, tags=["a"])
        (row,) = rows(emptied_api)
        assert row == {
            "id": waiting["id"], "name": "waiting", "status": "pending", "method": "qlora", "base_model": "any",
            "experiment_id": experiment, "tags": ["a"], "by": "test", "created_at": row["created_at"],
            "learning_rate": 0.0002,
        } | {name: row[name] for name in ("reason", "starts_at", "finishes_at") if name in row}  # fmt: skip
        trainer = Trainer(engine, waiting["id"]).begin(total=100)
        losses(trainer, 3.0, 2.0, None, 1.23456)
        trainer.fail("out_of_memory", "no memory")
        (row,) = rows(emptied_api)
        assert (row["status"], row["reason"], row["worker"]) == ("failed", "out_of_memory", "test")
        assert row["total_steps"] == 100
        assert row["losses"] == [3.0, 2.0, None, 1.23] and row["tokens_per_second"] == 1004
        assert row["started_at"] <= row["finished_at"] and "starts_at" not in row

    def test_rows_of_reinforcement_learning_have_rewards_instead_of_losses(
        self, emptied_api: ApiServer, engine: Engine
    ) -> None:
        prompts = make_dataset(engine, "prompt", ("prompt",))
        rewards = {"rewards": [{"type": "length", "max": 8}]}
        for points in (3, 300):  # from events, and from rollups
            run = make_run(emptied_api.client, prompts, config={"method": "rlhf", "rlhf": rewards})
            trainer = Trainer(engine, run["id"]).begin(total=400)
            metrics = [{"step": step, "loss": 0.0, "extra": {"reward": float(step)}} for step in range(1, points + 1)]
            trainer.events("metric", *metrics)
            row = rows(emptied_api)[0]
            assert "losses" not in row and (row["rewards"][0], row["rewards"][-1]) == (1.0, float(points))
            trainer.complete()

    def test_rows_have_losses_of_the_newest_pass(self, emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin(total=100)
        losses(trainer, *(float(step) for step in range(1, 21)))
        losses(trainer, 100.0, 200.0, first=11)  # it went back to the checkpoint of step 10
        (row,) = rows(emptied_api)
        assert row["losses"] == [*(float(step) for step in range(1, 11)), 100.0, 200.0]

    def test_rows_with_extreme_numbers_are_listed(self, emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
        extremes = (sys.float_info.max, -sys.float_info.max, 5e-324)
        losses(trainer, *extremes)
        for best in extremes:
            with engine.begin() as connection:
                values = {"best_loss": best, "best_score": best}
                connection.execute(update(Run).where(Run.id == trainer.run_id).values(values))
            (row,) = rows(emptied_api)
            assert tuple(row["losses"]) == extremes
            assert (row.get("best_loss"), row.get("best_eval")) == ((0, 0) if best == 5e-324 else (None, None))

    def test_rows_have_at_most_32_points_of_a_long_curve(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin(total=2000)
        events = [("metric", {"step": step, "loss": 1000.0 / step}) for step in range(1, 1001)]
        trainer.mixed(events)
        (row,) = rows(emptied_api)
        assert 16 <= len(row["losses"]) <= 32 and row["losses"] == sorted(row["losses"], reverse=True)
        assert (row["losses"][0], row["losses"][-1]) == (1000.0, 1.0)

    def test_rows_of_fifty_runs_are_small(self, emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
        for number in range(50):
            run = make_run(emptied_api.client, dataset, name=f"docstrings of the standard library, {number:4d}")
            trainer = Trainer(engine, run["id"]).begin(total=1000)
            trainer.mixed([("metric", {"step": step, "loss": 3 / math.sqrt(step)}) for step in range(1, 33)])
            trainer.complete()
        query = {"view": "row", "limit": 50}
        with emptied_api.client.stream("GET", "/v1/runs", params=query) as zipped:
            sent = sum(len(part) for part in zipped.iter_raw())
        answer = emptied_api.client.get("/v1/runs", params=query)
        assert len(answer.json()["data"]) == 50 and all(len(row["losses"]) == 32 for row in answer.json()["data"])
        assert sent <= MOST_BYTES_OF_50 and len(answer.content) <= 1.45 * MOST_BYTES_OF_50, (sent, len(answer.content))

    def test_rows_are_filtered_sorted_and_paged_like_the_list(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        for loss in (2.0, 1.0, 3.0):
            trainer = Trainer(engine, make_run(emptied_api.client, dataset, name=f"loss {loss}")["id"]).begin()
            with engine.begin() as connection:
                connection.execute(update(Run).where(Run.id == trainer.run_id).values(best_loss=loss))
            trainer.complete()
        make_run(emptied_api.client, dataset, name="other")
        queries: tuple[dict[str, Any], ...] = (
            {"sort": "best"}, {"limit": 2}, {"status": "completed"}, {"find": "loss"}, {"search": "los"},
            {"status": ["pending", "failed"]},
        )  # fmt: skip
        for query in queries:
            listed = emptied_api.client.get("/v1/runs", params=query).json()["data"]
            assert [row["id"] for row in rows(emptied_api, **query)] == [run["id"] for run in listed], query
        assert [row.get("best_loss") for row in rows(emptied_api, sort="best")] == [1.0, 2.0, 3.0, None]

    def test_rows_are_counted_by_status_with_the_same_filters(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        experiment = make_experiment(engine)
        Trainer(engine, make_run(emptied_api.client, dataset, experiment_id=experiment)["id"]).begin().complete()
        make_run(emptied_api.client, dataset, tags=["a"], name="one")
        counts = emptied_api.client.get("/v1/runs/counts").json()
        assert counts == {"counts": {"completed": 1, "pending": 1}, "total": 2}
        filters = [
            ("experiment_id", experiment),
            ("tag", "a"),
            ("find", "one"),
            ("search", "ON"),
            ("dataset_id", dataset),
            ("dataset_id", "ds_none"),
            ("method", "dpo"),
            ("base_model", "any"),
        ]
        for name, value in filters:
            query = {name: value}
            listed = emptied_api.client.get("/v1/runs", params=query).json()["data"]
            assert emptied_api.client.get("/v1/runs/counts", params=query).json()["total"] == len(listed), query
        assert emptied_api.client.get("/v1/runs/counts", params={"status": "failed"}).status_code == 422


class TestCurves:
    def test_curves_come_in_the_requested_order_with_epochs_and_times(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainers = []
        for scale in (1.0, 2.0):
            trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
            losses(trainer, scale * 3, scale * 2, scale)
            trainers.append(trainer.complete())
        without = make_run(emptied_api.client, dataset)["id"]
        ids = [trainers[1].run_id, without, trainers[0].run_id]
        curves = emptied_api.client.get("/v1/runs/curves", params={"ids": ",".join(ids)}).json()
        assert [one["run_id"] for one in curves["data"]] == ids
        first, empty, _ = curves["data"]
        assert first["series"]["values"] == [6.0, 4.0, 2.0] and first["epoch"]["values"] == [0.1, 0.2, 0.3]
        assert first["clock"]["steps"] == [1, 3] and first["clock"]["seconds"] == sorted(first["clock"]["seconds"])
        assert empty["series"]["steps"] == empty["clock"]["steps"] == []

    @pytest.mark.parametrize(
        ("ids", "status"), [("", 422), ("run_x", 404), (",".join(f"r{n}" for n in range(21)), 422)]
    )
    def test_curves_of_no_too_many_or_unknown_runs_are_refused(
        self, shared_api: ApiServer, ids: str, status: int
    ) -> None:
        assert shared_api.client.get("/v1/runs/curves", params={"ids": ids}).status_code == status

    def test_say_from_where_a_stream_continues_them(self, emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
        losses(trainer, 3.0, 2.0)
        trainer.log("a line behind them")
        path = f"/v1/runs/{trainer.run_id}"
        read = emptied_api.client.get(f"{path}/metrics", params={"clock": True}).json()
        losses(trainer, 1.0, first=3)
        query = {"after": read["last_seq"], "follow": False, "format": "ndjson", "types": "metric"}
        later = [json.loads(line) for line in emptied_api.client.get(f"{path}/events", params=query).text.splitlines()]
        assert read["series"]["loss"]["steps"] == [1, 2] and [event["step"] for event in later if "step" in event] == [
            3
        ]
        assert read["clock"]["steps"] == [1, 2]


class TestHistory:
    def test_lists_attempts_with_their_hosts_and_outcomes(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
        trainer.retry()
        only = emptied_api.client.get(f"/v1/runs/{trainer.run_id}/attempts").json()["data"][0]
        assert (only["attempt"], only["outcome"], only["worker"], only["start_step"]) == (1, "retried", "test", 0)
        assert only["started_at"] <= only["ended_at"]

    def test_history_has_events_in_order_without_logs_and_metrics_in_backward_pages(
        self, emptied_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
        losses(trainer, 3.0, 2.0)
        trainer.log("a line")
        trainer.events("sample", {"step": 2, "prompt": "2+2=", "completion": "4"})
        trainer.complete()
        path = f"/v1/runs/{trainer.run_id}/history"
        whole = emptied_api.client.get(path).json()
        kinds = [event["type"] for event in whole["data"]]
        assert not {"log", "metric", "progress"} & set(kinds) and {"status", "sample", "end"} <= set(kinds)
        seqs = [event["seq"] for event in whole["data"]]
        assert whole["has_more"] is False and seqs == sorted(seqs)
        pages, before = [], None
        while True:
            query = {"limit": 2} | ({} if before is None else {"before": before})
            page = emptied_api.client.get(path, params=query).json()
            pages = page["data"] + pages
            before = page["data"][0]["seq"]
            if not page["has_more"]:
                break
        assert pages == whole["data"]

    def test_history_has_only_the_requested_types(self, emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
        trainer = Trainer(engine, make_run(emptied_api.client, dataset)["id"]).begin()
        trainer.events("sample", {"step": 2, "prompt": "2+2=", "completion": "4"})
        trainer.complete()
        path = f"/v1/runs/{trainer.run_id}/history"
        chosen = emptied_api.client.get(path, params={"types": "sample,end"}).json()["data"]
        assert [event["type"] for event in chosen] == ["sample", "end"]
        for wrong in ("log", "nothing", ""):
            refused = emptied_api.client.get(path, params={"types": wrong})
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "types"), wrong

    @pytest.mark.parametrize("call", ["attempts", "history", "logs/lines", "logs/search?q=x"])
    def test_history_of_an_unknown_run_is_404(self, shared_api: ApiServer, call: str) -> None:
        assert shared_api.client.get(f"/v1/runs/{new_id('run')}/{call}").json()["code"] == "run_not_found"


def test_every_field_of_a_configuration_is_in_one_group(shared_api: ApiServer) -> None:
    named = [field for fields in GROUPS.values() for field in fields]
    assert sorted(named) == sorted(TrainingConfig.model_fields)
    schema = shared_api.client.get("/v1/config-schema").json()
    assert list(schema["x-groups"]) == list(GROUPS) and set(schema["properties"]) == set(named)
    dpo = schema["x-method-defaults"]["dpo"]
    assert (dpo["adapter"]["learning_rate"], dpo["full"]["learning_rate"]) == (5e-6, 1e-6)
