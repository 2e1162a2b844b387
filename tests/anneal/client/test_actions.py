"""Actions from Python and from a shell, and modes of a stop."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from anneal.client import client
from anneal.contracts.events import ActionEvent
from app.infra.db import sync_engine
from app.tables.actions import RunAction
from tests.conftest import Anneal
from tests.factories import Trainer
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def trainer(anneal: Anneal, engine: Engine, run_file: Path) -> Trainer:
    """A run that trains, the only one that waited."""
    for other in json.loads(anneal("runs", "list", "--status", "pending", "--json").stdout)["data"]:
        anneal("runs", "stop", other["id"])
    run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    return Trainer(engine, run_id).begin(total=100)


def answer(trainer: Trainer, status: str, message: str | None = None, **result: Any) -> None:
    """What the run's worker does once it has heard of an action."""

    def waiting() -> Any:
        with trainer.engine.connect() as connection:
            query = select(RunAction).where(RunAction.run_id == trainer.run_id, RunAction.status == "waiting")
            return connection.execute(query).one_or_none()

    action = eventually(waiting)
    values = {"id": action.id, "status": status, "message": message, "result": json.dumps(result)}
    with trainer.engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE run_actions SET status = :status, step = 3, message = :message, "
                "result = cast(:result AS jsonb), finished_at = now() WHERE id = :id"
            ),
            values,
        )
    about = {"action_id": action.id, "action": action.action, "step": 3, "status": status}
    trainer.events("action", {**about, "result": result, "message": message})


class TestFromAShell:
    def test_an_action_is_asked_for_and_its_answer_waited_for(self, anneal: Anneal, trainer: Trainer) -> None:
        samples = [{"prompt": "why", "completion": "because it is so"}]
        worker = threading.Thread(target=answer, args=(trainer, "done"), kwargs={"samples": samples})
        worker.start()
        shown = anneal("actions", "sample", "-p", "why", "--tokens", "8", "--wait", trainer.run_id).stdout
        worker.join()
        assert "> why\nbecause it is so" in shown and "step" in shown
        listed = json.loads(anneal("actions", "list", trainer.run_id, "--json").stdout)["data"]
        assert [(one["action"], one["status"]) for one in listed] == [("sample", "done")]
        assert listed[0]["parameters"] == {"prompts": ["why"], "max_new_tokens": 8, "temperature": 1.0}

    def test_a_long_cell_of_a_list_is_cut(self, anneal: Anneal, trainer: Trainer) -> None:
        anneal("actions", "sample", "-p", "x" * 3000, trainer.run_id)
        assert max(map(len, anneal("actions", "list", trainer.run_id).stdout.splitlines())) < 250
        assert "x" * 3000 in anneal("actions", "list", trainer.run_id, "--json").stdout

    def test_refused_action_exits_with_code_1(self, anneal: Anneal, trainer: Trainer) -> None:
        worker = threading.Thread(target=answer, args=(trainer, "refused", "It has 400 steps already."))
        worker.start()
        shown = anneal("actions", "extend", "--max-steps", "300", "--wait", trainer.run_id, code=1).stdout
        worker.join()
        assert "refused" in shown and "It has 400 steps already." in shown
        assert "no evaluation data" in anneal("actions", "evaluate", trainer.run_id, code=1).stderr
        assert "--epochs" in anneal("actions", "extend", trainer.run_id, code=2).stderr

    def test_action_without_wait_prints_its_id(self, anneal: Anneal, trainer: Trainer) -> None:
        for words in (["checkpoint", "--pin", trainer.run_id], ["set-learning-rate", trainer.run_id, "1e-4"]):
            action_id = anneal("actions", *words).stdout.strip()
            assert "waiting" in anneal("actions", "show", trainer.run_id, action_id).stdout
        trainer.complete()
        shown = json.loads(anneal("actions", "show", trainer.run_id, action_id, "--json").stdout)
        assert (shown["parameters"], shown["status"]) == ({"learning_rate": 1e-4}, "refused")

    def test_a_stop_reports_its_mode_and_what_to_expect(self, anneal: Anneal, trainer: Trainer) -> None:
        assert "end of its epoch" in anneal("runs", "stop", "--mode", "epoch_end", trainer.run_id).stdout
        assert "contradicts" in anneal("runs", "stop", "--mode", "best", "--no-save", trainer.run_id, code=2).stderr
        assert "saves nothing" in anneal("runs", "stop", "--no-save", trainer.run_id).stdout


class TestFromPython:
    def test_actions_are_created_listed_and_followed(self, shared_api: ApiServer, trainer: Trainer) -> None:
        with client.Anneal(url=shared_api.url, api_key=shared_api.key) as anneal:
            first = anneal.actions.create(trainer.run_id, "checkpoint", pin=True, idempotency_key="once")
            assert anneal.actions.create(trainer.run_id, "checkpoint", pin=True, idempotency_key="once") == first
            second = anneal.actions.create(trainer.run_id, {"action": "extend", "max_steps": 500})
            assert [it.id for it in anneal.actions.list(trainer.run_id)] == [second.id, first.id]
            assert anneal.actions.get(trainer.run_id, second.id).parameters == {"max_steps": 500}
            about = {"action_id": first.id, "action": "checkpoint", "step": 7, "status": "done", "message": None}
            trainer.events("action", {**about, "result": {"pinned": True}})
            (event,) = [it for it in anneal.runs.events(trainer.run_id, follow=False) if it.type == "action"]
            assert isinstance(event, ActionEvent) and (event.step, event.result) == (7, {"pinned": True})
            stopped = anneal.runs.stop(trainer.run_id, mode="epoch_end")
            assert (stopped.status, stopped.stop.mode, stopped.stop.grace_seconds) == ("running", "epoch_end", 6.0)
            assert anneal.runs.stop(trainer.run_id, save_checkpoint=False).stop_mode == "discard"
