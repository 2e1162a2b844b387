"""Optimizers and schedules are those of the installed transformers, and their options reach them."""

import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from anneal.contracts.training_config.fields import Optimizer, Scheduler, TrainingConfig
from anneal.contracts.training_config.optimizers import (
    NOT_SUPPORTED,
    OPTIMIZERS,
    SCHEDULERS,
    OptimizerOptions,
    SchedulerOptions,
)
from tests.worker.training.tiny import Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.methods import preparation

QUICK: dict[str, Any] = {
    "method": "full", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
    "logging_steps": 1, "learning_rate": 1e-3, "warmup_ratio": 0.0,
}  # fmt: skip


def test_every_name_of_transformers_is_accepted_or_refused_with_a_reason() -> None:
    assert set(get_args(Optimizer)) == set(OPTIMIZERS) and set(get_args(Scheduler)) == set(SCHEDULERS)
    ours = {*OPTIMIZERS, *SCHEDULERS}
    assert not ours & set(NOT_SUPPORTED)
    theirs = {*(one.value for one in OptimizerNames), *(one.value for one in SchedulerType)}
    assert ours | set(NOT_SUPPORTED) == theirs


def test_options_are_those_that_a_schedule_takes_and_each_has_a_user() -> None:
    set_by_trainer = {"optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch"}
    for name, options in SCHEDULERS.items():
        taken = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
        assert set(options) == set(taken) - set_by_trainer, name
    assert {one for options in SCHEDULERS.values() for one in options} == set(SchedulerOptions.model_fields)
    assert {one for row in OPTIMIZERS.values() for one in row.options} == set(OptimizerOptions.model_fields)


@pytest.mark.parametrize(
    ("optim", "options", "schedule", "settings", "last_rate"),
    [
        ("adamw_bnb_8bit", {}, "cosine_with_min_lr", {"min_lr_rate": 0.5}, 5.7e-4),
        ("ademamix_8bit", {"alpha": 4.0, "t_alpha": 10}, "warmup_stable_decay", {"num_decay_steps": 2}, 5e-4),
        pytest.param(
            "adagrad", {"lr_decay": 0.1}, "cosine_warmup_with_min_lr", {"min_lr": 5e-4}, 5e-4, marks=pytest.mark.full
        ),
        ("sgd", {"momentum": 0.9, "nesterov": True}, "polynomial", {"lr_end": 5e-4, "power": 1.0}, 6.25e-4),
        pytest.param("rmsprop_bnb", {}, "constant", {}, 1e-3, marks=pytest.mark.full),
    ],
)
def test_every_optimizer_trains(
    optim: str,
    options: dict[str, Any],
    schedule: str,
    settings: dict[str, Any],
    last_rate: float,
    forks: Forks,
    tiny_model: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    extra = {"optim_args": options, "lr_scheduler_kwargs": settings}
    config = {**QUICK, "optim": optim, "lr_scheduler_type": schedule, "extra": extra}
    done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
    assert done.result["outcome"] == "completed", (done.result, done.stderr[-2000:])
    rates = [record["learning_rate"] for record in done.of("metric")]
    assert rates[-1] == pytest.approx(last_rate, rel=0.02), rates


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [{"optim": "adamw_torch_8bit"}, {"optim": "adamw_torch_4bit"}, {"weights_dtype": "bfloat16"}],
    ids=["8bit", "4bit", "bfloat16"],
)
def test_optimizers_of_torchao_train_and_resume_exactly(
    fields: dict[str, Any], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = {**QUICK, **fields, "save_steps": 2, "lr_scheduler_type": "linear"}
    whole = forks.run(make_job(tmp_path, tiny_model, chats, **config))
    assert whole.result["outcome"] == "completed", (whole.result, whole.stderr[-2000:])
    job = make_job(tmp_path, tiny_model, chats, attempt=2, resume_from=whole.checkpoint(2), **config)
    assert forks.run(job).steps == {step: reported for step, reported in whole.steps.items() if step > 2}
    expected = torch.bfloat16 if "weights_dtype" in fields else torch.float32
    assert {tensor.dtype for tensor in load_file(whole.output / "model.safetensors").values()} == {expected}


def test_an_optimizer_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    config = TrainingConfig(base_model="tiny", method="full", optim="adamw_torch_8bit")
    with pytest.raises(TrainingFailure, match="pip install torchao") as refused:
        preparation._check_optimizer(config)
    assert refused.value.code == "config_error"
