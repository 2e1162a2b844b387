"""Every method trains, and what it writes loads with plain libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from anneal.contracts.attempt.run_facts import invalid_facts
from anneal.contracts.methods import METHODS as TRAINING_METHODS
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.training_config.raw_config import given_fields
from tests.specified_config import SpecifiedConfig
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    load_output,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_prompts,
    make_rated,
    make_tiny_model,
)
from worker.training.output import model_card

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "sft-without-adapter": {"method": "sft", "lora_r": None, "gradient_checkpointing": True},
    "lora": {"method": "lora", "use_rslora": True, "use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "lora-modules-to-save": {"method": "lora", "modules_to_save": ["embed_tokens"], "gradient_checkpointing": True},
    "qlora": {"method": "qlora"},
    "qlora-8bit": {"method": "qlora", "load_in_8bit": True},
    "qlora-fp4": {"method": "qlora", "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "bfloat16"},
    "sft": {"method": "sft", "neftune_noise_alpha": 5.0, "extra": {"max_grad_norm": 0.0, "adam_beta2": 0.99}},
}
COMMON: dict[str, Any] = {
    "max_seq_length": 64, "learning_rate": 2e-2, "max_steps": 4, "logging_steps": 1, "batch_size": 4,
    "gradient_accumulation_steps": 1, "optim": "adamw_torch",
}  # fmt: skip


def generates(output: Path, base: Path) -> str:
    """What the exported model writes, loaded as its card says."""
    model = load_output(output, base)
    tokenizer = AutoTokenizer.from_pretrained(str(output))
    chat = [{"role": "user", "content": "what is row 3"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    return str(tokenizer.decode(written[0]))


def completed(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert outcome.result["outcome"] == "completed", outcome.result
    return outcome


@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_and_its_output_loads_with_plain_libraries_and_generates(
    method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = completed(forks.run(make_job(tmp_path, tiny_model, chats, **METHODS[method] | COMMON)))
    losses = [record["loss"] for record in done.of("metric")]
    assert losses[-1] < losses[0]
    adapter = METHODS[method].get("lora_r", 16) is not None and method != "full"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert (done.output / weights).stat().st_mode & 0o777 == 0o644
    assert "<|user|>\nwhat is row 3\n<|assistant|>\n" in generates(done.output, tiny_model)
    card = (done.output / "README.md").read_text()
    assert "from_pretrained" in card and '"learning_rate": 0.02' in card and "torch 2." in card
    points = [json.loads(line) for line in (done.output / "metrics.jsonl").read_text().splitlines()]
    assert [point["loss"] for point in points] == losses
    assert [path.name for path in done.folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=pytest.mark.full) if one in ("sft", "full") else one for one in TRAINING_METHODS]
)
def test_the_specified_dictionary_trains_with_every_method(
    method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    row = TRAINING_METHODS[TrainingMethod(method)]
    make_data = {"preference": make_pairs, "rated": make_rated, "prompt": make_prompts}.get(row.formats[0])
    data = make_data(tmp_path / "data.jsonl", 16) if make_data else chats
    config = SpecifiedConfig("tiny", method, max_steps=1, batch_size=2, gradient_accumulation_steps=2).to_dict()
    if row.generates:
        options = {"num_generations": 4, "max_completion_length": 8, "rewards": [{"type": "length", "max": 20}]}
        config[method] = options
    elif row.has_teacher:
        config[method] = {"teacher": "tiny"}
    job = make_job(
        tmp_path, tiny_model, data, data_format=row.formats[0], **{k: v for k, v in config.items() if k != "base_model"}
    )
    if row.has_teacher:
        job["teacher"] = {"name": "tiny", "path": str(tiny_model), "hub": None, "revision": None}
    done = completed(forks.run({**job, "user_set_fields": sorted(given_fields(config))}))
    (reported,) = done.of("config")
    assert reported["effective"]["max_seq_length"] == 256
    assert reported["effective"]["gradient_checkpointing"] is True


@pytest.mark.parametrize("requested", [None, pytest.param(100, marks=pytest.mark.full)])
def test_the_effective_length_is_the_one_in_use(
    requested: int | None, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = forks.run(make_job(tmp_path, tiny_model, chats, method="full", max_steps=1, max_seq_length=requested))
    (reported,) = completed(done).of("config")
    assert reported["effective"]["max_seq_length"] == reported["facts"]["max_length"] == (requested or 256)


def test_the_first_facts_come_before_the_first_step(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = completed(forks.run(make_job(tmp_path, tiny_model, chats, method="qlora", lora_r=2, max_steps=2)))
    kinds = [record["type"] for record in done.records]
    assert kinds.index("config") < kinds.index("metric")
    (reported,) = done.of("config")
    assert reported["facts"]["parameters_total"] - reported["facts"]["parameters_trainable"] == 29_536
    assert reported["facts"]["versions"]["torch"].startswith("2.")
    assert invalid_facts(reported["facts"]) == []
    assert {one["field"] for one in reported["replaced"]} == {
        "gradient_checkpointing",
        "bnb_4bit_compute_dtype",
        "max_seq_length",
    }
    assert reported["effective"]["max_seq_length"] == 256
    assert reported["effective"]["optim"] == "adamw_torch_fused"
    phases = [record["name"] for record in done.of("phase")]
    assert phases == ["loading", "tokenizing", "loading", "training", "saving", "exporting"]


def on_adapter(folder: Path, adapter: Path, base: dict[str, Any], data: Path, method: str) -> dict[str, Any]:
    """A job whose base model is the output of a run, an adapter of which the worker has located the base."""
    job = make_job(folder, adapter, data, method=method, **COMMON)
    return {**job, "base_model": {**job["base_model"], "base": base}}


def check_program_loads(lines: list[str], done: Outcome, model: Path) -> None:
    """Run the program of a model card; it loads what `load_output` loads."""
    loaded: dict[str, Any] = {}
    exec("\n".join(lines), loaded)
    ids = torch.arange(5, 25).reshape(1, 20)
    with torch.inference_mode():
        assert torch.equal(loaded["model"].eval()(ids).logits, load_output(done.output, model).eval()(ids).logits)
    assert loaded["tokenizer"].chat_template


def check_card_loads(done: Outcome, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the program of the model card in the output's folder, and that for its repository on the hub."""
    card = (done.output / "README.md").read_text()
    with monkeypatch.context() as patched:
        patched.chdir(done.output)
        check_program_loads(card.split("```python\n")[1].split("```")[0].splitlines(), done, model)

        (folder / "ada").mkdir()
        (folder / "ada" / "tuned").symlink_to(done.output)
        patched.chdir(folder)
        patched.setattr("huggingface_hub.snapshot_download", lambda repository: str(folder / repository))
        run: Any = SimpleNamespace(
            job=SimpleNamespace(base_model=SimpleNamespace(hub=None, name="run_full")),
            config=SimpleNamespace(push_to_hub="ada/tuned"),
        )
        lines = model_card._loading_program(run, adapter=True, is_reward_model=False, has_own_base=True)
        check_program_loads(lines, done, model)


