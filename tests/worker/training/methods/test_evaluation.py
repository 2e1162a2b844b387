"""Evaluations without training: they equal those of the training whose weights they load."""

import socket
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.methods import EVALUATION_METRICS, METHODS, TrainingMethod
from anneal.contracts.stop import StopRequest
from tests.worker.training.tiny import Forks, Outcome, make_chat_dataset, make_job, make_pairs, make_prompts, make_rated
from tests.worker.training.two_ranks import TwoRanks
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods.dpo import PreferenceTrainer
from worker.training.methods.kto import RatedAnswerTrainer
from worker.training.methods.reward_model import RewardModelTrainer
from worker.training.methods.rlhf import GroupTrainer
from worker.training.methods.sft import SupervisedTrainer

COMMON: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 4, "save_steps": 2, "eval_steps": 2, "batch_size": 2, "learning_rate": 1e-2,
    "gradient_accumulation_steps": 2, "optim": "adamw_torch", "load_in_4bit": False, "save_total_limit": None,
}  # fmt: skip
LENGTH = {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30}
DATA: dict[str, Any] = {
    "chat": make_chat_dataset, "preference": make_pairs, "rated": make_rated, "prompt": make_prompts,
}  # fmt: skip
MAIN = ("eval_loss", "eval_perplexity", "eval_preference_accuracy", "eval_reward_margin")
NOT_COMPARED = ("eval_seconds", "eval_samples_per_second")


def evaluation_job(
    folder: Path, model: Path, data: Path, weights: Path | None = None, step: int = 0, **fields: Any
) -> dict[str, Any]:
    loaded = {"path": str(weights), "step": step, "epoch": 0.5} if weights else None
    job = make_job(folder, model, data, **fields) | {"task": "evaluate", "weights": loaded}
    job.setdefault("reward_models", [])
    return job


def metrics_of(outcome: Outcome) -> dict[str, Any]:
    """The metrics of the only evaluation, but for those about time; the run has completed and has no output."""
    assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-2000:])
    (record,) = outcome.of("eval")
    assert outcome.steps == {} and outcome.of("checkpoint") == outcome.of("metric") == []
    assert outcome.result["output"] is None and not outcome.output.exists()
    return {name: value for name, value in record["metrics"].items() if name not in NOT_COMPARED}


