"""Distillation: its losses equal plain TRL's, it learns, and a teacher that cannot be learned from is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.methods.plain_trl import plain_losses
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    load_output,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_tiny_model,
    write_rows,
)
from tests.worker.training.two_ranks import TwoRanks

ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"lora_r": None},
    "lora": {"load_in_4bit": False, "lora_dropout": 0.0},
    "qlora": {"lora_dropout": 0.0},
}
COMMON: dict[str, Any] = {
    "method": "gkd", "max_steps": 6, "logging_steps": 1, "batch_size": 4, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "optim": "adamw_torch", "max_seq_length": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model to train, and a teacher with more layers."""
    folder = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(folder / "student", chat_template=CHATML),
        make_tiny_model(folder / "teacher", chat_template=CHATML, layers=2, seed=7),
    )


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return make_chat_dataset(tmp_path / "chats.jsonl", 40)


def source(path: Path, **more: Any) -> dict[str, Any]:
    return {"name": "teacher", "path": str(path), "hub": None, "revision": None, **more}


def distillation(folder: Path, model: Path, teacher: Path, data: Path, gkd: dict[str, Any], **config: Any) -> Any:
    options = {"teacher": "teacher", "max_completion_length": 12, **gkd}
    job = make_job(folder, model, data, **{"data_format": "chat", **COMMON, **config}, gkd=options)
    return {"reward_models": [], **job, "teacher": source(teacher)}


def completed(outcome: Outcome) -> Outcome:
    assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-3000:])
    return outcome


def losses(outcome: Outcome) -> list[float]:
    return [float.fromhex(loss) for loss, _ in completed(outcome).steps.values()]


@pytest.mark.parametrize(
    ("adapter", "beta"),
    [
        pytest.param(adapter, beta, marks=[] if (adapter, beta) == ("full", 0.3) else pytest.mark.full)
        for adapter in ADAPTERS
        for beta in (0.0, 0.3, 1.0)
    ],
)
def test_losses_of_gkd_on_the_answers_of_the_data_equal_plain_trls(
    adapter: str, beta: float, forks: Forks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    job = distillation(tmp_path, *models, chats, {"lmbda": 0.0, "beta": beta}, **ADAPTERS[adapter])
    theirs = plain_losses(
        "gkd", models[0], chats, tmp_path / "plain", adapter, steps=6, batch_size=4, lmbda=0.0, beta=beta,
        max_length=128, teacher_model=AutoModelForCausalLM.from_pretrained(models[1]),
    )  # fmt: skip
    assert losses(forks.run(job)) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("adapter", "seq_kd"),
    [("lora", False), *(pytest.param(adapter, True, marks=pytest.mark.full) for adapter in ADAPTERS)],
)
def test_a_model_comes_closer_to_its_teacher_with_answers_that_are_generated(
    adapter: str, seq_kd: bool, forks: Forks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    gkd = {"lmbda": 0.0 if seq_kd else 1.0, "seq_kd": seq_kd}
    evaluation = {"eval_split": 0.2, "eval_steps": 3}
    done = completed(forks.run(distillation(tmp_path, *models, chats, gkd, **ADAPTERS[adapter], **evaluation)))
    evaluated = [record["metrics"]["eval_loss"] for record in done.of("eval")]
    assert evaluated[-1] < evaluated[0]
    points = [record["extra"] for record in done.of("metric")]
    assert all(1 <= point["completion_length"] <= 12 for point in points)
    assert done.of("config")[0]["facts"]["flops_not_counted"].startswith("the teacher's forward passes")
    load_output(done.output, models[0])


def test_generated_answers_do_not_depend_on_published_generation_options(
    forks: Forks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    options = {
        "repetition_penalty": 5.0, "min_p": 0.9, "typical_p": 0.2, "num_beams": 2, "return_dict_in_generate": True,
    }  # fmt: skip
    published = [shutil.copytree(model, tmp_path / model.name) for model in models]
    for folder in published:
        path = folder / "generation_config.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | options))
    plain, other = (
        losses(forks.run(distillation(tmp_path / name, *pair, chats, {"seq_kd": True}, lora_r=None, max_steps=3)))
        for name, pair in (("plain", models), ("other", published))
    )
    assert plain == other


def test_a_teacher_with_another_tokenizer_is_refused(
    forks: Forks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = forks.run(distillation(tmp_path / "run", models[0], other, chats, {})).result
    assert refused["error"]["code"] == "config_error"
    assert refused["error"]["message"].startswith("The teacher teacher has another tokenizer: 2 tokens of the run")


@pytest.mark.full
def test_a_teacher_may_be_the_output_of_a_run_and_answers_completions(
    forks: Forks, models: tuple[Path, Path], tmp_path: Path
) -> None:
    model, base = models
    pairs = [json.loads(line) for line in make_pairs(tmp_path / "pairs.jsonl", 40).read_text().splitlines()]
    data = write_rows(
        tmp_path / "completions.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    )
    config = COMMON | {"method": "lora", "data_format": "prompt_completion"}
    trained = completed(forks.run(make_job(tmp_path / "teacher", base, data, **config)))
    job = distillation(tmp_path / "run", model, trained.output, data, {}, data_format="prompt_completion")
    job["teacher"]["base"] = source(base)
    assert len(losses(forks.run(job))) == 6


@pytest.mark.full
def test_two_devices_distill_as_one_with_twice_the_batch(
    forks: Forks, two_ranks: TwoRanks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    of_one_device, of_two = (
        distillation(tmp_path / str(size), *models, chats, {"lmbda": 0.0}, lora_r=None, batch_size=size)
        for size in (4, 2)
    )
    assert losses(two_ranks.run(of_two | {"sharded": False})) == pytest.approx(
        losses(forks.run(of_one_device)), rel=1e-5
    )


@pytest.mark.full
def test_a_teacher_that_takes_fewer_tokens_is_refused(
    forks: Forks, models: tuple[Path, Path], chats: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(models[1], short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    refused = forks.run(distillation(tmp_path / "run", models[0], short, chats, {})).result
    assert refused["error"]["message"].startswith("The teacher teacher takes at most 64 tokens, but a sequence may")