def test_runs_build_on_runs_also_on_adapters_of_quantized_bases(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, method="full", **COMMON)))
    adapter = completed(forks.run(make_job(tmp_path / "2", full.output, chats, method="qlora", **COMMON)))
    on_full = {"name": "run_full", "path": str(full.output), "hub": None, "revision": None}
    again = completed(forks.run(on_adapter(tmp_path / "3", adapter.output, on_full, chats, "qlora")))
    assert (again.output / "base_model" / "model.safetensors").is_file()
    assert not (again.folder / "base_model").exists()
    assert "<|assistant|>" in generates(again.output, tiny_model)
    check_card_loads(again, tiny_model, tmp_path, monkeypatch)
    last = full.of("metric")[-1]["loss"]
    assert adapter.of("metric")[0]["loss"] < last + 0.3
    assert again.of("metric")[0]["loss"] < adapter.of("metric")[0]["loss"]
    own = {"name": "base_model", "path": str(again.output / "base_model"), "hub": None, "revision": None}
    whole = completed(forks.run(on_adapter(tmp_path / "4", again.output, own, chats, "full")))
    assert whole.of("metric")[0]["loss"] < again.of("metric")[0]["loss"]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = METHODS["qlora"] | COMMON | {"max_steps": 2}
    first, second, other = (
        completed(forks.run(make_job(tmp_path / str(n), tiny_model, chats, **config, seed=seed)))
        for n, seed in enumerate((7, 7, 8))
    )
    assert first.steps == second.steps != other.steps


def test_evaluations_change_nothing_in_the_training(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    # Without dropout: with it an evaluation draws a random number, as it does in the trainer it builds on.
    config = METHODS["qlora"] | COMMON | {"lora_dropout": 0.0}
    few = make_chat_dataset(tmp_path / "few.jsonl", 5)
    tiny_model = make_tiny_model(tmp_path / "model")
    plain = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, **config)))
    watched = completed(forks.run(make_job(tmp_path / "2", tiny_model, chats, eval_data=few, eval_steps=1, **config)))
    assert [record["step"] for record in watched.of("eval")] == [1, 2, 3, 4]
    measures = watched.of("eval")[-1]["metrics"]
    assert measures["eval_perplexity"] > 1 and 0 <= measures["eval_token_accuracy"] <= 1
    assert watched.steps == plain.steps


