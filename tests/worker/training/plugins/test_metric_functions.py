"""Metric functions that an operator has installed: what they find is told, and what is none is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.training.tiny import Forks, Outcome, make_job, run_cold
from worker.training.failures import TrainingFailure
from worker.training.plugins import metric_functions

CONFIG: dict[str, Any] = {
    "method": "lora", "lora_r": 4, "max_seq_length": 64, "max_steps": 2, "eval_steps": 2, "loss_on": "assistant",
    "batch_size": 2, "gradient_accumulation_steps": 2, "optim": "adamw_torch",
}  # fmt: skip


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
    (folder / "ours-1.0.dist-info" / "entry_points.txt").write_text(
        "[anneal.metrics]\n" + "".join(f"{name} = ours:{where}\n" for name, where in points.items())
    )
    return folder


class TestMetricFunctions:
    def test_their_results_are_part_of_evaluations_and_change_nothing_else(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, plugins: Path
    ) -> None:
        plain = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, eval_data=chats, **CONFIG)))
        job = make_job(tmp_path / "2", tiny_model, chats, eval_data=chats, **CONFIG, extra={"metrics": ["brier"]})
        path = f"{plugins}:{Path.cwd()}"
        done = completed(run_cold(job, PYTHONPATH=path))
        (one,), (other,) = ([record["metrics"] for record in run.of("eval")] for run in (plain, done))
        assert other["eval_own_accuracy"] == pytest.approx(other["eval_token_accuracy"], abs=0.05)
        assert other["eval_own_loss"] == pytest.approx(other["eval_loss"], rel=0.01)
        assert (one["eval_loss"], plain.steps) == (other["eval_loss"], done.steps)
        assert {name for name in other if name not in one} == {"eval_own_accuracy", "eval_own_loss"}
        assert (
            json.loads((done.output / "metrics.jsonl").read_text().splitlines()[-1])["eval_own_loss"]
            == other["eval_own_loss"]
        )

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("absent", "no metric function absent; installed are: brier, noupdate, number, taken, wrong"),
            ("number", "`number` is a int"),
            ("noupdate", "`noupdate` returned a NoUpdate, which has no method update"),
        ],
    )
    def test_what_is_none_is_refused_by_name_before_training(
        self, name: str, says: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(plugins))
        with pytest.raises(TrainingFailure, match=says):
            metric_functions.load(["brier", name])

    @pytest.mark.parametrize(
        ("name", "says"), [("wrong", "a str for 'own'"), ("taken", "already have a metric `eval_loss`")]
    )
    def test_a_result_that_is_none_is_refused_by_name(
        self, name: str, says: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(plugins))
        evaluation = metric_functions.Evaluation(metric_functions.load([name]))
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
