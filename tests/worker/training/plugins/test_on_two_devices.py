"""Promises about plugins, metric functions and histograms on two devices: each does there what it does on one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin import install
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_prompts,
    make_tiny_model,
)
from tests.worker.training.two_ranks import TwoRanks

Train = Callable[..., Outcome]

METRICS = '''
import os
from transformers import TrainerCallback

class Counted:
    """Sums that do not depend on how rows are batched."""
    def __init__(self):
        self.right = self.tokens = 0
    def update(self, logits, labels):
        kept = labels != -100
        self.tokens += int(kept.sum())
        self.right += int((logits.argmax(-1) == labels)[kept].sum())
    def result(self):
        return {"own_accuracy": self.right / self.tokens, "own_tokens": self.tokens}

class Texts:
    def __init__(self):
        self.rewards = []
    def update_completions(self, prompts, completions, rewards):
        self.rewards += rewards[:, 0].tolist()
    def result(self):
        return {"own_completions": len(self.rewards), "own_reward": sum(self.rewards) / len(self.rewards)}

class Scores:
    def __init__(self):
        self.gains = []
    def update_scores(self, chosen, rejected):
        self.gains += (chosen - rejected).tolist()
    def result(self):
        return {"own_accuracy": sum(gain > 0 for gain in self.gains) / len(self.gains), "own_pairs": len(self.gains)}

class Broken(Counted):
    def result(self):
        return {"own": "good"}

class OneSided(Counted):
    """Created once at the start, and then for each evaluation."""
    made = 0
    def __init__(self):
        super().__init__()
        OneSided.made += 1
        assert os.environ["RANK"] == "0" or OneSided.made == 1

class Decides(TrainerCallback):
    """Saves after step 1, saves because of the metric of step 3, and ends because of the evaluation after step 5."""
    def __init__(self):
        assert os.environ["RANK"] == "0"
        self.seen = []
    def on_step_end(self, args, state, control, **more):
        control.should_save = state.global_step == 1
    def on_metrics(self, args, state, control, metrics, **more):
        self.seen.append("eval" if "eval_loss" in metrics else "metric")
        control.should_save = self.seen.count("metric") == 3
        control.should_training_stop = self.seen[-1] == "eval"
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class FailsLate(TrainerCallback):
    def on_evaluate(self, args, state, control, **more):
        raise ValueError("no")

class Scales(TrainerCallback):
    def on_step_end(self, args, state, control, model, **more):
        next(one for one in model.parameters() if one.requires_grad).data.mul_(0.5)
'''
ENTRY_POINTS = """
[anneal.metrics]
counted = own_metrics:Counted
texts = own_metrics:Texts
scores = own_metrics:Scores
broken = own_metrics:Broken
one_sided = own_metrics:OneSided

