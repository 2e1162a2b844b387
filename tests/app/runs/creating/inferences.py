"""Trained runs for tests of evaluations and predictions, and the refusals of both."""

from typing import Any

import httpx
from sqlalchemy import Engine

from app.infra.storage import Storage
from tests.factories import Trainer, make_run
from tests.server import ApiServer


def refused(answer: httpx.Response) -> dict[str, str]:
    """Return the codes of the errors by field."""
    assert answer.status_code == 422, answer.text
    return {error["field"]: error["code"] for error in answer.json()["errors"]}


def train(api: ApiServer, engine: Engine, dataset: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return the ids of a completed run with an output, and of its checkpoint."""
    run_id = make_run(api.client, dataset, config=config, backend="celery", name="mine")["id"]
    trainer = Trainer(engine, run_id).begin()
    saved = trainer.checkpoint(20)
    trainer.complete().write_output(Storage(api.settings))
    return run_id, saved
