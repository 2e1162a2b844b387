"""A run that is planned by measurement trains as if it had been configured so: not a bit of it shows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anneal.contracts.attempt.run_facts import invalid_facts
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_rated,
    make_tiny_model,
)
from tests.worker.training.two_ranks import TwoRanks
from worker.training.measurement.step_phases import StepPhases
from worker.training.measurement.throughput import Throughput
from worker.training.planning.step_planning import leaving_no_trace

LAYERS = 2
ROOM = 2**30
"""Bytes beside the weights for any plan of the tiny model."""
COMMON: dict[str, Any] = {"gradient_checkpointing": "auto", "max_steps": 2, "logging_steps": 1, "optim": "adamw_torch"}
FIXED = {"batch_size": 4, "gradient_accumulation_steps": 2}
PADDED: dict[str, Any] = {"method": "lora", "extra": {"padding_free": False}}
"""A run whose micro-batches have the more padding, the larger they are."""

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several layers with attention dropout."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "layers", layers=LAYERS, dropout=0.1)


@pytest.fixture
def run(forks: Forks, model: Path, chats: Path, tmp_path: Path) -> Run:
    """A function that trains with `room` bytes beside the weights on the counted device; None: on a CPU."""

    def train(
        name: str, room: int | None, *, data: Path = chats, device: dict[str, Any] | None = None, **more: Any
    ) -> Outcome:
        job = make_job(tmp_path / name, model, data, **COMMON | more)
        done = forks.run(job, **({} if room is None else {"counted_device": {"usable": room, **(device or {})}}))
        assert done.code == 0 and done.result["outcome"] in ("completed", "stopped"), done.stderr[-3000:]
        return done

    return train


@pytest.fixture(scope="module")
def free(forks: Forks, model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run on a device that has room for any plan."""
    job = make_job(tmp_path_factory.mktemp("free"), model, chats, **COMMON, method="lora", **FIXED)
    return forks.run(job, counted_device={"usable": ROOM})


@pytest.fixture(scope="module")
def less(free: Outcome) -> int:
    """A byte less than the first plan of that run takes."""
    return int(step_plan(free)["passes"][0]["peak_bytes"]) - 1


