"""A run with compiled layers trains as one without, and compiles before its first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from tests.worker.training.tiny import Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.model.compilation import compile_layers, reported_compiler_errors


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_compiled_layers_train_alike_resume_exactly_and_compile_in_no_step(
    method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "method": method, "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 6,
        "save_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, "optim": "adamw_torch",
    }  # fmt: skip
    if method != "full":
        config["lora_dropout"] = 0.0  # the compiler draws other masks
    plain = forks.run(make_job(tmp_path / "plain", tiny_model, chats, **config))
    config["torch_compile"] = True
    compiled = forks.run(make_job(tmp_path / "compiled", tiny_model, chats, **config))
    assert compiled.result["outcome"] == "completed", compiled.result
    losses, expected = ([metric["loss"] for metric in run.of("metric")] for run in (compiled, plain))
    assert losses == pytest.approx(expected, rel=1e-4)
    spent = compiled.of("config")[0]["facts"]["compile_seconds"]
    assert max(metric["extra"]["step_seconds"] for metric in compiled.of("metric")) < spent / 2
    again = make_job(tmp_path / "compiled", tiny_model, chats, attempt=2, resume_from=compiled.checkpoint(3), **config)
    resumed = forks.run(again)
    assert resumed.steps == {step: reported for step, reported in compiled.steps.items() if step > 3}


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(TrainingFailure, match="the layers of this model are not known") as refused:
        compile_layers(torch.nn.Linear(2, 2))
    assert refused.value.code == "config_error"


@pytest.mark.parametrize(("has_compiler", "advice"), [(False, "apt install g++"), (True, "leave `torch_compile` out")])
def test_an_error_of_the_compiler_says_what_to_install_or_that_the_model_cannot_be_compiled(
    has_compiler: bool, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Python.h").touch()
    (tmp_path / "g++").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path if has_compiler else tmp_path / "no"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(TrainingFailure, match=advice.replace("+", "[+]")) as failed, reported_compiler_errors():
        raise InductorError(RuntimeError("the reason"), None)
    assert failed.value.code == "config_error" and "the reason" in failed.value.message
