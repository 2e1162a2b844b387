"""Actions over the API: what is accepted, what is refused and why, and what the statements behind it promise."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from app.infra.db import sync_engine
from app.runs.state import machine
from app.runs.state.actions.replay import done_after
from app.runs.state.actions.service import MOST_WAITING
from app.tables.actions import RunAction
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.rows import run_row, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def trainer(shared_api: ApiServer, engine: Engine) -> Trainer:
    """Of a run of 100 steps in 3 epochs, without evaluation data."""
    return Trainer(engine, make_run(shared_api.client, make_dataset(engine))["id"]).begin()


def ask(api: ApiServer, run_id: str, action: str, *, key: str | None = None, **parameters: Any) -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return api.client.post(f"/v1/runs/{run_id}/actions", json={"action": action, **parameters}, headers=headers)


def renewed(engine: Engine, trainer: Trainer) -> Any:
    with engine.begin() as connection:
        return connection.execute(machine.renew(trainer.run_id, trainer.lease_epoch, 600)).one()


def done(engine: Engine, action_id: str, step: int) -> None:
    with engine.begin() as connection:
        values = {"id": action_id, "step": step}
        connection.execute(
            text("UPDATE run_actions SET status = 'done', step = :step, finished_at = now() WHERE id = :id"), values
        )


class TestAnAction:
    def test_actions_wait_in_request_order_and_come_with_the_lease_renewal(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        assert renewed(engine, trainer).actions is None
        actions = [
            ask(shared_api, trainer.run_id, "sample", prompts=["a", "b"], temperature=0),
            ask(shared_api, trainer.run_id, "set_learning_rate", learning_rate=1e-5),
            ask(shared_api, trainer.run_id, "extend", max_steps="4k"),
        ]
        assert [answer.status_code for answer in actions] == [202] * 3
        shown = [answer.json() for answer in actions]
        path = f"/v1/runs/{trainer.run_id}/actions"
        assert actions[0].headers["location"] == f"{path}/{shown[0]['id']}"
        assert all((it["status"], it["step"], it["finished_at"]) == ("waiting", None, None) for it in shown)
        assert [(it["id"], it["action"], it["parameters"]) for it in renewed(engine, trainer).actions] == [
            (shown[0]["id"], "sample", {"prompts": ["a", "b"], "temperature": 0.0, "max_new_tokens": 64}),
            (shown[1]["id"], "set_learning_rate", {"learning_rate": 1e-5}),
            (shown[2]["id"], "extend", {"max_steps": 4000}),
        ]
        page = shared_api.client.get(path, params={"limit": 2}).json()
        assert [it["id"] for it in page["data"]] == [shown[2]["id"], shown[1]["id"]] and page["has_more"]
        rest = shared_api.client.get(path, params={"limit": 2, "after": shown[1]["id"]}).json()
        assert [it["id"] for it in rest["data"]] == [shown[0]["id"]] and not rest["has_more"]
        assert shared_api.client.get(f"{path}/{shown[0]['id']}").json() == shown[0]
        done(engine, shown[0]["id"], 3)
        assert [it["id"] for it in renewed(engine, trainer).actions] == [shown[1]["id"], shown[2]["id"]]

    def test_action_is_audited(self, shared_api: ApiServer, trainer: Trainer) -> None:
        action = ask(shared_api, trainer.run_id, "checkpoint").json()
        (entry,) = shared_api.client.get("/v1/audit", params={"resource": action["id"]}).json()["data"]
        assert (entry["route"], entry["status"]) == ("/v1/runs/{run_id}/actions", 202)

    def test_action_is_created_once_for_an_idempotency_key(self, shared_api: ApiServer, trainer: Trainer) -> None:
        first = ask(shared_api, trainer.run_id, "checkpoint", key="once").json()
        assert ask(shared_api, trainer.run_id, "checkpoint", key="once").json()["id"] == first["id"]
        other = ask(shared_api, trainer.run_id, "checkpoint", key="once", pin=True)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
        trainer.complete()
        again = ask(shared_api, trainer.run_id, "checkpoint", key="once").json()
        assert (again["id"], again["status"]) == (first["id"], "refused")

    def test_action_of_another_or_unknown_run_is_404(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        action_id = ask(shared_api, trainer.run_id, "checkpoint").json()["id"]
        other = make_run(shared_api.client, make_dataset(engine))["id"]
        answer = shared_api.client.get(f"/v1/runs/{other}/actions/{action_id}")
        assert (answer.status_code, answer.json()["code"]) == (404, "action_not_found")
        assert ask(shared_api, "run_none", "checkpoint").json()["code"] == "run_not_found"
        shared_api.client.post(f"/v1/runs/{other}/stop")


class TestRefused:
    @pytest.mark.parametrize(
        ("requested", "field"),
        [
            ({"action": "explode"}, "action"),
            ({}, "action"),
            ({"action": "extend", "max_steps": "4q"}, "max_steps"),
            ({"action": "evaluate"}, "action"),
            ({"action": "checkpoint", "steps": 3}, "steps"),
            ({"action": "set_learning_rate", "learning_rate": 0}, "learning_rate"),
            ({"action": "set_learning_rate", "learning_rate": -1e-4}, "learning_rate"),
            ({"action": "set_learning_rate", "learning_rate": "fast"}, "learning_rate"),
            ({"action": "extend", "max_steps": 100}, "max_steps"),
            ({"action": "extend", "epochs": 3}, "epochs"),
            ({"action": "extend", "epochs": 4, "max_steps": 400}, ""),
            ({"action": "sample", "prompts": []}, "prompts"),
            ({"action": "sample", "prompts": ["x"] * 9}, "prompts"),
            ({"action": "sample", "prompts": ["x" * 3_000] * 3}, ""),
            ({"action": "sample", "prompts": ["x"], "max_new_tokens": 513}, "max_new_tokens"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_invalid_action_is_refused_with_its_field(
        self, shared_api: ApiServer, trainer: Trainer, requested: dict[str, Any], field: str
    ) -> None:
        answer = shared_api.client.post(f"/v1/runs/{trainer.run_id}/actions", json=requested)
        assert answer.status_code == 422, answer.text
        assert field in answer.json()["errors"][0]["field"]

    def test_action_without_a_name_is_refused_with_the_names(self, shared_api: ApiServer, trainer: Trainer) -> None:
        answer = shared_api.client.post(f"/v1/runs/{trainer.run_id}/actions", json={})
        names = "`checkpoint`, `evaluate`, `sample`, `set_learning_rate`, `extend`"
        assert f"`action`: must be one of {names}" in answer.json()["detail"]

    def test_a_rate_that_is_no_finite_number(self, shared_api: ApiServer, trainer: Trainer) -> None:
        raw = b'{"action": "set_learning_rate", "learning_rate": 1e999}'
        path = f"/v1/runs/{trainer.run_id}/actions"
        answer = shared_api.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422)

    def test_a_reward_model_writes_no_samples(self, shared_api: ApiServer, engine: Engine, trainer: Trainer) -> None:
        mark_run(engine, trainer.run_id, config={**run_row(engine, trainer.run_id).config, "method": "reward"})
        answer = ask(shared_api, trainer.run_id, "sample", prompts=["x"])
        assert answer.json()["errors"][0]["code"] == "not_for_this_method"

    @pytest.mark.parametrize("kind", ["scheduler", "optimizer"])
    @pytest.mark.parametrize(
        "requested", [("set_learning_rate", {"learning_rate": 1e-5}), ("extend", {"max_steps": 101})]
    )
    def test_rates_that_a_plugin_makes_are_not_changed(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer, kind: str, requested: tuple[str, dict[str, Any]]
    ) -> None:
        config = {**run_row(engine, trainer.run_id).config, "extra": {kind: {"type": "stairs"}}}
        mark_run(engine, trainer.run_id, config=config)
        answer = ask(shared_api, trainer.run_id, requested[0], **requested[1])
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["code"] == "not_with_a_plugin"
        assert ask(shared_api, trainer.run_id, "checkpoint").status_code == 202

    def test_a_probe_does_nothing_beside(self, shared_api: ApiServer, engine: Engine, trainer: Trainer) -> None:
        mark_run(engine, trainer.run_id, config={**run_row(engine, trainer.run_id).config, "extra": {"probe": True}})
        for requested in ({"action": "checkpoint"}, {"action": "extend", "max_steps": 500}, {"action": "evaluate"}):
            answer = shared_api.client.post(f"/v1/runs/{trainer.run_id}/actions", json=requested)
            assert answer.status_code == 422, answer.text
            assert [one["code"] for one in answer.json()["errors"]] == ["not_for_a_probe"]

    @pytest.mark.parametrize(
        ("requested", "stop", "field"),
        [
            ({"max_steps": 500}, 80, "max_steps"),
            ({"max_steps": 500}, 499, "max_steps"),
            ({"max_steps": 500}, 500, None),
            ({"epochs": 5}, 100, "epochs"),
            ({"epochs": 5}, 101, None),
            # It has taken up another one behind that step, and is meant to go on.
            ({"max_steps": 500}, 10, None),
        ],
    )
    def test_extending_beyond_stop_at_step_is_refused(
        self,
        shared_api: ApiServer,
        engine: Engine,
        trainer: Trainer,
        requested: dict[str, Any],
        stop: int,
        field: str | None,
    ) -> None:
        config = {**run_row(engine, trainer.run_id).config, "stop_at_step": stop}
        mark_run(engine, trainer.run_id, config=config, current_step=10)
        answer = ask(shared_api, trainer.run_id, "extend", **requested)
        if field is None:
            assert answer.status_code == 202, answer.text
            return
        (error,) = answer.json()["errors"]
        assert (error["field"], error["code"]) == (field, "stops_before")
        assert "`stop_at_step`" in error["message"] and str(stop) in error["message"]

    def test_when_the_run_has_ended_is_stopping_or_has_too_much_to_do(
        self, shared_api: ApiServer, trainer: Trainer
    ) -> None:
        for _ in range(MOST_WAITING):
            assert ask(shared_api, trainer.run_id, "checkpoint").status_code == 202
        codes = [ask(shared_api, trainer.run_id, "checkpoint")]
        shared_api.client.post(f"/v1/runs/{trainer.run_id}/stop")
        codes.append(ask(shared_api, trainer.run_id, "checkpoint"))
        trainer.cancel()
        codes.append(ask(shared_api, trainer.run_id, "checkpoint"))
        assert [(answer.status_code, answer.json()["code"]) for answer in codes] == [
            (409, "too_many_waiting"), (409, "run_is_stopping"), (409, "run_has_ended"),
        ]  # fmt: skip
        assert "cancelled" in codes[-1].json()["detail"]


class TestTheEndOfTheRun:
    def test_end_of_the_run_refuses_waiting_actions_with_the_reason(
        self, shared_api: ApiServer, trainer: Trainer
    ) -> None:
        action = ask(shared_api, trainer.run_id, "checkpoint").json()
        trainer.complete()
        left = shared_api.client.get(f"/v1/runs/{trainer.run_id}/actions/{action['id']}").json()
        assert left["status"] == "refused" and left["finished_at"] and "completed" in left["message"]

    def test_end_of_the_run_refuses_an_action_accepted_while_it_waited(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        """The statement that ends the run has begun before the action is committed, and does not see its row."""
        with engine.connect() as accepting:
            accepting.execute(text("SELECT 1 FROM runs WHERE id = :id FOR UPDATE"), {"id": trainer.run_id})
            ending = threading.Thread(target=trainer.complete)
            ending.start()
            eventually(lambda: waiting_for_locks(engine) > 0)
            accepting.execute(
                text("INSERT INTO run_actions (id, run_id, action) VALUES ('act_late', :id, 'checkpoint')"),
                {"id": trainer.run_id},
            )
            accepting.commit()
        ending.join(timeout=30)
        with engine.connect() as connection:
            status = connection.scalar(select(RunAction.status).where(RunAction.id == "act_late"))
        assert (run_row(engine, trainer.run_id).status, status) == ("completed", "refused")

    def test_a_run_that_resumes_it_has_what_was_changed_unless_overridden(
        self, shared_api: ApiServer, engine: Engine, trainer: Trainer
    ) -> None:
        for step, requested in ((10, {"learning_rate": 1e-3}), (20, {"learning_rate": 1e-5})):
            done(engine, ask(shared_api, trainer.run_id, "set_learning_rate", **requested).json()["id"], step)
        done(engine, ask(shared_api, trainer.run_id, "extend", epochs=5).json()["id"], 30)
        ask(shared_api, trainer.run_id, "set_learning_rate", learning_rate=0.5)  # which nobody comes to do
        trainer.checkpoint(40)
        trainer.fail()
        path = f"/v1/runs/{trainer.run_id}/resume"
        children = [
            shared_api.client.post(path, json=body).json()
            for body in ({}, {"config": {"learning_rate": 0.1}}, {"from": "start"})
        ]
        figures = [(run["config"]["learning_rate"], run["config"]["epochs"]) for run in children]
        assert figures == [(1e-5, 5.0), (0.1, 5.0), (2e-4, 3.0)]
        for child in children:
            shared_api.client.post(f"/v1/runs/{child['id']}/stop")


def test_an_attempt_does_again_what_lies_behind_its_checkpoint(
    shared_api: ApiServer, engine: Engine, trainer: Trainer
) -> None:
    action_ids = [ask(shared_api, trainer.run_id, "checkpoint").json()["id"] for _ in range(4)]
    for action_id, step in zip(action_ids, (30, 20, 20), strict=False):  # the last one waits
        done(engine, action_id, step)
    with engine.connect() as connection:
        replayed = [connection.execute(done_after(trainer.run_id, step)).scalar_one() for step in (0, 19, 20, 30)]
    assert [[it["id"] for it in one] for one in replayed] == [
        [action_ids[at] for at in (1, 2, 0)],
        [action_ids[at] for at in (1, 2, 0)],
        [action_ids[0]],
        [],
    ]
    assert replayed[2] == [{"id": action_ids[0], "action": "checkpoint", "parameters": {"pin": False}, "step": 30}]
