"""How a run is asked to stop: the modes, which of two requests is in force, and what the answer says to expect."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.infra.db import sync_engine
from app.runs.state import machine
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.rows import run_row
from tests.server import ApiServer


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def trainer(shared_api: ApiServer, engine: Engine) -> Trainer:
    return Trainer(engine, make_run(shared_api.client, make_dataset(engine))["id"]).begin()


def stop(api: ApiServer, run_id: str, **body: Any) -> dict[str, Any]:
    answer = api.client.post(f"/v1/runs/{run_id}/stop", json=body)
    assert answer.status_code == 202, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


class TestModes:
    @pytest.mark.parametrize(
        ("body", "mode"),
        [
            ({}, "checkpoint"),
            ({"save_checkpoint": True}, "checkpoint"),
            ({"save_checkpoint": False}, "discard"),
            ({"save_checkpoint": False, "mode": "discard"}, "discard"),
            ({"save_checkpoint": True, "mode": "epoch_end"}, "epoch_end"),
        ],
        ids=str,
    )
    def test_stop_mode_is_reported_for_either_request_form(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer, body: dict[str, Any], mode: str
    ) -> None:
        shown = stop(shared_api, trainer.run_id, **body)
        assert (shown["stop_mode"], shown["stop"]["mode"]) == (mode, mode)
        row = run_row(engine, trainer.run_id)
        assert (row.stop_requested_at is None) is (mode == "epoch_end")

    def test_a_deadline_of_the_caller_replaces_the_grace_period(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        usual = shared_api.settings.save_grace_seconds
        assert stop(shared_api, trainer.run_id)["stop"]["grace_seconds"] == usual
        assert stop(shared_api, trainer.run_id, deadline_seconds=900)["stop"]["grace_seconds"] == 900
        assert stop(shared_api, trainer.run_id)["stop"]["grace_seconds"] == 900
        assert run_row(engine, trainer.run_id).stop_grace_seconds == 900

    @pytest.mark.parametrize(
        "body", [{"deadline_seconds": 0}, {"deadline_seconds": 1e9}, {"deadline_seconds": "soon"},
                 {"deadline_seconds": 5, "mode": "epoch_end"}],
    )  # fmt: skip
    def test_a_deadline_that_makes_no_sense_is_refused(
        self, shared_api: ApiServer, trainer: Trainer, body: dict[str, Any]
    ) -> None:
        answer = shared_api.client.post(f"/v1/runs/{trainer.run_id}/stop", json=body)
        assert answer.status_code == 422 and "deadline_seconds" in answer.text

    @pytest.mark.parametrize("mode", ["checkpoint", "epoch_end", "best", "discard"])
    def test_stop_mode_that_contradicts_save_checkpoint_is_refused(
        self, shared_api: ApiServer, trainer: Trainer, mode: str
    ) -> None:
        body = {"mode": mode, "save_checkpoint": mode == "discard"}
        answer = shared_api.client.post(f"/v1/runs/{trainer.run_id}/stop", json=body)
        assert answer.status_code == 422 and "contradicts" in answer.text

    @pytest.mark.parametrize(
        ("first", "then", "in_force"),
        [
            ("epoch_end", "checkpoint", "checkpoint"),
            ("epoch_end", "discard", "discard"),
            ("checkpoint", "epoch_end", "checkpoint"),
            ("checkpoint", "discard", "discard"),
            ("discard", "checkpoint", "discard"),
            ("discard", "epoch_end", "discard"),
        ],
    )
    def test_stop_mode_in_effect_of_two_is_the_one_that_ends_sooner_and_saves_less(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer, first: str, then: str, in_force: str
    ) -> None:
        stop(shared_api, trainer.run_id, mode=first)
        assert stop(shared_api, trainer.run_id, mode=then)["stop"]["mode"] == in_force
        row = run_row(engine, trainer.run_id)
        assert row.stop_requested_at is not None


class TestAtTheEndOfTheEpoch:
    def test_a_run_goes_on_and_may_be_lost_released_and_claimed_meanwhile(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        assert stop(shared_api, trainer.run_id, mode="epoch_end")["status"] == "running"
        again = trainer.retry()
        row = run_row(engine, trainer.run_id)
        assert (row.status, row.attempt, row.stop_mode) == ("initializing", 2, "epoch_end")
        with engine.begin() as connection:
            assert (
                connection.execute(machine.renew(again.run_id, again.lease_epoch, 600)).one().stop_mode == "epoch_end"
            )
        again.begin().cancel()
        row = run_row(engine, trainer.run_id)
        assert (row.status, row.stop_mode) == ("cancelled", "epoch_end") and row.stop_requested_at is not None
        assert stop(shared_api, trainer.run_id, mode="epoch_end")["status"] == "cancelled", "asked again, as ever"

    def test_a_run_that_never_started_ends_at_once(self, shared_api: ApiServer, engine: Engine) -> None:
        waiting = make_run(shared_api.client, make_dataset(engine))["id"]
        assert stop(shared_api, waiting, mode="epoch_end")["status"] == "cancelled"

    def test_epoch_end_stop_leaves_a_requeued_run_pending_and_a_plain_stop_cancels_it(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        with engine.begin() as connection:
            connection.execute(machine.retry(trainer.run_id, trainer.lease_epoch, "lost", 600.0))
        mark_run(engine, trainer.run_id, not_before=text("now() + interval '1 hour'"))
        assert stop(shared_api, trainer.run_id, mode="epoch_end")["status"] == "pending"
        assert stop(shared_api, trainer.run_id)["status"] == "cancelled"

    def test_run_with_epoch_end_stop_may_complete_before_it(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        stop(shared_api, trainer.run_id, mode="epoch_end")
        trainer.complete()
        assert run_row(engine, trainer.run_id).status == "completed"

    def test_nothing_is_cancelled_that_no_one_asked_to_stop(self, trainer: Trainer) -> None:
        with pytest.raises(Exception, match="cancelled_by_stop"):
            trainer.cancel()


class TestWithTheBestCheckpoint:
    def test_best_checkpoint_is_shown_and_used_for_resume(self, shared_api: ApiServer, trainer: Trainer) -> None:
        best = trainer.checkpoint(10, metrics={"eval_loss": 1.0})
        trainer.checkpoint(20, metrics={"eval_loss": 2.0})
        last = trainer.checkpoint(30)
        before = shared_api.client.get(f"/v1/runs/{trainer.run_id}").json()
        assert before["checkpoint_path"].endswith("checkpoint-30")
        shown = stop(shared_api, trainer.run_id, mode="best")
        assert shown["stop"]["mode"] == "best" and "step 10" in shown["stop"]["message"]
        trainer.cancel()
        listed = shared_api.client.get("/v1/runs", params={"limit": 1, "view": "full"}).json()["data"][0]
        run = shared_api.client.get(f"/v1/runs/{trainer.run_id}").json()
        assert listed["checkpoint_path"] == run["checkpoint_path"] == before["checkpoint_path"].replace("-30", "-10")
        path = f"/v1/runs/{trainer.run_id}/resume"
        children = [shared_api.client.post(path, json=body).json() for body in ({}, {"checkpoint_id": last})]
        assert [child["resume_checkpoint_id"] for child in children] == [best, last]
        for child in children:
            stop(shared_api, child["id"])

    def test_best_stop_without_a_best_checkpoint_saves_one_and_says_so(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        trainer.checkpoint(10)
        shown = stop(shared_api, trainer.run_id, mode="best")
        assert shown["stop_mode"] == "checkpoint" and "no best checkpoint" in shown["stop"]["message"].lower().replace(
            "no evaluation has found a best checkpoint", "no best checkpoint"
        )
        assert run_row(engine, trainer.run_id).stop_mode != "discard"

    def test_best_checkpoint_is_ignored_for_a_run_without_checkpoints(
        self, shared_api: ApiServer, engine: Engine
    ) -> None:
        dataset = make_dataset(engine)
        waiting = make_run(shared_api.client, dataset)["id"]
        assert stop(shared_api, waiting, mode="best")["stop"]["message"] == "The run is cancelled."
        loading = make_run(shared_api.client, dataset)["id"]
        Trainer(engine, loading)
        assert "current state" not in stop(shared_api, loading, mode="best")["stop"]["message"]


class TestTheAnswerSays:
    def test_outlook_says_that_the_save_duration_is_unknown(self, shared_api: ApiServer, trainer: Trainer) -> None:
        trainer.checkpoint(10)  # of a worker that did not measure
        reported = stop(shared_api, trainer.run_id)["stop"]
        assert (reported["save_seconds"], reported["grace_suffices"]) == (None, None) and "not known" in reported[
            "message"
        ]

    @pytest.mark.parametrize(("longest", "suffices"), [(2.9, True), (3.1, False)])
    def test_how_long_the_slowest_of_the_last_took_and_whether_the_grace_suffices(
        self, shared_api: ApiServer, trainer: Trainer, longest: float, suffices: bool
    ) -> None:
        for step, seconds in enumerate([99.0, 1.0, 1.0, longest, 1.0, 1.0], 1):
            trainer.checkpoint(step, save_seconds=seconds)
        reported = stop(shared_api, trainer.run_id)["stop"]
        assert (reported["save_seconds"], reported["grace_seconds"], reported["grace_suffices"]) == (
            longest,
            6.0,
            suffices,
        )
        assert ("step 6" in reported["message"] and "ANNEAL_LEASE_SECONDS" in reported["message"]) is not suffices

    def test_nothing_of_a_grace_when_nothing_is_saved(self, shared_api: ApiServer, trainer: Trainer) -> None:
        trainer.checkpoint(10, save_seconds=100.0)
        reported = stop(shared_api, trainer.run_id, mode="discard")["stop"]
        assert reported["grace_suffices"] is None and "saves nothing" in reported["message"]

    def test_outlook_says_that_an_earlier_stop_stands(self, shared_api: ApiServer, trainer: Trainer) -> None:
        trainer.checkpoint(10, metrics={"eval_loss": 1.0})
        stop(shared_api, trainer.run_id)
        reported = stop(shared_api, trainer.run_id, mode="best")["stop"]
        assert reported["mode"] == "checkpoint" and "remains in effect" in reported["message"]

    def test_outlook_says_that_a_waiting_run_saves_nothing(self, shared_api: ApiServer, engine: Engine) -> None:
        dataset = make_dataset(engine)
        run_id = make_run(shared_api.client, dataset)["id"]
        Trainer(engine, run_id)
        reported = stop(shared_api, run_id)["stop"]
        assert reported["grace_suffices"] is None and "nothing to save" in reported["message"]
