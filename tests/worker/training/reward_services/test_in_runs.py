"""Rewards of services in runs: what learns from them, what they score, what they cost, and what a resume repeats."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.training.methods.plain_trl import plain_log
from tests.worker.training.methods.test_evaluation import evaluation_job
from tests.worker.training.prediction.test_predict import answers_of, make_questions, prediction_job
from tests.worker.training.reward_services.service import Reply, RewardService, reward_service
from tests.worker.training.tiny import Forks, Outcome, make_job, make_prompts, make_tiny_model
from tests.worker.training.two_ranks import TwoRanks
from worker.training.methods.text_comparison import similarity

KEY = "sk-key-of-ada-0123456789"
VARIABLES = {"ANNEAL_REWARD_KEY_JUDGE_KEY": KEY}
LENGTH = {"type": "length", "max": 8, "unit": "characters", "slack": 30, "weight": 0.5}
TRAINING: dict[str, Any] = {
    "method": "rlhf", "max_steps": 4, "save_steps": 2, "batch_size": 4, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "optim": "adamw_torch", "max_seq_length": 128, "lora_r": None, "logging_steps": 1,
    "save_total_limit": None,
}  # fmt: skip


def share_of_e(completion: str) -> float | None:
    """Score of a completion; about every sixth has none."""
    return None if sum(completion.encode()) % 6 == 0 else completion.count("e") / (len(completion) + 1)


def sum_of_both(completions: list[str], **_: Any) -> list[float | None]:
    """Sum of `LENGTH` and the score; none without a score, so that plain TRL leaves the completion out."""
    shares = [share_of_e(completion) for completion in completions]
    lengths = [max(0.0, 1 - max(len(completion) - 8, 0) / 30) for completion in completions]
    return [None if share is None else 0.5 * length + share for share, length in zip(shares, lengths, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def service() -> Iterator[RewardService]:
    def answer(body: Any) -> Any:
        return {"scores": [share_of_e(row["completion"]) for row in body["rows"]]}

    with reward_service(answer) as service:
        yield service


def run(forks: Forks, job: dict[str, Any]) -> Outcome:
    # The port is that of the service, which the rewards of the job name.
    ports = {int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", json.dumps(job, default=str))}
    hosts = [{"name": "127.0.0.1", "port": port, "is_private": True, "secret": "judge_key"} for port in ports]
    return forks.run(job | {"reward_hosts": hosts}, variables=VARIABLES)


def losses(outcome: Outcome) -> list[float]:
    assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-3000:])
    return [float.fromhex(loss) for loss, _ in outcome.steps.values()]


def test_completion_without_a_score_is_left_out_of_its_group_and_resumed_steps_are_those_of_the_run(
    forks: Forks, model: Path, service: RewardService, tmp_path: Path
) -> None:
    data = make_prompts(tmp_path / "prompts.jsonl", 16)
    # Without weight: it is there for the column of the row that it refers to.
    check = {"type": "string_check", "reference": "{{ item.prompt }}", "operation": "ne", "weight": 0.0}
    rewards = [LENGTH, {"type": "http", "url": service.url, "rows_per_request": 3}, check]
    rlhf = {"num_generations": 4, "max_completion_length": 12, "rewards": rewards}
    fields: dict[str, Any] = {"data_format": "prompt", "rlhf": rlhf, **TRAINING}
    whole = run(forks, make_job(tmp_path, model, data, **fields))
    theirs = plain_log(
        "grpo", model, data, tmp_path / "plain", "full", steps=4, batch_size=4, num_generations=4,
        max_completion_length=12, temperature=1.0, beta=0.0, reward_funcs=[sum_of_both],
    )  # fmt: skip
    assert losses(whole) == pytest.approx([entry["loss"] for entry in theirs], rel=1e-5, abs=1e-6)
    # The losses of completions of equal length are almost 0.
    norms = [record["grad_norm"] for record in whole.of("metric")]
    assert norms == pytest.approx([entry["grad_norm"] for entry in theirs], rel=1e-4)

    posted = [row["completion"] for call in service.calls for row in call.json["rows"]]
    missing = [share_of_e(completion) for completion in posted].count(None)
    last = whole.of("metric")[-1]["extra"]
    assert len(posted) == 4 * 8 and missing > 0 and last["reward_string_check"] == 1
    assert (last["reward_calls"], last["reward_missing"]) == (4 * 3, missing)
    lines = [record["line"] for record in whole.of("message")]
    assert any(line.startswith("Reward `http` is missing for ") for line in lines)
    assert f"The rewards took 12 calls; {missing} scores are missing." in lines

    resumed = run(forks, make_job(tmp_path, model, data, attempt=2, resume_from=whole.checkpoint(2), **fields))
    assert losses(resumed) == losses(whole)[2:]
    assert resumed.of("metric")[-1]["extra"]["reward_calls"] == last["reward_calls"]

    assert {call.headers["authorization"] for call in service.calls} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if KEY.encode() in path.read_bytes()]


def test_answers_of_a_prediction_are_scored_and_a_missing_score_is_no_zero(
    forks: Forks, model: Path, service: RewardService, tmp_path: Path
) -> None:
    data = make_questions(tmp_path / "data.jsonl", 12)
    same = {
        "type": "text_similarity",
        "reference": "{{ item.answer }}",
        "evaluation_metric": "fuzzy_match",
        "weight": 0.0,
    }
    options = {"rewards": [{"type": "http", "url": service.url}, LENGTH, same], "system_prompt": "Be brief."}
    done = run(forks, prediction_job(tmp_path, model, data, options=options))
    rows = answers_of(done)
    scores = [share_of_e(row["prediction"]) for row in rows]
    assert [row["scores"]["reward_http"] for row in rows] == scores
    assert [row["scores"]["reward"] is None for row in rows] == [score is None for score in scores]
    similar = [similarity("fuzzy_match")(row["prediction"], row["reference"]) for row in rows]
    assert [row["scores"]["reward_text_similarity"] for row in rows] == similar
    posted = {row["reference"]: row for call in service.calls for row in call.json["rows"]}
    system = {"role": "system", "content": "Be brief."}
    assert {row["reference"]: ([system, *row["prompt"]], row["prediction"]) for row in rows} == {
        reference: (row["prompt"], row["completion"]) for reference, row in posted.items()
    }
    known = [score for score in scores if score is not None]
    metrics = done.of("eval")[0]["metrics"]
    assert metrics["eval_reward_http"] == pytest.approx(sum(known) / len(known))
    assert metrics["eval_reward_calls"] == len(service.calls)
    assert metrics["eval_reward_missing"] == len(scores) - len(known) > 0


def test_evaluation_has_the_cost_of_its_calls(
    forks: Forks, model: Path, service: RewardService, tmp_path: Path
) -> None:
    data = make_prompts(tmp_path / "prompts.jsonl", 2)
    rlhf = {"num_generations": 2, "max_completion_length": 8, "rewards": [{"type": "http", "url": service.url}]}
    config = {"method": "rlhf", "lora_r": None, "batch_size": 2, "max_seq_length": 64, "rlhf": rlhf}
    done = run(forks, evaluation_job(tmp_path, model, data, data_format="prompt", **config))
    (event,) = done.of("eval")
    assert event["metrics"]["eval_reward_calls"] == len(service.calls) > 0
    assert "eval_reward_http" in event["metrics"]


def test_service_that_refuses_the_key_ends_the_run_with_a_sentence(
    forks: Forks, model: Path, service: RewardService, tmp_path: Path
) -> None:
    service.replies = [Reply({"error": f"{KEY} is revoked"}, 401)] * 99
    data = make_questions(tmp_path / "data.jsonl", 3)
    options = {"rewards": [{"type": "http", "url": service.url}]}
    error = run(forks, prediction_job(tmp_path, model, data, options=options)).result["error"]
    assert error["code"] == "reward_unavailable"
    assert error["message"] == (
        "Reward `http` cannot be computed: 127.0.0.1 answered with status 401: "
        '\'{"error": "[redacted] is revoked"}\'. An admin sets another key with `anneal secrets set judge_key`.'
    )


@pytest.mark.full
def test_calls_of_every_device_are_counted(
    two_ranks: TwoRanks, model: Path, service: RewardService, tmp_path: Path
) -> None:
    data = make_prompts(tmp_path / "prompts.jsonl", 16)
    rewards = [LENGTH, {"type": "http", "url": service.url, "rows_per_request": 3}]
    rlhf = {"num_generations": 4, "max_completion_length": 12, "rewards": rewards}
    fields = {**TRAINING, "max_steps": 2, "eval_steps": 2, "eval_split": 0.2, "rlhf": rlhf}
    job = make_job(tmp_path, model, data, data_format="prompt", **fields)
    done = two_ranks.run(job | {"reward_hosts": [{"name": "127.0.0.1", "port": service.port, "is_private": True}]})
    assert done.result["outcome"] == "completed", (done.result, done.stderr[-3000:])
    last = done.of("metric")[-1]["extra"]
    posted = [row for call in service.calls for row in call.json["rows"]]
    assert len(posted) >= 2 * 16 and last["reward_calls"] == 2 * 2 * 3
    lines = [record["line"] for record in done.of("message")]
    assert any(line.startswith(f"The rewards took {len(service.calls)} calls; ") for line in lines), lines
