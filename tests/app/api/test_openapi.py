"""Every call of the API has an example, and the example works: sent as it stands, it is answered as documented."""

import gzip
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.storage import Storage
from app.main import create_app
from app.openai.ids import to_openai_id
from tests.factories import Trainer, make_experiment, make_model
from tests.openai.serving import serving
from tests.rows import add_worker
from tests.server import ApiServer

_PATHS_OF_THINGS = (
    "/v1/runs", "/v1/experiments", "/v1/datasets", "/v1/checkpoints", "/openai/v1/files", "/openai/v1/fine_tuning",
    "/openai/v1/chat", "/openai/v1/completions",
)  # fmt: skip
_ID = re.compile(r"\b(exp_|ds_|run_|ckpt_|file-)[0-9a-z]{26}\b")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings = Settings(database_url="postgresql://nobody@localhost/none", redis_url="redis://localhost")
    return create_app(settings).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of each call."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    make_model(shared_api.settings, "my-model")
    yield engine
    engine.dispose()


class Things:
    """What there is for one call to meet, of each kind."""

    def __init__(self, api: ApiServer, engine: Engine) -> None:
        self._api = api
        rows = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        self.dataset = api.client.post("/v1/datasets", files={"file": ("rows.jsonl", rows)}).json()["id"]
        self.experiment = make_experiment(engine)
        for left in api.client.get("/v1/runs?status=pending").json()["data"]:
            api.client.post(f"/v1/runs/{left['id']}/stop")
        ended = self._run()
        trainer = Trainer(engine, ended).begin()
        trainer.log("a line")
        trainer.metric(1, loss=1.0)
        self.checkpoint = trainer.checkpoint(40)
        storage = Storage(api.settings)
        storage.named_checkpoint(ended, 1, "checkpoint-40").mkdir(parents=True)
        (storage.attempt_dir(ended, 1) / "metrics.jsonl").write_text("")
        (storage.attempt_dir(ended, 1) / "log.txt.gz").write_bytes(gzip.compress(b""))
        trainer.cancel_on_request().write_output(Storage(api.settings))
        self.ended, self.waiting = ended, self._run()

    def _run(self, **body: Any) -> str:
        config = {"base_model": "my-model", "max_steps": 80}
        answer = self._api.client.post(
            "/v1/runs", json={"dataset_id": self.dataset, "experiment_id": self.experiment, "config": config, **body}
        )
        assert answer.status_code == 202, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    def fill(self, value: Any) -> Any:
        """The example, about things that there are."""
        first = iter([self.ended, self.waiting])
        ids = {"exp_": lambda: self.experiment, "ds_": lambda: self.dataset, "ckpt_": lambda: self.checkpoint,
               "run_": lambda: next(first), "file-": lambda: to_openai_id(self.dataset)}  # fmt: skip
        return json.loads(_ID.sub(lambda match: ids[match[1]](), json.dumps(value)))


def _example(document: dict[str, Any], content: dict[str, Any]) -> Any:
    if "example" in content:
        return content["example"]
    for option in content["schema"].get("anyOf", [content["schema"]]):
        name = option.get("$ref", "").rpartition("/")[2]
        schema = document["components"]["schemas"].get(name, option)
        if "example" in schema:
            return schema["example"]
    return None


def test_every_request_and_response_body_has_an_example(document: dict[str, Any], subtests: pytest.Subtests) -> None:
    for method, path, operation in operations(document):
        with subtests.test(method=method, path=path):
            assert operation.get("summary") or operation.get("description")
            contents = operation.get("requestBody", {}).get("content", {})
            lacking = [kind for kind, content in contents.items() if _example(document, content) is None]
            for status, response in operation["responses"].items():
                if status < "300":
                    answered = response.get("content", {}).get("application/json")
                    if answered is not None and _example(document, answered) is None:
                        lacking.append(status)
            for parameter in operation.get("parameters", []):
                if parameter["required"] and parameter["in"] == "query" and not parameter["schema"].get("examples"):
                    lacking.append(parameter["name"])
            assert lacking == []


def test_the_example_of_a_call_is_answered_with_success(
    shared_api: ApiServer, engine: Engine, document: dict[str, Any], subtests: pytest.Subtests
) -> None:
    read_only = Things(shared_api, engine)
    for method, path, operation in operations(document):
        with subtests.test(method=method, path=path):
            _send_example(shared_api, engine, document, read_only, method, path, operation)
        if path == "/v1/queue/pause":
            shared_api.client.post("/v1/queue/resume")  # the examples that follow are about runs that start


