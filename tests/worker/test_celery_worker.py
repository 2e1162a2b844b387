"""A worker goes on claiming runs whatever lies in its queue: anything that reaches Redis may write there."""

import base64
import json
from typing import Any

import pytest

from app.infra.broker import CONTROL_CHANNEL, QUEUE, TASK
from tests.stack import Stack
from tests.waiting import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    yield stack
    stack.close()


def message(name: str = "", value: Any = None) -> dict[str, Any]:
    """A hint as Celery writes it, with one of its fields replaced."""
    properties: dict[str, Any] = {
        "correlation_id": "1",
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": QUEUE},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": "1",
    }
    fields: dict[str, Any] = {
        "body": base64.b64encode(b"[[], {}, {}]").decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": TASK, "id": "1"},
        "properties": properties,
    }
    (properties if name in properties else fields)[name] = value
    return fields


def headers(**values: Any) -> dict[str, Any]:
    return message("headers", values)


ODD = ["a", "list"]
MALFORMED: list[Any] = [
    b"no JSON", b"\xff\xfe", b"[]", b"{}", b"null", b'{"properties": {}}', b"[" * 100_000, message("body", "no base64"),
    message("body", 3), message("body_encoding", []), message("delivery_tag", ODD), message("delivery_info"),
    message("headers", ODD), headers(task=ODD), headers(task=TASK), headers(task="unknown"),
    headers(task=TASK, id="1", expires="never"), headers(task=TASK, id="1", eta={}), headers(task=TASK, id=ODD),
    headers(task=TASK, id="1", retries="x", timelimit=3), message("content-type", "application/x-python-serialize"),
    message("body", base64.b64encode(b'[["an argument"], {}, {}]').decode()),
]  # fmt: skip


def test_malformed_messages_are_dropped(stack: Stack) -> None:
    worker = stack.add_worker()
    with stack.redis() as redis:
        for _ in range(2):
            redis.lpush(QUEUE, *(one if isinstance(one, bytes) else json.dumps(one) for one in MALFORMED))
            redis.publish(CONTROL_CHANNEL, b"\xff\xfe")
        eventually(lambda: redis.llen(QUEUE) == 0 or worker.process.poll() is not None, what="the queue is read")
    assert worker.process.poll() is None, worker.log.read_text()[-3000:]
    run_id = stack.create({"steps": 100_000, "step_seconds": 0.02})
    stack.until_step(run_id, 1)
    stack.stop(run_id)
    stack.until(run_id, "cancelled")
    lines = worker.log.read_text()
    assert "is dropped" in lines and "Exception in thread" not in lines


def test_an_error_of_the_server_ends_no_worker(stack: Stack) -> None:
    """As of one that is read-only while another one takes over."""
    worker = stack.workers[0]
    with stack.redis() as redis:
        redis.set(QUEUE, "no list")
        eventually(lambda: "ResponseError" in worker.log.read_text() or worker.process.poll() is not None)
        redis.delete(QUEUE)
    run_id = stack.create({"steps": 1})
    stack.until(run_id, "completed")
    assert worker.process.poll() is None
