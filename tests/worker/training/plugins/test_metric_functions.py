"""Metric functions that an operator has installed: what they find is told, and what is none is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anneal.contracts.methods import METHODS, TrainingMethod
from tests.worker.training.tiny import Forks, Outcome, make_job, make_pairs, make_prompts, make_rated
from worker.training.failures import TrainingFailure
from worker.training.plugins import metric_functions

CONFIG: dict[str, Any] = {
    "method": "lora", "lora_r": 4, "max_seq_length": 64, "max_steps": 2, "eval_steps": 2, "loss_on": "assistant",
    "batch_size": 2, "gradient_accumulation_steps": 2, "optim": "adamw_torch",
}  # fmt: skip

SFT = METHODS[TrainingMethod.sft]
OTHER_METHODS: dict[str, tuple[Callable[[Path, int], Path], str, str]] = {
    "dpo": (make_pairs, "preference", "pairs"),
    "kto": (make_rated, "rated", "brier"),
    "reward": (make_pairs, "preference", "scores"),
    "rlhf": (make_prompts, "prompt", "texts"),
}
"""Data, its format and a metric function."""


def completed(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert outcome.result["outcome"] == "completed", outcome.result
    return outcome


PLUGIN = '''
import torch

class Brier:
    """Also looks at how the trainer calls it."""
    def __init__(self):
        self.right = self.tokens = 0
        self.loss = 0.0
    def update(self, logits, labels):
        assert logits.shape[:2] == labels.shape and not logits.requires_grad
        kept = labels != -100
        self.tokens += int(kept.sum())
        self.right += int((logits.argmax(-1) == labels)[kept].sum())
        self.loss += float(torch.nn.functional.cross_entropy(logits[kept].float(), labels[kept], reduction="sum"))
    def result(self):
        return {"own_accuracy": self.right / self.tokens, "own_loss": torch.tensor(self.loss / self.tokens)}

class Pairs(Brier):
    """Better answers come first."""
    def update(self, logits, labels):
        assert len(labels) % 2 == 0
        super().update(logits, labels)

class Scores:
    def __init__(self):
        self.chosen, self.rejected = [], []
    def update_scores(self, chosen, rejected):
        self.chosen += chosen.tolist()
        self.rejected += rejected.tolist()
    def result(self):
        right = [a > b for a, b in zip(self.chosen, self.rejected, strict=True)]
        return {"own_accuracy": sum(right) / len(right)}

class Texts:
    def __init__(self):
        self.rewards = []
    def update_completions(self, prompts, completions, rewards):
        assert len(prompts) == len(completions) == len(rewards) and rewards.shape[1] == 1
        assert all(isinstance(one, str) for one in [*prompts, *completions])
        self.rewards += rewards[:, 0].tolist()
    def result(self):
        return {"own_reward": sum(self.rewards) / len(self.rewards), "own_completions": len(self.rewards)}

class Wrong(Brier):
    def result(self):
        return {"own": "good"}

class Taken(Brier):
    def result(self):
        return {"loss": 1.0}

class NoUpdate:
    def result(self):
        return {}

a_number = 3
'''


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A package with metric functions, as an operator installs one."""
    folder = tmp_path / "site"
    (folder / "ours-1.0.dist-info").mkdir(parents=True)
    (folder / "ours.py").write_text(PLUGIN)
    (folder / "ours-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    points = {"brier": "Brier", "wrong": "Wrong", "taken": "Taken", "noupdate": "NoUpdate", "number": "a_number"}
    points |= {"pairs": "Pairs", "scores": "Scores", "texts": "Texts"}
    (folder / "ours-1.0.dist-info" / "entry_points.txt").write_text(
        "[anneal.metrics]\n" + "".join(f"{name} = ours:{where}\n" for name, where in points.items())
    )
    return folder


class TestMetricFunctions:
    def test_their_results_are_part_of_evaluations_and_change_nothing_else(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, plugins: Path
    ) -> None:
        plain = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, eval_data=chats, **CONFIG)))
        job = make_job(
            tmp_path / "2", tiny_model, chats, eval_data=chats, extra_eval={"same": chats}, **CONFIG,
            extra={"metrics": ["brier"]},
        )  # fmt: skip
        done = completed(forks.beside(plugins).run(job))
        (without,), (other,) = ([record["metrics"] for record in run.of("eval")] for run in (plain, done))
        assert other["eval_own_accuracy"] == pytest.approx(other["eval_token_accuracy"], abs=0.05)
        assert other["eval_own_loss"] == pytest.approx(other["eval_loss"], rel=0.01)
        assert (without["eval_loss"], plain.steps) == (other["eval_loss"], done.steps)
        own = {"eval_own_accuracy", "eval_own_loss"}
        assert {name for name in other if name not in without and not name.startswith("eval_same_")} == own
        assert all(other[name] == other[name.replace("eval_", "eval_same_")] for name in own)
        assert (
            json.loads((done.output / "metrics.jsonl").read_text().splitlines()[-1])["eval_own_loss"]
            == other["eval_own_loss"]
        )

    @pytest.mark.parametrize(
        "method",
        ["dpo", pytest.param("kto", marks=pytest.mark.full), pytest.param("reward", marks=pytest.mark.full), "rlhf"],
    )
    def test_every_method_has_them(
        self, method: str, forks: Forks, tiny_model: Path, tmp_path: Path, plugins: Path
    ) -> None:
        make, data_format, name = OTHER_METHODS[method]
        data = make(tmp_path / "data.jsonl", 8)
        config = {
            "method": method, "lora_r": 4, "load_in_4bit": False, "max_seq_length": 64, "max_steps": 1, "eval_steps": 1,
            "batch_size": 4, "gradient_accumulation_steps": 1, "extra": {"metrics": [name]},
        }  # fmt: skip
        if method == "rlhf":
            length = {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30}
            config["rlhf"] = {"num_generations": 4, "max_completion_length": 8, "rewards": [length]}
        job = make_job(tmp_path, tiny_model, data, eval_data=data, data_format=data_format, **config)
        job.setdefault("reward_models", [])
        done = completed(forks.beside(plugins).run(job))
        (metrics,) = [record["metrics"] for record in done.of("eval")]
        if method == "dpo":
            assert metrics["eval_own_accuracy"] == pytest.approx(metrics["eval_token_accuracy"], abs=1e-6)
        if method == "kto":
            assert 0 < metrics["eval_own_loss"] < 20
        if method == "reward":
            assert metrics["eval_own_accuracy"] == pytest.approx(metrics["eval_preference_accuracy"])
        if method == "rlhf":
            assert metrics["eval_own_reward"] == pytest.approx(metrics["eval_reward"])
            assert metrics["eval_own_completions"] == 32

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            (
                "absent",
                "no metric function absent; installed are: brier, noupdate, number, pairs, scores, taken, texts, wrong",
            ),
            ("number", "`number` is a int"),
            ("noupdate", "`noupdate` returned a NoUpdate, which has no method update, so it cannot evaluate `sft`"),
            ("scores", "`scores` returned a Scores, which has no method update"),
        ],
    )
    def test_invalid_metric_function_is_refused_by_name_before_training(
        self, name: str, says: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(plugins))
        with pytest.raises(TrainingFailure, match=says):
            metric_functions.load_factories(["brier", name], SFT)

    @pytest.mark.parametrize(
        ("name", "says"), [("wrong", "a str for 'own'"), ("taken", "already have a metric `eval_loss`")]
    )
    def test_a_result_that_is_none_is_refused_by_name(
        self, name: str, says: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(plugins))
        evaluation = metric_functions.Evaluation(metric_functions.load_factories([name], SFT))
        evaluation.update(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
        with pytest.raises(TrainingFailure, match=f"`{name}` returned.*{says}"):
            evaluation.results({"eval_loss": 1.0})

    def test_an_unknown_one_ends_the_run_before_anything_is_loaded(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        extra = {"metrics": ["absent"]}
        job = make_job(tmp_path, tiny_model, chats, method="full", eval_split=0.5, eval_steps=1, extra=extra)
        ended = forks.run(job)
        assert ended.result["error"]["code"] == "config_error" and "absent" in ended.result["error"]["message"]
        assert ended.of("phase") == []
