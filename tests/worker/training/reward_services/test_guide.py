"""The examples of docs/guides/rewards.md are valid, and calls are as it shows them."""

import json
import re
from typing import Any

from anneal.contracts.rewards import HttpReward, RewardHost
from anneal.contracts.schemas.runs.requests import PredictionConfig
from anneal.contracts.training_config.validation import config_errors
from app.config import Settings
from tests.nodes import ROOT
from tests.worker.training.reward_services.service import reward_service
from worker.training.reward_services.scoring_service import ScoringService
from worker.training.reward_services.service_client import CallContext

GUIDE = (ROOT / "docs" / "guides" / "rewards.md").read_text()
KEY = "key-of-the-service"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS: list[tuple[str, str]] = BLOCK.findall(GUIDE)


def test_configurations_of_the_guides_are_valid() -> None:
    configs = [json.loads(block) for kind, block in BLOCKS if kind == "json" and '"rlhf"' in block]
    assert [reward["type"] for config in configs for reward in config["rlhf"]["rewards"]] == [
        "string_check", "text_similarity", "http", "judge",
    ]  # fmt: skip
    for config in configs:
        assert config_errors({"base_model": "tiny", "method": "rlhf", **config}, has_eval_dataset=False) == []
    predictions = (ROOT / "docs" / "guides" / "predictions.md").read_text()
    bodies = [json.loads(block) for kind, block in BLOCK.findall(predictions) if kind == "json" and '"config"' in block]
    assert len(bodies) == 2
    for body in bodies:
        PredictionConfig.model_validate(body["config"])


def test_service_is_called_and_answers_as_the_guide_shows() -> None:
    (request,) = [block.replace("…", KEY) for kind, block in BLOCKS if kind == "http"]
    (response,) = [json.loads(block) for kind, block in BLOCKS if kind == "json" and '"scores"' in block]
    head, _, body = request.partition("\n\n")
    expected: dict[str, Any] = json.loads(body)
    with reward_service(lambda _body: response) as service:
        reward = HttpReward(type="http", url=f"http://127.0.0.1:{service.port}/v1/score")
        host = RewardHost(name="127.0.0.1", port=service.port, is_private=True, secret="scores_key")
        context = CallContext([host], {"ANNEAL_REWARD_KEY_SCORES_KEY": KEY})
        (row,) = expected["rows"]
        score = ScoringService(reward, "http", context)([row["prompt"]], [row["completion"]], answer=[row["reference"]])
    (call,) = service.calls
    assert (call.json, score) == (expected, response["scores"])
    first, *headers = head.splitlines()
    assert first == f"POST {call.path}"
    for header in headers:
        name, _, value = header.partition(": ")
        assert call.headers[name.lower()] == value


def test_hosts_of_the_guide_are_settings() -> None:
    (block,) = [block for kind, block in BLOCKS if kind == "bash" and "ANNEAL_REWARD_HOSTS" in block]
    values = dict(re.findall(r'ANNEAL_(REWARD_\w+)="([^"]+)"', block))
    hosts = Settings(**{name.lower(): value for name, value in values.items()}).allowed_reward_hosts
    secrets = re.findall(r"anneal secrets set (\w+)", block)
    assert [host.secret for host in hosts if host.secret] == secrets
    assert {host.is_private for host in hosts} == {True, False}
