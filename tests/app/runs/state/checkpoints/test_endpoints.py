"""Checkpoints over the API: those whose files are there."""

import pytest
from sqlalchemy import Engine, func

from app.config import Settings
from app.infra.ids import new_id
from tests.factories import Trainer, make_dataset, make_run, mark_checkpoint
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def trainer(api: ApiServer, engine: Engine) -> Trainer:
    return Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()


class TestCheckpoints:
    def test_checkpoints_are_listed_newest_first_in_pages(self, api: ApiServer, trainer: Trainer) -> None:
        checkpoints = [trainer.checkpoint(step) for step in (10, 20, 30)]
        path = f"/v1/runs/{trainer.run_id}/checkpoints"
        page = api.client.get(path, params={"limit": 2}).json()
        assert [it["id"] for it in page["data"]] == [checkpoints[2], checkpoints[1]] and page["has_more"]
        rest = api.client.get(path, params={"limit": 2, "after": checkpoints[1]}).json()
        assert [it["id"] for it in rest["data"]] == [checkpoints[0]] and not rest["has_more"]

    def test_report_what_they_hold(self, api: ApiServer, trainer: Trainer) -> None:
        checkpoint = trainer.checkpoint(40, kind="best")
        read = api.client.get(f"/v1/runs/{trainer.run_id}/checkpoints/{checkpoint}").json()
        assert (read["step"], read["epoch"], read["kind"], read["bytes"]) == (40, 0.4, "best", 10)
        assert (read["metrics"], read["name"], read["attempt"]) == ({"loss": 1.5}, "checkpoint-40", 1)
        assert read["created_at"].endswith("Z") and read["bad_reason"] is None

    @pytest.mark.parametrize("name", ["eval_loss", "eval_reward"])
    def test_the_best_of_the_good_ones_is_marked(
        self, api: ApiServer, engine: Engine, trainer: Trainer, name: str
    ) -> None:
        checkpoints = [
            trainer.checkpoint(step, metrics={name: value}) for step, value in ((10, 3.0), (20, 2.0), (30, 4.0))
        ]
        trainer.checkpoint(40)
        path = f"/v1/runs/{trainer.run_id}/checkpoints"
        best, second = checkpoints[1 if name == "eval_loss" else 2], checkpoints[0]
        assert [it["id"] for it in api.client.get(path).json()["data"] if it["is_best"]] == [best]
        assert api.client.get(f"{path}/{best}").json()["is_best"]
        mark_checkpoint(engine, best, bad_reason="weights have another hash")
        left = [it["id"] for it in api.client.get(path).json()["data"] if it["is_best"]]
        assert left == [second]

    def test_deleted_ones_are_gone_and_damaged_ones_say_why(
        self, api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        gone, bad = trainer.checkpoint(10), trainer.checkpoint(20)
        mark_checkpoint(engine, gone, deleted_at=func.now())
        mark_checkpoint(engine, bad, bad_reason="weights have another hash")
        path = f"/v1/runs/{trainer.run_id}/checkpoints"
        (left,) = api.client.get(path).json()["data"]
        assert (left["id"], left["bad_reason"]) == (bad, "weights have another hash")
        assert api.client.get(f"{path}/{gone}").status_code == 404
        assert api.client.get(f"/v1/runs/{trainer.run_id}").json()["checkpoint_path"] is None

    def test_checkpoint_of_another_or_unknown_run_is_404(
        self, api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        checkpoint = trainer.checkpoint(10)
        other = make_run(api.client, make_dataset(engine))["id"]
        for path in (
            f"/v1/runs/{other}/checkpoints/{checkpoint}",
            f"/v1/runs/{trainer.run_id}/checkpoints/{new_id('ckpt')}",
            f"/v1/runs/{trainer.run_id}/checkpoints/checkpoint-10",
        ):
            answer = api.client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "checkpoint_not_found")
        assert api.client.get(f"/v1/runs/{new_id('run')}/checkpoints").json()["code"] == "run_not_found"