def main_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the main data; those of the extra sets `same`, with the same rows, and `seen` are checked."""
    same, seen = (
        {f"eval_{name.removeprefix(prefix)}": value for name, value in metrics.items() if name.startswith(prefix)}
        for prefix in ("eval_same_", "eval_seen_")
    )
    main = {name: value for name, value in metrics.items() if not name.startswith(("eval_same_", "eval_seen_"))}
    assert same.keys() == seen.keys() == main.keys()
    timeless = [{name: one[name] for name in one if name not in NOT_COMPARED} for one in (same, seen, main)]
    assert timeless[0] == timeless[2] != timeless[1]
    return main


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        pytest.param("full", {}, marks=pytest.mark.full),
        ("lora", {"lora_r": 4, "lora_dropout": 0.1}),
        ("dpo", {"lora_r": 4}),
        pytest.param("dpo", {"lora_r": None}, marks=pytest.mark.full),
        pytest.param("kto", {"lora_r": 4}, marks=pytest.mark.full),
        pytest.param("orpo", {"lora_r": 4}, marks=pytest.mark.full),
        pytest.param("simpo", {"lora_r": 4}, marks=pytest.mark.full),
        pytest.param("reward", {"lora_r": 4}, marks=pytest.mark.full),
    ],
)
def test_an_evaluation_equals_that_of_the_training_and_does_not_depend_on_the_batch_size(
    method: str, fields: dict[str, Any], forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data_format = METHODS[TrainingMethod(method)].formats[0]
    data, held_out = DATA[data_format](tmp_path / "data.jsonl", 16), DATA[data_format](tmp_path / "held_out.jsonl", 10)
    config = {"method": method, "export": "last", **fields, **COMMON}
    trained = forks.run(
        make_job(
            tmp_path / "train", tiny_model, data, eval_data=held_out, extra_eval={"same": held_out, "seen": data},
            data_format=data_format, **config,
        )
    )  # fmt: skip
    assert trained.result["outcome"] == "completed", (trained.result, trained.stderr[-2000:])
    during = {one["step"]: main_metrics(one["metrics"]) for one in trained.of("eval")}
    places = [(trained.folder / "checkpoint-2", 2, {}), (trained.output, 4, {})]
    row = METHODS[TrainingMethod(method)]
    if row.has_teacher or not row.mixes_rows:  # an evaluation generates nothing
        places.append((trained.output, 4, {"extra": {"eval_batch_size": 3}}))
    for number, (weights, step, more) in enumerate(places):
        job = evaluation_job(
            tmp_path / str(number), tiny_model, held_out, weights, step, data_format=data_format, **config, **more
        )
        done = forks.run(job)
        again = metrics_of(done)
        assert (done.of("eval")[0]["step"], done.result["step"]) == (step, step)
        expected = {name: value for name, value in during[step].items() if name not in NOT_COMPARED}
        if more:  # others, such as the lowest reward, are means of batches
            expected, again = ({name: one[name] for name in MAIN if name in one} for one in (expected, again))
        # Reference log-probabilities are computed in batches of other shapes; then the last bits may differ.
        exact = not more and method in ("full", "lora", "reward")
        assert again == (expected if exact else pytest.approx(expected, rel=1e-4, abs=1e-5))
    phases = [record["name"] for record in done.of("phase")]
    assert phases == ["loading", "tokenizing", "loading", "evaluating"]
    assert done.of("config")[0]["facts"]["eval_rows"] == 10
    assert trained.of("config")[0]["facts"]["extra_eval_rows"] == {"same": 10, "seen": 16}
    assert "- evaluation `seen`: `ds_test`" in (trained.output / "README.md").read_text()


@pytest.mark.parametrize(
    "trainer", [SupervisedTrainer, PreferenceTrainer, RatedAnswerTrainer, RewardModelTrainer, GroupTrainer]
)
def test_no_extra_set_can_have_the_name_of_a_metric(trainer: type[ServiceTrainerMixin]) -> None:
    assert EVALUATION_METRICS.issuperset(trainer.MEASURES.values())


def test_extra_sets_change_nothing_in_learning_from_rewards(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = make_prompts(tmp_path / "prompts.jsonl", 6)
    config = COMMON | {
        "batch_size": 4, "method": "rlhf", "lora_r": 4, "lora_dropout": 0.1, "eval_split": 0.4, "max_steps": 3,
        "max_eval_rows": 2,
        "rlhf": {"num_generations": 2, "max_completion_length": 8, "rewards": [LENGTH]},
    }  # fmt: skip
    plain, extra = (
        forks.run(make_job(tmp_path / name, tiny_model, data, data_format="prompt", extra_eval=extra, **config)
                  | {"reward_models": []})
        for name, extra in (("plain", {}), ("extra", {"all": data, "again": data}))
    )  # fmt: skip
    assert plain.result["outcome"] == extra.result["outcome"] == "completed", extra.stderr[-2000:]
    assert len(plain.steps) == 3 and plain.steps == extra.steps
    assert plain.result["metrics"] == extra.result["metrics"]
    assert extra.of("config")[0]["facts"]["extra_eval_rows"] == {"all": 2, "again": 2}
    for without, other in zip(plain.of("eval"), extra.of("eval"), strict=True):
        assert {name: other["metrics"][name] for name in without["metrics"] if name not in NOT_COMPARED} == {
            name: value for name, value in without["metrics"].items() if name not in NOT_COMPARED
        }
        # Each set is sampled with the random state of the step, so a set more or less changes none of them.
        assert other["metrics"]["eval_all_reward"] == other["metrics"]["eval_again_reward"]
        assert {"eval_all_loss", "eval_all_reward_length"} <= other["metrics"].keys()


def test_a_base_model_is_evaluated_as_it_is_on_the_first_rows(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first.jsonl"
    first.write_text("".join(chats.read_text().splitlines(keepends=True)[:3]))
    config = COMMON | {"method": "full", "eval_steps": None}
    limited, few = (
        forks.run(evaluation_job(tmp_path / name, tiny_model, data, **config, **fields))
        for name, data, fields in (("limited", chats, {"max_eval_rows": 3}), ("few", first, {}))
    )
    assert metrics_of(limited) == metrics_of(few)
    trained = forks.run(
        make_job(
            tmp_path / "train", tiny_model, chats, eval_data=first,
            **config | {"max_steps": 1, "eval_steps": 1, "extra": {"eval_on_start": True}},
        )
    )  # fmt: skip
    assert trained.of("eval")[0]["metrics"]["eval_loss"] == metrics_of(few)["eval_loss"]


@pytest.mark.parametrize(
    ("data_format", "method"), [("chat", "sft"), pytest.param("rated", "kto", marks=pytest.mark.full)]
)
def test_adapter_of_a_preference_run_has_the_loss_of_its_merged_output_on_data_of_another_method(
    data_format: str, method: str, forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    """They reach the weights by different ways: an adapter on the base, and the files of a whole model."""
    pairs, held_out = make_pairs(tmp_path / "pairs.jsonl", 16), DATA[data_format](tmp_path / "held_out.jsonl", 6)
    config = COMMON | {"eval_steps": None, "extra": {"eval_batch_size": 2}}
    fields = {"method": "dpo", "lora_r": 4, "output": "merged", "export": "last"}
    trained = forks.run(
        make_job(tmp_path / "train", tiny_model, pairs, data_format="preference", **config | fields)
    )  # fmt: skip
    assert trained.result["outcome"] == "completed", (trained.result, trained.stderr[-2000:])
    ways: dict[str, tuple[Path, Path | None, int | None]] = {
        "adapter": (tiny_model, trained.folder / "checkpoint-4", 4),
        "merged": (trained.output, None, None) if method == "sft" else (tiny_model, trained.output, None),
        "base": (tiny_model, None, None),
    }
    metrics = {
        name: metrics_of(
            forks.run(
                evaluation_job(
                    tmp_path / name, model, held_out, weights, 4, data_format=data_format,
                    **config | {"method": method, "lora_r": rank},
                )
            )
        )
        for name, (model, weights, rank) in ways.items()
    }  # fmt: skip
    assert metrics["adapter"]["eval_loss"] == pytest.approx(metrics["merged"]["eval_loss"], rel=1e-4)
    assert abs(metrics["adapter"]["eval_loss"] - metrics["base"]["eval_loss"]) > 1e-3


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_completions_of_prompts_are_rewarded(
    devices: int, forks: Forks, two_ranks: TwoRanks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make_prompts(tmp_path / "prompts.jsonl", 3)
    config = COMMON | {"batch_size": 4, "rlhf": {"num_generations": 2, "max_completion_length": 8, "rewards": [LENGTH]}}
    job = evaluation_job(tmp_path, tiny_model, data, data_format="prompt", method="rlhf", lora_r=None, **config)
    done = forks.run(job) if devices == 1 else two_ranks.run(job)
    assert {"eval_reward", "eval_reward_length"} <= metrics_of(done).keys()


@pytest.mark.parametrize(
    ("method", "sharded"),
    [
        pytest.param("lora", False, marks=pytest.mark.full),
        pytest.param("dpo", False, marks=pytest.mark.full),
        pytest.param("reward", False, marks=pytest.mark.full),
        ("dpo", True),
        pytest.param("lora", True, marks=pytest.mark.full),
    ],
)
def test_two_devices_evaluate_as_one_does(
    method: str, sharded: bool, forks: Forks, two_ranks: TwoRanks, tiny_model: Path, tmp_path: Path
) -> None:
    """Of seven rows, one evaluates four and the other three; a single row leaves the second one without any."""
    data_format = {"lora": "chat"}.get(method, "preference")
    data, held_out = (DATA[data_format](tmp_path / f"{rows}.jsonl", rows) for rows in (16, 7))
    config = {"method": method, "lora_r": 4, **COMMON, "max_steps": 2}
    trained = forks.run(
        make_job(tmp_path / "train", tiny_model, data, eval_data=held_out, data_format=data_format, **config)
    )
    assert trained.result["outcome"] == "completed", (trained.result, trained.stderr[-2000:])
    for rows in (7, 1):
        one_device, two_devices = (
            metrics_of(
                ranks.run(
                    evaluation_job(
                        tmp_path / f"{name}-{rows}", tiny_model, held_out, trained.output, 2, data_format=data_format,
                        **config, max_eval_rows=rows,
                    )
                    | {"sharded": sharded}
                )
            )
            for name, ranks in (("one", forks), ("two", two_ranks))
        )  # fmt: skip
        compared = [name for name in MAIN if name in one_device]
        assert two_devices.keys() == one_device.keys() and compared
        assert [two_devices[name] for name in compared] == pytest.approx(
            [one_device[name] for name in compared], rel=1e-5, abs=1e-5
        )


def test_a_stop_ends_it_without_a_result(forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    job = evaluation_job(tmp_path, tiny_model, chats, method="full", **COMMON | {"eval_steps": None})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        forks.start(job, control=tmp_path / "control")
        control, _ = listening.accept()
    with control:
        control.send(ControlMessage(stop=StopRequest("discard")).to_json())
        ended = forks.wait()
    assert (ended.result["outcome"], ended.result["why"], ended.of("eval")) == ("stopped", "stop", [])
