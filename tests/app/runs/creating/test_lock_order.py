"""Requests that lock several runs do so in one order, newest first, so that none waits for one that waits for it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import OperationalError

from app.infra.storage import Storage
from app.tables.runs import Run
from tests.factories import Trainer, make_dataset, make_experiment, make_run
from tests.server import ApiServer
from tests.waiting import eventually


def train(api: ApiServer, engine: Engine, dataset: str, config: dict[str, Any], **body: Any) -> str:
    """Return the id of a completed run with an output."""
    run_id = make_run(api.client, dataset, config=config, **body)["id"]
    Trainer(engine, run_id).begin().complete().write_output(Storage(api.settings))
    return str(run_id)


def train_pair(api: ApiServer, engine: Engine, **config: Any) -> tuple[str, str]:
    """Return the ids of two such runs, the older one first."""
    dataset = make_dataset(engine, "preference" if config else "chat")
    older, newer = (train(api, engine, dataset, config) for _ in range(2))
    return older, newer


def learn_from(*models: str) -> dict[str, Any]:
    """Return a configuration with these reward models."""
    rewards = [{"type": "model", "model": model} for model in models]
    return {"base_model": "org/model", "method": "rlhf", "rlhf": {"rewards": rewards}}


def is_unlocked(engine: Engine, run_id: str) -> bool:
    with engine.connect() as connection:
        try:
            connection.execute(select(Run.id).where(Run.id == run_id).with_for_update(nowait=True))
        except OperationalError:
            return False
        connection.rollback()
        return True


def request_waits(engine: Engine) -> bool:
    """Return True if a statement waits for a lock, other than the one that stores the estimate of a new run."""
    query = text(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND NOT (query LIKE '%WHERE runs.id = %' AND query LIKE '%FOR KEY SHARE%')"
    )
    with engine.connect() as connection:
        return bool(connection.scalar(query))


def answer_after_waiting_for(
    engine: Engine, newest: str, older: str, send: Callable[[], httpx.Response]
) -> httpx.Response:
    """Send a request while others lock the newest of its runs: it waits, and has not locked the older one."""
    with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
        connection.execute(select(Run.id).where(Run.id == newest).with_for_update())
        answer = pool.submit(send)
        eventually(lambda: request_waits(engine), what="the request waits")
        eventually(lambda: is_unlocked(engine, older), 5, what="the older run is unlocked")
        connection.rollback()
        return answer.result(60)


def test_creation_locks_its_models_newest_first(api: ApiServer, engine: Engine) -> None:
    older, newer = train_pair(api, engine, method="reward")
    body = {"backend": "fake", "dataset_id": make_dataset(engine, "prompt"), "config": learn_from(older, newer)}
    answer = answer_after_waiting_for(engine, newer, older, lambda: api.client.post("/v1/runs", json=body))
    assert answer.status_code == 202, answer.text


def test_resume_locks_its_models_newest_first(api: ApiServer, engine: Engine) -> None:
    older, newer = train_pair(api, engine, method="reward")
    run_id = make_run(api.client, make_dataset(engine, "prompt"), config=learn_from(older, newer))["id"]
    Trainer(engine, run_id).begin().fail()
    path, body = f"/v1/runs/{run_id}/resume", {"from": "start"}
    answer = answer_after_waiting_for(engine, newer, older, lambda: api.client.post(path, json=body))
    assert answer.status_code == 202, answer.text


def test_prediction_locks_its_model_and_its_judge_newest_first(api: ApiServer, engine: Engine) -> None:
    tiny = {"base_model": "tiny", "lora_r": 8}
    model = train(api, engine, make_dataset(engine), {**tiny, "method": "lora"}, backend="celery")
    pairs = make_dataset(engine, "preference", ["prompt", "chosen", "rejected"])
    judge = train(api, engine, pairs, {**tiny, "method": "reward"}, backend="celery")
    config = {"rewards": [{"type": "model", "model": judge}]}
    body = {"model": model, "dataset_id": make_dataset(engine, "prompt", ["prompt"]), "config": config}
    answer = answer_after_waiting_for(engine, judge, model, lambda: api.client.post("/v1/runs/predict", json=body))
    assert answer.status_code == 202, answer.text


def test_deletion_of_an_experiment_locks_its_runs_newest_first(api: ApiServer, engine: Engine) -> None:
    experiment, dataset = make_experiment(engine), make_dataset(engine)
    older, newer = (train(api, engine, dataset, {}, experiment_id=experiment) for _ in range(2))
    path = f"/v1/experiments/{experiment}?cascade=true"
    answer = answer_after_waiting_for(engine, newer, older, lambda: api.client.delete(path))
    assert answer.status_code == 204, answer.text


def test_deletion_of_several_runs_locks_them_newest_first(api: ApiServer, engine: Engine) -> None:
    older, newer = train_pair(api, engine)
    body = {"ids": [older, newer]}
    answer = answer_after_waiting_for(engine, newer, older, lambda: api.client.post("/v1/runs/delete", json=body))
    assert [run["outcome"] for run in answer.json()["runs"]] == ["changed", "changed"], answer.text
