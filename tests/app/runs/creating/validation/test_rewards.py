"""Promises about rewards in requests: errors at their place, and a pattern costs the service no time of its own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.runs.creating.validation import rewards
from tests.factories import make_dataset
from tests.server import ApiServer

SLOW = r"[ -\uffff]"
"""Takes about 5 ms to compile after `(?i)`."""


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


def _body(dataset: str, *terms: dict[str, Any]) -> dict[str, Any]:
    return {"dataset_id": dataset, "config": {"base_model": "x", "method": "rlhf", "rlhf": {"rewards": [*terms]}}}


def _errors(answer: httpx.Response) -> dict[str, tuple[str, str]]:
    """Code and sentence of the errors of rewards, by place."""
    errors_by_field = {error["field"]: (error["code"], error["message"]) for error in answer.json()["errors"]}
    return {name: error for name, error in errors_by_field.items() if name.startswith("config.rlhf.rewards")}


def test_each_is_reported_at_its_place_with_the_others(emptied_api: ApiServer, dataset: str) -> None:
    terms: list[dict[str, Any]] = [
        {"type": "regex", "pattern": r"\d+"}, {"type": "regex", "pattern": "(a"},
        {"type": "exact_match", "extract": "*"}, {"type": "json_schema", "schema": {"type": "text"}},
        {"type": "regex", "pattern": "("}, {"type": "format"}, {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "numeric_match", "extract": "x{e}"},
    ]  # fmt: skip
    for call, status in (("/v1/runs", 422), ("/v1/runs/validate", 200), ("/v1/runs/estimate", 422)):
        answer = emptied_api.client.post(call, json=_body(dataset, *terms))
        assert answer.status_code == status, answer.text
        problems = _errors(answer)
        assert {name.removeprefix("config.rlhf.rewards."): code for name, (code, _) in problems.items()} == {
            "1.pattern": "bad_pattern", "2.extract": "bad_pattern", "3.schema": "bad_schema",
            "4.pattern": "bad_pattern", "5.sections": "missing", "7.extract": "bad_pattern",
        }  # fmt: skip
        assert problems["config.rlhf.rewards.1.pattern"][1].startswith(
            "`rlhf.rewards.1.pattern` is not a valid regular"
        )
        assert all(message.endswith(".") for _, message in problems.values())
    assert _errors(emptied_api.client.post("/v1/runs/validate", json=_body(dataset, terms[0], terms[6]))) == {}


def test_patterns_that_take_long_to_compile_hold_up_nobody(
    emptied_api: ApiServer, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests at once, as in an attack that took 7.7 seconds of the service for each of them."""
    monkeypatch.setattr(rewards, "_PROCESSOR_SECONDS", 0.2)
    long = {"type": "json_schema", "schema": {"pattern": f"(?i){SLOW * 390}"}}
    slow = {"type": "regex", "pattern": f"(?i){SLOW * 99}"}
    spent = psutil.Process().cpu_times().user
    with ThreadPoolExecutor(8) as pool, emptied_api.client_with(emptied_api.key) as other:
        sent = [
            pool.submit(emptied_api.client.post, "/v1/runs", json=_body(dataset, term)) for term in [long, slow] * 4
        ]
        waits = []
        while not all(answer.done() for answer in sent):
            began = time.monotonic()
            assert other.get("/v1/runs").status_code == 200
            waits.append(time.monotonic() - began)
    answers = [answer.result() for answer in sent]
    assert {answer.status_code for answer in answers} == {422}
    assert "too long" in _errors(answers[0])["config.rlhf.rewards.0.schema"][1]
    code, message = _errors(answers[1])["config.rlhf.rewards.0.pattern"]
    assert code == "bad_pattern" and "takes more than 0.2 seconds" in message
    assert max(waits) < 5
    assert psutil.Process().cpu_times().user - spent < 5  # the server is a thread of this process


def test_reward_check_without_a_free_thread_is_503_with_retry_after(
    emptied_api: ApiServer, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "_QUEUE_SECONDS", 0.2)
    done = threading.Event()
    for _ in range(2):
        rewards._POOL.submit(done.wait, 30)
    try:
        answer = emptied_api.client.post("/v1/runs/validate", json=_body(dataset, {"type": "regex", "pattern": "a"}))
        assert (answer.status_code, answer.json()["code"]) == (503, "too_many_checks")
        assert int(answer.headers["Retry-After"]) > 0
        others = emptied_api.client.post("/v1/runs/validate", json=_body(dataset, {"type": "length", "max": 9}))
        assert others.status_code == 200
    finally:
        done.set()