def test_an_evaluation_before_the_first_step_reports_where_training_begins(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = METHODS["lora"] | COMMON | {"eval_split": 0.2, "eval_steps": 2, "extra": {"eval_on_start": True}}
    done = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, **config)))
    reported = {record["step"]: record["metrics"]["eval_loss"] for record in done.of("eval")}
    assert list(reported) == [0, 2, 4]
    assert reported[0] > reported[4]
    assert [record["step"] for record in done.of("checkpoint")] == [2, 4]
    again = make_job(tmp_path / "2", tiny_model, chats, attempt=2, resume_from=done.checkpoint(2), **config)
    assert [record["step"] for record in completed(forks.run(again)).of("eval")] == [4]


@pytest.mark.parametrize(
    ("method", "data_format", "make", "measures"),
    [
        ("lora", "chat", make_chat_dataset, ["token_accuracy", "entropy", "perplexity"]),
        ("reward", "preference", make_pairs, ["preference_accuracy", "reward_margin", "reward_mean"]),
        pytest.param("dpo", "preference", make_pairs, ["reward_margin", "logps_chosen"], marks=pytest.mark.full),
        pytest.param("kto", "rated", make_rated, [], marks=pytest.mark.full),
    ],
)
def test_the_batch_size_of_an_evaluation_does_not_change_its_results(
    method: str, data_format: str, make: Any, measures: list[str], forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make(tmp_path / "data.jsonl", 8)
    config = COMMON | {"method": method, "max_steps": 1, "eval_steps": 1, "lora_dropout": 0.0, "load_in_4bit": False}
    if method == "kto":
        config["kto"] = {"loss_type": "apo_zero_unpaired"}  # no term compares rows with each other
    one_batch, several = (
        completed(
            forks.run(
                make_job(
                    tmp_path / str(size), tiny_model, data, data_format=data_format, eval_data=data,
                    extra={"eval_batch_size": size}, **config,
                )
            )
        ).of("eval")[-1]["metrics"]
        for size in (8, 3)
    )  # fmt: skip
    for name in ("loss", *measures):
        assert several[f"eval_{name}"] == pytest.approx(one_batch[f"eval_{name}"], rel=2e-6), name


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.full)])
def test_an_evaluation_may_be_limited_to_the_first_rows(
    method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = METHODS[method] | COMMON | {"max_steps": 2, "eval_steps": 1}
    first = tmp_path / "first.jsonl"
    first.write_text("".join(chats.read_text().splitlines(keepends=True)[:3]))
    few, limited, more = (
        completed(forks.run(make_job(tmp_path / name, tiny_model, chats, eval_data=data, **config, **fields)))
        for name, data, fields in (
            ("few", first, {}), ("limited", chats, {"max_eval_rows": 3}), ("more", first, {"max_eval_rows": 10})
        )
    )  # fmt: skip
    losses = [[record["metrics"]["eval_loss"] for record in run.of("eval")] for run in (few, limited, more)]
    assert len(losses[0]) == 2 and losses[0] == losses[1] == losses[2]
    assert few.steps == limited.steps
    assert [run.of("config")[0]["facts"]["eval_rows"] for run in (few, limited, more)] == [3, 3, 3]


def test_the_training_rows_stay_if_fewer_held_out_rows_are_evaluated(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = METHODS["lora"] | COMMON | {"max_steps": 1, "eval_split": 0.3, "eval_steps": 1}
    whole = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, **config)))
    limited = completed(forks.run(make_job(tmp_path / "2", tiny_model, chats, max_eval_rows=2, **config)))
    rows = [run.of("config")[0]["facts"] for run in (whole, limited)]
    assert rows[0]["rows"] == rows[1]["rows"] and rows[0]["eval_rows"] > rows[1]["eval_rows"] == 2
    assert whole.steps == limited.steps


def test_the_first_batch_only_can_be_overfitted(forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    job = make_job(tmp_path, tiny_model, chats, method="full", overfit_first_batch=True, **COMMON)
    done = completed(forks.run(job))
    assert {tuple(sorted(rows)) for _, rows in done.steps.values()} == {(0, 1, 2, 3)}
    assert len(done.steps) == 4


def test_min_steps_repeats_the_data(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    config = {name: value for name, value in COMMON.items() if name != "max_steps"} | {"epochs": 1, "min_steps": 5}
    data = make_chat_dataset(tmp_path / "chats.jsonl", 16)
    done = completed(forks.run(make_job(tmp_path, tiny_model, data, method="lora", **config)))
    assert len(done.steps) == 5
    assert done.result["epoch"] == pytest.approx(1.25)


def test_an_architecture_without_weights_is_trained_from_scratch(
    forks: Forks, chats: Path, tmp_path: Path, copy_model: Callable[[], Path]
) -> None:
    model = copy_model()
    (model / "model.safetensors").unlink()
    config = COMMON | {"max_steps": 2}
    first, second = (
        completed(forks.run(make_job(tmp_path / str(n), model, chats, method="full", **config))) for n in range(2)
    )
    assert first.steps == second.steps
    assert "<|assistant|>" in generates(first.output, model)
