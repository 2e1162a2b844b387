"""Fuzzing campaign: schemathesis cases from the OpenAPI document, most of them with ids of existing objects."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyStrategyDefinition, Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.infra.storage import Storage
from tests.factories import Trainer, make_model
from tests.fuzz.pool import Pool
from tests.stack import Stack

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
PASSES = 4
"""Number of passes over all calls, so that calls meet objects created by others."""
SEQUENCES = 0.1
"""Fraction of the cases in stateful sequences."""
STEPS = 8
SEQUENCES_AT_ONCE = 10
SECONDS = 30
_ROWS = b'{"text": "one"}\n{"text": "two"}\n'
_SUPPRESSED = list(HealthCheck)


@dataclass
class Result:
    """Result of a campaign."""

    by_call: dict[str, Counter[int]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    sequences: int = 0

    @property
    def cases(self) -> int:
        """Number of cases."""
        return sum(statuses.total() for statuses in self.by_call.values())

    @property
    def share_of_successes(self) -> float:
        """Fraction of the cases that returned 2xx."""
        return self._count(200, 300) / max(self.cases, 1)

    @property
    def server_errors(self) -> int:
        """Number of cases that returned 5xx."""
        return self._count(500, 600)

    @property
    def never_answered(self) -> list[str]:
        """Calls that never returned 2xx."""
        return [call for call, statuses in self.by_call.items() if not any(200 <= one < 300 for one in statuses)]

    def _count(self, low: int, high: int) -> int:
        return sum(n for statuses in self.by_call.values() for one, n in statuses.items() if low <= one < high)


class Campaign:
    """Campaign against one service."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.result = Result()
        self._stack = stack
        self._seed = seed
        self._chance = random.Random(seed)
        self._pool = Pool(self._chance)
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {stack.api.key}"
        document = stack.client.get("/openapi.json").json()
        self._document = document
        self._schema = schemathesis.openapi.from_dict(document)
        self._operations = [found.ok() for found in self._schema.get_all_operations()]
        for operation in self._operations:
            self.result.by_call[operation.label] = Counter()
        self._kept_run = ""
        self._trained_run, self._trained_checkpoint, self._trained_action = self._train_something()

    def run(self, cases: int) -> Result:
        """Send at least `cases` requests, and return the result."""
        each = max(1, round(cases * (1 - SEQUENCES) / len(self._operations) / PASSES)) + 1
        for number in range(PASSES):
            order = list(self._operations)
            self._chance.shuffle(order)
            for operation in order:
                self._keep_something()
                # One case in four is invalid on purpose.
                self._generate(operation, GenerationMode.POSITIVE, each - each // 4, number)
                self._generate(operation, GenerationMode.NEGATIVE, each // 4, number)
            print(f"pass {number + 1} of {PASSES}: {self.result.cases:,} cases", flush=True)
        before = self.result.cases
        random.seed(self._seed)  # Hypothesis derives its own seed from it
        while self.result.sequences < cases * SEQUENCES or self.result.cases < cases:
            self._sequences()
            self.result.sequences = self.result.cases - before
        return self.result

    def _generate(self, operation: Any, mode: GenerationMode, count: int, number: int) -> None:
        if count < 1:
            return

        @seed(self._seed * 100 + number)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=_SUPPRESSED
        )
        @given(case=operation.as_strategy(mode))
        def send(case: Case) -> None:
            self._lead(case, mode is GenerationMode.POSITIVE)
            self._send(case)

        try:
            send()
        except Unsatisfiable:
            # A call without input has no invalid cases; every other call must have cases.
            if mode is GenerationMode.POSITIVE:
                raise

    def _lead(self, case: Case, towards_success: bool) -> None:
        """Insert ids of existing objects into a case, and often replace its body by the documented example."""
        for name in list(case.path_parameters or {}):
            picked = self._pool.pick(name)
            if picked and self._chance.random() < 0.8:
                case.path_parameters[name] = picked
        for name in ("checkpoint_id", "action_id"):
            if name in (case.path_parameters or {}) and self._chance.random() < 0.8:
                case.path_parameters["run_id"] = self._pool.of_run.get(case.path_parameters[name], self._kept_run)
        of_an_output = ("artifacts", "artifacts.tar", "artifacts/{path}", "postmortem")
        if case.path.endswith(of_an_output) and self._chance.random() < 0.6:
            case.path_parameters["run_id"] = self._kept_run
            if "path" in case.path_parameters:
                case.path_parameters["path"] = "fake_model.json"
        if case.path.endswith(("/export", "/attempts/{attempt}/artifacts/{path}")) and self._chance.random() < 0.6:
            values = {
                "run_id": self._trained_run, "checkpoint_id": self._trained_checkpoint, "attempt": 1,
                "path": "metrics.jsonl",
            }  # fmt: skip
            case.path_parameters.update({name: values[name] for name in case.path_parameters})
        if case.path.endswith("/actions/{action_id}") and self._chance.random() < 0.6:
            case.path_parameters.update(run_id=self._trained_run, action_id=self._trained_action)
        if case.path.endswith("/backends/{name}") and self._chance.random() < 0.5:
            case.path_parameters["name"] = self._chance.choice(["celery", "fake"])
        if case.path.endswith("/keys/{key_id}"):  # the others that exist include the campaign's own
            created = self._stack.client.post("/v1/keys", json={"name": "fuzz", "scopes": ["read"]})
            case.path_parameters["key_id"] = created.json()["id"]
        if case.path.endswith("/secrets/{name}") and self._chance.random() < 0.6:
            case.path_parameters["name"] = self._chance.choice(["hf_token", "wandb_token"])
        if "{delivery_id}" in case.path and self._chance.random() < 0.6:
            case.path_parameters.update(self._send_a_test())
        if case.path.endswith("/stop") and self._chance.random() < 0.4:
            case.path_parameters["run_id"] = self._stack.create({"steps": 1000})
        for name in list(case.query or {}):
            picked = self._pool.pick(name)
            if picked and self._chance.random() < 0.7:
                case.query[name] = picked
        if towards_success and self._chance.random() < 0.6:
            self._lead_query(case)
            self._lead_body(case)
        if case.path.startswith("/v1/") and case.path.endswith(("/events", "/logs")):
            case.query = {**(case.query or {}), "follow": "false"}  # otherwise it waits for a pending run, or for ever

    def _lead_query(self, case: Case) -> None:
        if case.path.endswith("/compare"):
            ids = {self._pool.pick("run_id") for _ in range(4)} - {None}
            case.query = {"ids": ",".join(map(str, ids))}
        elif case.path.endswith("/curves"):
            case.query = {"ids": f"{self._kept_run},{self._trained_run}", "name": "loss"}
        elif case.method == "GET" and self._chance.random() < 0.5:
            case.query = {}

    def _lead_body(self, case: Case) -> None:
        content = self._document["paths"][case.path][case.method.lower()].get("requestBody", {}).get("content", {})
        if case.media_type == "multipart/form-data":
            is_native = case.path == "/v1/datasets"
            field = {"name": f"rows {self._chance.randrange(100)}"} if is_native else {"purpose": "fine-tune"}
            case.body = {**field, "file": _ROWS}
            return
        if case.media_type not in content:
            return
        example = self._example(content[case.media_type])
        if example is None:
            return
        body = self._pool.fill(example)
        if case.path in ("/v1/runs", "/v1/runs/estimate"):
            # Runs of the fake backend end quickly; those of the other would wait for a model forever.
            body = {
                **body,
                "backend": "fake",
                "config": {"base_model": "any", "extra": {"steps": 3, "step_seconds": 0}},
            }
            body.pop("probe", None)  # the fake backend rejects it
        if case.path.endswith("/fine_tuning/jobs"):
            body = {**body, "anneal": {"backend": "fake", "config": {"extra": {"steps": 3, "step_seconds": 0}}}}
        if case.path.endswith("/resume"):
            body = self._chance.choice([{}, {"from": "start"}, {"from": "start", "config": {"max_steps": 2}}])
        if case.path.endswith("/export"):
            body = self._chance.choice([{}, {"output": "merged"}, {"name": "exported"}])
        if case.path == "/v1/session":
            body = {"key": self._stack.api.key}
        if case.path == "/v1/runs/evaluate":
            model = self._chance.choice(["tiny", self._trained_run, self._trained_checkpoint])
            body = {**body, "model": model, "config": {"max_eval_rows": 5}}
        if isinstance(case.body, dict) and case.body and self._chance.random() < 0.4:
            name = self._chance.choice(sorted(map(str, case.body)))
            body = {**body, name: case.body.get(name)}
        case.body = body

    def _example(self, content: dict[str, Any]) -> Any:
        if "example" in content:
            return content["example"]
        schema = content.get("schema", {})
        for option in schema.get("anyOf", [schema]):
            name = option.get("$ref", "").rpartition("/")[2]
            example = self._document["components"]["schemas"].get(name, option).get("example")
            if example is not None:
                return example
        return None

    def _send(self, case: Case) -> None:
        answer = case.call(base_url=self._stack.api.url, session=self._session, timeout=SECONDS)
        self._note(case, answer)

    def _note(self, case: Case, answer: Any) -> None:
        self.result.by_call[case.operation.label][answer.status_code] += 1
        self._session.cookies.clear()  # of a browser that has just signed in; the campaign uses its key
        if answer.status_code < 300:
            self._learn(case, answer)
        try:
            case.validate_response(answer, checks=CHECKS)
        except (Failure, FailureGroup) as failure:
            reported = str(failure) if isinstance(failure, Failure) else "; ".join(map(str, failure.exceptions))
            self.result.violations.append(f"{case.operation.label} → {answer.status_code}: {reported[:1500]}")

    def _learn(self, case: Case, answer: Any) -> None:
        text = answer.content[:100_000].decode(errors="replace")
        if case.method == "DELETE":
            for id in (case.path_parameters or {}).values():
                self._pool.forget(str(id))
            return
        self._pool.learn(text)
        if case.path.startswith("/v1/") and case.path.endswith(("/checkpoints", "/actions")):
            shown = answer.json()
            for item in shown.get("data", [shown]):
                self._pool.of_run[item["id"]] = item["run_id"]

    def _keep_something(self) -> None:
        """Ensure that an ended, pinned run with checkpoints and an output exists."""
        client = self._stack.client
        if self._kept_run and client.get(f"/v1/runs/{self._kept_run}/artifacts").status_code == 200:
            return
        dataset = self._stack.upload(_ROWS)
        self._stack.dataset_id = dataset
        run_id = self._stack.create(
            # It fails and is retried once, so that its post-mortem is not empty.
            {"steps": 4, "step_seconds": 0, "out_of_memory_above": 2},
            config={"save_steps": 2, "batch_size": 4},
            name="kept",
            priority=1000,
        )
        # A generated call may have given the experiment a quota, with which the run waits for ever.
        experiment_id = self._stack.run(run_id)["experiment_id"]
        client.patch(f"/v1/experiments/{experiment_id}", json={"max_devices": None}).raise_for_status()
        self._stack.until(run_id, "completed", timeout=120)
        client.patch(f"/v1/runs/{run_id}", json={"pinned": True})
        self._kept_run = run_id
        for path in (f"/v1/runs/{run_id}", f"/v1/runs/{run_id}/checkpoints"):
            answer = client.get(path)
            self._pool.learn(answer.text)
        for item in client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]:
            self._pool.of_run[item["id"]] = run_id

    def _train_something(self) -> tuple[str, str, str]:
        """Store a completed run of the backend that trains; return the ids of the run, a checkpoint and an action."""
        make_model(self._stack.settings)
        body = {"dataset_id": self._stack.dataset_id, "config": {"base_model": "tiny", "method": "lora"}}
        answer = self._stack.client.post("/v1/runs", json={**body, "resources": {"kind": "cuda"}})
        run_id = answer.raise_for_status().json()["id"]
        trainer = Trainer(self._stack.engine, run_id).begin()
        checkpoint_id = trainer.checkpoint(2)
        action = self._stack.client.post(f"/v1/runs/{run_id}/actions", json={"action": "checkpoint"})
        trainer.complete()
        self._stack.client.patch(f"/v1/runs/{run_id}", json={"pinned": True}).raise_for_status()
        folder = Storage(self._stack.settings).attempt_dir(run_id, 1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"loss": 1.5, "step": 2}\n')
        self._pool.of_run[checkpoint_id] = run_id
        return run_id, checkpoint_id, action.raise_for_status().json()["id"]

    def _send_a_test(self) -> dict[str, str]:
        """Return the ids of an enabled webhook and of a delivery to it."""
        client = self._stack.client
        listed = client.get("/v1/webhooks").json()["data"]
        webhook = listed[0] if listed else client.post("/v1/webhooks", json={"url": "https://hooks.invalid"}).json()
        client.patch(f"/v1/webhooks/{webhook['id']}", json={"enabled": True}).raise_for_status()
        delivery = client.post(f"/v1/webhooks/{webhook['id']}/test").raise_for_status().json()
        return {"webhook_id": webhook["id"], "delivery_id": delivery["id"]}

    def _sequences(self) -> None:
        """Run sequences of calls along the links that schemathesis infers from the document."""
        campaign = self

        class Sequence(self._schema.as_state_machine()):  # type: ignore[misc]
            def before_call(self, case: Case) -> None:
                campaign._lead(case, towards_success=True)

            def get_call_kwargs(self, case: Case) -> dict[str, Any]:
                return {"base_url": campaign._stack.api.url, "session": campaign._session, "timeout": SECONDS}

            def validate_response(self, response: Any, case: Case, **_: Any) -> None:
                campaign._note(case, response)

        limits = settings(
            max_examples=SEQUENCES_AT_ONCE, stateful_step_count=STEPS, database=None, deadline=None,
            phases=[Phase.generate], suppress_health_check=_SUPPRESSED,
        )  # fmt: skip
        # The possible next calls depend on earlier responses, which Hypothesis reports as a flaky strategy. Everything
        # sent until then has been checked.
        with suppress(FlakyStrategyDefinition):
            Sequence.run(settings=limits)