[anneal.callbacks]
decides = own_metrics:Decides
scales = own_metrics:Scales
fails_late = own_metrics:FailsLate
"""
COMMON: dict[str, Any] = {
    "method": "lora", "lora_r": 4, "lora_dropout": 0.0, "learning_rate": 1e-2, "max_seq_length": 64, "max_steps": 4,
    "save_steps": 2,
    "gradient_accumulation_steps": 2, "logging_steps": 1, "save_total_limit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of an operator."""
    folder = install(tmp_path_factory.mktemp("site"))
    (folder / "own-1.0.dist-info").mkdir()
    (folder / "own_metrics.py").write_text(METRICS)
    (folder / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (folder / "own-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without dropout, which trains alike on one device and on two."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Describe a run on a number of devices, on 15 chats, pairs or prompts."""
    number = 0

    def described(devices: int, **config: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        rows, data_format = {
            "rlhf": (make_prompts, "prompt"), "reward": (make_pairs, "preference"),
        }.get(config.get("method", ""), (make_chat_dataset, "chat"))  # fmt: skip
        data = rows(tmp_path / f"{data_format}.jsonl", 15)
        config = {**COMMON, "batch_size": 4 // devices, **config}
        job = make_job(tmp_path / str(number), model, data, data_format=data_format, **config)
        return job | {"reward_models": []}

    return described


@pytest.fixture
def train(forks: Forks, two_ranks: TwoRanks, site: Path, make: Callable[..., dict[str, Any]]) -> Train:
    """Train a run on one or two devices to its end."""

    def run(devices: int, **config: Any) -> Outcome:
        ranks = forks.beside(site) if devices == 1 else two_ranks.beside(site)
        outcome = ranks.run(make(devices, **config))
        assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-3000:])
        return outcome

    return run


def evaluations(outcome: Outcome) -> list[dict[str, float]]:
    """Results of the metric functions, and the loss."""
    return [
        {name: value for name, value in record["metrics"].items() if "_own_" in name or name == "eval_loss"}
        for record in outcome.of("eval")
    ]


def test_metric_functions_are_given_each_row_once(train: Train) -> None:
    """Seven held-out rows make batches that are not the same for both devices."""
    config = {"eval_split": 0.45, "eval_steps": 1, "max_steps": 2, "extra": {"metrics": ["counted"]}}
    one_device, two_devices = (evaluations(train(devices, **config)) for devices in (1, 2))
    assert [set(found) for found in two_devices] == [{"eval_loss", "eval_own_accuracy", "eval_own_tokens"}] * 2
    assert [found["eval_own_tokens"] for found in two_devices] == [found["eval_own_tokens"] for found in one_device]
    assert two_devices == [pytest.approx(found, abs=1e-4) for found in one_device]


def test_metric_functions_are_given_each_completion_once(train: Train) -> None:
    rewards = [{"type": "length", "max": 8}]
    rlhf = {"num_generations": 2, "max_completion_length": 8, "rewards": rewards}
    config = {"method": "rlhf", "load_in_4bit": False, "eval_split": 0.2, "eval_steps": 1, "rlhf": rlhf}
    done = train(2, **config, max_steps=1, extra={"metrics": ["texts"]})
    (metrics,) = (record["metrics"] for record in done.of("eval"))
    assert metrics["eval_own_completions"] == 3 * 2
    assert metrics["eval_own_reward"] == pytest.approx(metrics["eval_reward"])


def test_metric_functions_are_given_the_scores_of_both_devices(train: Train) -> None:
    config = {"method": "reward", "load_in_4bit": False, "eval_split": 0.45, "eval_steps": 1, "max_steps": 1}
    (metrics,) = (record["metrics"] for record in train(2, **config, extra={"metrics": ["scores"]}).of("eval"))
    assert metrics["eval_own_pairs"] == 7
    assert metrics["eval_own_accuracy"] == pytest.approx(metrics["eval_preference_accuracy"])


def test_a_metric_function_that_fails_is_named(
    two_ranks: TwoRanks, site: Path, make: Callable[..., dict[str, Any]]
) -> None:
    job = make(2, eval_split=0.2, eval_steps=1, extra={"metrics": ["broken"]})
    ended = two_ranks.beside(site).run_to_end_of_first(job)
    assert ended.result["error"]["message"].startswith("The metric function `broken` returned a str for 'own'")


def test_a_metric_function_that_fails_on_one_device_fails_a_requested_evaluation_on_both(
    two_ranks: TwoRanks, site: Path, make: Callable[..., dict[str, Any]]
) -> None:
    job = make(2, eval_split=0.2, eval_steps=None, extra={"metrics": ["one_sided"]})
    job["replayed_actions"] = [{"id": "act_1", "action": "evaluate", "parameters": {}, "step": 2}]
    done = two_ranks.beside(site).run(job)
    (answer,) = done.of("action")
    assert (done.result["outcome"], answer["status"]) == ("completed", "failed"), answer
    assert "On rank 1" in answer["message"]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_callback_that_fails_in_a_requested_evaluation_ends_the_run(
    devices: int, forks: Forks, two_ranks: TwoRanks, site: Path, make: Callable[..., dict[str, Any]]
) -> None:
    """The other device would wait without end for one that trains on."""
    job = make(devices, eval_split=0.2, eval_steps=None, extra={"callbacks": [{"type": "fails_late"}]})
    job["replayed_actions"] = [{"id": "act_1", "action": "evaluate", "parameters": {}, "step": 2}]
    ended = forks.beside(site).run(job) if devices == 1 else two_ranks.beside(site).run_to_end_of_first(job)
    message = "`anneal.callbacks` entry `fails_late` failed: ValueError('no')."
    assert ended.result["error"] == {"code": "config_error", "message": message}


def test_what_a_callback_decides_is_done_on_both_devices(train: Train) -> None:
    config = {"max_steps": 8, "save_steps": 100, "eval_split": 0.2, "eval_steps": 5}
    done = train(2, **config, extra={"callbacks": [{"type": "decides"}]})
    assert (done.result["why"], done.result["step"]) == ("callback", 5)
    facts = done.of("config")[0]["facts"]
    rows = done.job["config"].get("batch_size", 4) * done.job["config"].get("gradient_accumulation_steps", 4) * 2
    assert (facts["devices"], facts["sharded"], facts["rows_per_step"]) == (2, False, rows)
    card = (done.output / "README.md").read_text()
    assert "- devices: 2 × cpu; each with a replica of the model" in card and f"- rows per step: {rows}" in card
    assert [record["step"] for record in done.of("checkpoint")] == [1, 3, 5]
    state = json.loads((done.folder / "checkpoint-3" / "anneal_state.json").read_text())["callbacks"]
    assert state == {"0.decides": {"seen": ["metric"] * 3}}


def test_a_callback_that_changes_weights_ends_the_run(
    two_ranks: TwoRanks, site: Path, make: Callable[..., dict[str, Any]]
) -> None:
    job = make(2, extra={"callbacks": [{"type": "scales"}]})
    ended = two_ranks.beside(site).run_to_end_of_first(job)
    assert ended.result["error"]["code"] == "config_error"
    assert "a callback (`extra.callbacks`) has changed weights" in ended.result["error"]["message"]


def test_distributions_are_those_of_one_device(train: Train) -> None:
    one_device, two_devices = (
        train(devices, extra={"distributions_steps": 2}).of("distribution") for devices in (1, 2)
    )
    assert [record["step"] for record in two_devices] == [record["step"] for record in one_device] == [2, 4]
    for ours, theirs in zip(one_device, two_devices, strict=True):
        assert ours["groups"].keys() == theirs["groups"].keys()
        for group, histograms in ours["groups"].items():
            for of in ("weights", "gradients"):
                names = ("count", "mean", "std", "min", "max")
                assert [theirs["groups"][group][of][name] for name in names] == pytest.approx(
                    [histograms[of][name] for name in names], rel=1e-2, abs=1e-6
                )


def test_rows_of_a_data_source_and_a_checkpoint_of_an_engine_are_found_by_both_devices(
    train: Train, tmp_path: Path
) -> None:
    root = tmp_path / "copies"
    extra = {
        "data_source": {"type": "repeated", "times": 2},
        "checkpoint_engine": {"type": "second-folder", "root": str(root)},
    }
    one_device, whole = (train(devices, extra=extra) for devices in (1, 2))
    assert whole.of("config")[0]["facts"]["rows"] == 30
    assert {step: sorted(rows) for step, (_, rows) in whole.steps.items()} == {
        step: sorted(rows) for step, (_, rows) in one_device.steps.items()
    }
    assert not list(whole.folder.glob("rows-*"))
    point = whole.checkpoint(2)
    shutil.rmtree(point["path"])
    rest = train(2, extra=extra, resume_from=point)
    assert rest.steps == {step: reported for step, reported in whole.steps.items() if step > 2}
    assert any("restored from the replica" in record["line"] for record in rest.of("message"))