@pytest.fixture(scope="module")
def tight(forks: Forks, model: Path, chats: Path, less: int, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run on a device with a byte less than it took."""
    job = make_job(tmp_path_factory.mktemp("tight"), model, chats, **COMMON, method="lora", **FIXED)
    return forks.run(job, counted_device={"usable": less})


def effective(outcome: Outcome) -> dict[str, Any]:
    reported: dict[str, Any] = outcome.of("config")[-1]["effective"]
    return reported


def step_plan(outcome: Outcome) -> dict[str, Any]:
    facts = outcome.of("config")[-1]["facts"]
    assert invalid_facts(facts) == []
    plan: dict[str, Any] = facts["step_plan"]
    return plan


def numbers(outcome: Outcome) -> list[dict[str, Any]]:
    """The metrics of each step, without times."""
    names = ("loss", "grad_norm", "learning_rate")
    return [
        {name: record[name] for name in names}
        | {name: value for name, value in record["extra"].items() if name in ("token_accuracy", "entropy", "tokens")}
        for record in outcome.of("metric")
    ]


METHODS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "lora": ({"method": "lora"}, None, "chat"),
    "full": ({"method": "full"}, None, "chat"),
    "qlora": ({"method": "qlora"}, None, "chat"),
    "packed": ({"method": "lora", "packing": True, "max_seq_length": 128}, None, "chat"),
    "dpo": ({"method": "dpo"}, make_pairs, "preference"),
    "kto": ({"method": "kto"}, make_rated, "rated"),
    "orpo": ({"method": "orpo"}, make_pairs, "preference"),
    "simpo": ({"method": "simpo"}, make_pairs, "preference"),
    "reward": ({"method": "reward"}, make_pairs, "preference"),
}


@pytest.mark.parametrize(
    "method",
    [
        method if method in ("lora", "packed", "dpo") else pytest.param(method, marks=pytest.mark.full)
        for method in METHODS
    ],
)
def test_measured_run_takes_the_same_steps_as_one_that_is_not(method: str, run: Run, tmp_path: Path) -> None:
    config, make_data, data_format = METHODS[method]
    if make_data is not None:
        config = {**config, "data": make_data(tmp_path / "data.jsonl", 48), "data_format": data_format}
    plain = run("plain", None, **config, **FIXED)
    measured = run("measured", ROOM, **config, **FIXED)
    assert step_plan(measured)["passes"] and "step_plan" not in plain.of("config")[-1]["facts"]
    assert measured.steps == plain.steps and len(plain.steps) == 2
    assert numbers(measured) == numbers(plain)


def test_chosen_plan_trains_like_the_same_one_by_configuration(run: Run) -> None:
    planned = run("planned", ROOM, **PADDED)
    rows = effective(planned)["batch_size"]
    assert rows != 4 and step_plan(planned)["batch_size"] == rows
    assert rows * effective(planned)["gradient_accumulation_steps"] == 16
    fields = {one["field"]: one for one in planned.of("config")[-1]["replaced"]}
    assert fields["batch_size"]["requested"] == 4 and "MiB" in fields["batch_size"]["reason"]
    configured = run("configured", None, **PADDED, batch_size=rows, gradient_accumulation_steps=16 // rows)
    assert planned.steps == configured.steps


def test_what_the_user_set_stays_while_layers_are_recomputed_to_fit(free: Outcome, tight: Outcome) -> None:
    assert 0 < step_plan(tight)["recomputed_layers"] <= LAYERS
    assert step_plan(tight)["passes"][0]["peak_bytes"] is None, "it ran out of memory, unharmed"
    assert effective(tight)["gradient_checkpointing"] in ("selective", True)
    assert {name: effective(tight)[name] for name in FIXED} == FIXED
    assert tight.steps == free.steps and numbers(tight) == numbers(free)


def test_run_that_fits_in_no_way_begins_with_full_recomputation_and_says_so(run: Run) -> None:
    done = run("small", 2**20, method="lora", **FIXED)
    assert effective(done)["gradient_checkpointing"] is True and not step_plan(done)["fits"]
    warnings = [record["line"] for record in done.of("message") if record["level"] == "warning"]
    assert any("may run out of memory" in text for text in warnings)


def test_data_smaller_than_a_micro_batch_is_planned_too(run: Run, tmp_path: Path) -> None:
    data = make_chat_dataset(tmp_path / "three.jsonl", 3)
    done = run("three", ROOM, data=data, method="lora", epochs=1, max_steps=1, device={"fixed_seconds": 1.0})
    assert effective(done)["batch_size"] == 4 and len(done.steps) == 1


def test_passes_are_measured_in_the_precision_of_training(
    forks: Forks, model: Path, chats: Path, tmp_path: Path
) -> None:
    """The attention refuses tensors of 32 bits, as flash attention does."""
    job = make_job(tmp_path / "half", model, chats, **COMMON, method="lora", **FIXED)
    done = forks.run(job, counted_device={"usable": ROOM}, half_attention=True)
    assert done.code == 0, done.stderr[-3000:]
    assert step_plan(done)["passes"][0]["peak_bytes"] and len(done.steps) == 2


def test_explicit_recomputation_and_micro_batch_are_not_measured(run: Run) -> None:
    done = run("explicit", ROOM, method="lora", **FIXED | {"gradient_checkpointing": "selective"})
    assert "step_plan" not in done.of("config")[-1]["facts"]
    assert effective(done)["gradient_checkpointing"] == "selective"


def test_larger_micro_batch_keeps_the_configured_size_of_evaluations(run: Run) -> None:
    texts = {"method": "lora", "packing": True, "max_seq_length": 32, "eval_split": 0.2, "eval_steps": 2}
    slow_to_start = {"fixed_seconds": 1.0}
    large = run("large", ROOM, **texts, device=slow_to_start)
    assert effective(large)["batch_size"] == 16 and effective(large)["extra"]["eval_batch_size"] == 4
    (evaluated,) = large.of("eval")
    sixteen = {"batch_size": 16, "gradient_accumulation_steps": 1}
    configured = run("configured", None, **texts, **sixteen, extra={"eval_batch_size": 4})
    assert large.steps == configured.steps
    assert evaluated["metrics"]["eval_loss"] == configured.of("eval")[0]["metrics"]["eval_loss"]


def test_resumed_run_has_the_micro_batches_of_its_checkpoint(run: Run) -> None:
    config = {**PADDED, "save_steps": 1}
    whole = run("whole", ROOM, **config)
    rows = effective(whole)["batch_size"]
    assert rows != 4
    resumed = run("resumed", None, **config, resume_from=whole.checkpoint(1))  # by itself, it would take four
    assert effective(resumed)["batch_size"] == rows
    assert resumed.of("config")[-1]["facts"]["fidelity"] == "exact"
    assert resumed.steps == {2: whole.steps[2]}


def test_repair_after_out_of_memory_recomputes_as_much_as_the_size_that_did_not_fit(
    less: int, tight: Outcome, forks: Forks, model: Path, chats: Path, tmp_path: Path
) -> None:
    changes = {"batch_size": 2, "gradient_accumulation_steps": 4}
    job = make_job(tmp_path / "repaired", model, chats, **COMMON, method="lora", **changes)
    repair = {"kind": "out_of_memory", "reason": "out of memory", "changes": changes, "instead_of": FIXED}
    done = forks.run({**job, "auto_repairs": [repair]}, counted_device={"usable": less})
    assert done.code == 0, done.stderr[-3000:]
    assert step_plan(done)["recomputed_layers"] == step_plan(tight)["recomputed_layers"] > 0
    assert {name: effective(done)[name] for name in changes} == changes
    (choice,) = (one for one in done.of("config")[-1]["replaced"] if one["field"] == "gradient_checkpointing")
    assert "`batch_size` 4, which did not fit" in choice["reason"]


@pytest.mark.parametrize("smaller_rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_all_ranks_choose_what_the_device_with_the_least_memory_needs(
    smaller_rank: int, less: int, two_ranks: TwoRanks, model: Path, chats: Path, tmp_path: Path
) -> None:
    rooms = [{"usable": less if rank == smaller_rank else ROOM} for rank in (0, 1)]
    job = make_job(tmp_path / "two", model, chats, **COMMON, method="lora", **FIXED)
    done = two_ranks.run_to_end_of_first(job, {"counted_device": rooms[1]}, counted_device=rooms[0])
    assert done.code == 0, done.stderr[-3000:]
    assert step_plan(done)["passes"][0]["peak_bytes"] is None and step_plan(done)["recomputed_layers"] > 0
    plain = two_ranks.run(make_job(tmp_path / "plain", model, chats, **COMMON, method="lora", **FIXED))
    assert done.steps == plain.steps


def test_measuring_restores_generators_buffers_gradients_modes_and_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.eval()
    model[0].longest = 7
    trainer: Any = SimpleNamespace(
        model=model, throughput=Throughput(), _metrics={"train": {"entropy": [1.0]}}, _total_train_tokens=5,
        step_phases=StepPhases(is_enabled=True, on_gpu=False),
    )  # fmt: skip
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random, drawn = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    with leaving_no_trace(trainer):
        assert model.training
        model(torch.rand(3, 4)).sum().backward()
        np.random.rand()
        model[0].longest = 9
        trainer._metrics["train"]["entropy"].append(2.0)
        trainer._total_train_tokens += 3
        trainer.throughput.record_forward(10.0)
        trainer.step_phases.enter_phase("backward")
    trainer.step_phases.enter_phase("forward")
    assert trainer.step_phases.take_seconds() == {}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random) and (np.random.get_state()[1] == drawn).all()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules()) and model[0].longest == 7
    assert trainer._metrics == {"train": {"entropy": [1.0]}} and trainer._total_train_tokens == 5
    assert vars(trainer.throughput) == vars(Throughput())