def _send_example(
    shared_api: ApiServer,
    engine: Engine,
    document: dict[str, Any],
    read_only: Things,
    method: str,
    path: str,
    operation: dict[str, Any],
) -> None:
    """Send the example of a call and check the answer; calls that change none of them share `read_only`."""
    reads = method == "get" and not path.endswith(("/postmortem", "/secrets")) and "/actions" not in path
    changes = not reads and path.startswith(_PATHS_OF_THINGS)
    things = Things(shared_api, engine) if changes else read_only
    if method == "delete" and ("dataset" in path or "/files/" in path):
        unused = shared_api.client.post("/v1/datasets", files={"file": ("rows.jsonl", b'{"text": "a"}\n')})
        things.dataset = unused.json()["id"]
    if "secrets" in path:
        shared_api.client.put("/v1/secrets/hf_token", json={"value": "hf_example"})
    key = action_id = webhook_id = delivery_id = ""
    if "{webhook_id}" in path:
        hook = {"url": "https://hooks.invalid/hook", "format": "openai" if "webhook_endpoints" in path else "standard"}
        webhook_id = shared_api.client.post("/v1/webhooks", json=hook).json()["id"]
        delivery_id = shared_api.client.post(f"/v1/webhooks/{webhook_id}/test").json()["id"]
    if "{key_id}" in path:
        key = shared_api.client.post("/v1/keys", json={"name": "example"}).json()["id"]
    if "{action_id}" in path:
        action_id = shared_api.client.post(f"/v1/runs/{things.waiting}/actions", json={"action": "checkpoint"}).json()[
            "id"
        ]
    if path.endswith(("/stop", "/cancel", "/pause")) or "/actions" in path:
        things.ended = things.waiting
    if path == "/openai/v1/webhook_endpoints/{webhook_id}/test":
        return  # it needs a receiver: tests/openai/test_webhooks.py
    if path.endswith("/postmortem"):
        Trainer(engine, things.waiting).begin().fail()
        things.ended = things.waiting
    if method == "delete":
        shared_api.client.post(f"/v1/runs/{things.waiting}/stop")
    if (method, path) == ("post", "/v1/session"):
        reader_key = shared_api.key_with(["read"])
        with shared_api.client_with(None) as browser:
            assert browser.post(path, json={"key": reader_key}).status_code == 201
        return  # the key of the example is none
    if path.endswith("/completions"):
        shared_api.client.post(f"/v1/runs/{things.waiting}/stop")
        body = things.fill(_example(document, operation["requestBody"]["content"]["application/json"]))
        _ask_example(shared_api, engine, path, body)
        return
    name = "hf_token" if "secrets" in path else "celery"
    values = {
        "experiment_id": things.experiment, "dataset_id": things.dataset, "run_id": things.ended, "name": name,
        "checkpoint_id": things.checkpoint, "action_id": action_id, "key_id": key, "attempt": 1,
        "webhook_id": webhook_id, "delivery_id": delivery_id, "model": "my-model",
        "file_id": to_openai_id(things.dataset), "job_id": to_openai_id(things.ended),
        "path": "metrics.jsonl" if "/attempts/" in path else "adapter_config.json",
    }  # fmt: skip
    parameters = operation.get("parameters", [])
    query = {one["name"]: things.fill(one["schema"]["examples"][0]) for one in parameters
             if one["in"] == "query" and one["required"]}  # fmt: skip
    if method == "delete" and "experiment" in path:
        query = {"cascade": "true"}  # it has runs
    if path == "/v1/events":
        query = {"follow": "false"}  # it would never end
    contents = operation.get("requestBody", {}).get("content", {})
    address = path.format(**values)
    if "multipart/form-data" in contents:
        fields = dict(contents["multipart/form-data"]["example"])
        files = {"file": ("rows.jsonl", fields.pop("file").encode())}
        answer = shared_api.client.request(method, address, files=files, data=fields)
    elif "application/json" in contents:
        answer = shared_api.client.request(
            method, address, json=things.fill(_example(document, contents["application/json"]))
        )
    else:
        answer = shared_api.client.request(method, address, params=query)
    assert 200 <= answer.status_code < 300, answer.text
    assert str(answer.status_code) in operation["responses"]


def _ask_example(api: ApiServer, engine: Engine, path: str, body: Any) -> None:
    """Send a question, and answer it as the process of its serving run."""
    add_worker(engine, backends=["celery"], memory_mb=[100_000])
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(api.client.post, path, json=body)
        with serving(api, engine) as process:
            process.write(process.next_question(), "x")
            answer = sent.result(timeout=30)
        process.trainer.complete()
    assert answer.status_code == 200, answer.text
