"""Adapters with first values from the base: a resumed run is exact, and outputs work on the unchanged base."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.worker.training.output.outputs import figures, weights
from tests.worker.training.tiny import Forks, Outcome, load_output, make_job, make_pairs, write_rows
from worker.training.model.adapter_init import FIRST_VALUES
from worker.training.model.loader import keep_evaluation_neutral

CONFIG: dict[str, Any] = {
    "lora_r": 4, "max_steps": 4, "save_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1,
    "max_seq_length": 64, "learning_rate": 1e-2, "lora_dropout": 0.1,
}  # fmt: skip
LORA = {"method": "lora", **CONFIG}


@pytest.fixture(scope="module", params=["pissa", pytest.param("olora", marks=pytest.mark.full)])
def original(
    request: pytest.FixtureRequest,
    forks: Forks,
    tiny_model: Path,
    chats: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """A run whose adapter changes the base weights."""
    folder = tmp_path_factory.mktemp(request.param)
    rslora = request.param == "olora"
    done = forks.run(make_job(folder, tiny_model, chats, **LORA, init_lora_weights=request.param, use_rslora=rslora))
    assert done.result["outcome"] == "completed", (done.result, done.stderr)
    return done


def resumed(forks: Forks, original: Outcome, folder: Path, **changes: Any) -> Outcome:
    job = original.job
    config = {name: job["config"][name] for name in job["user_set_fields"] if name != "base_model"} | changes
    data, model = job["dataset"]["path"], job["base_model"]["path"]
    again = forks.run(make_job(folder, model, data, attempt=2, resume_from=original.checkpoint(2), **config))
    assert again.result["outcome"] == "completed", (again.result, again.stderr)
    return again


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20) * 7 % 500
    result: torch.Tensor = model.eval()(input_ids=ids).logits
    return result


def test_a_resumed_run_equals_the_undisturbed_one(original: Outcome, forks: Forks, tmp_path: Path) -> None:
    again = resumed(forks, original, tmp_path)
    assert again.steps == {step: reported for step, reported in original.steps.items() if step > 2}
    assert weights(again) == weights(original)
    assert figures(again) == figures(original)


def test_the_output_on_the_unchanged_base_is_what_peft_makes_of_the_checkpoint(
    original: Outcome, forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    base = logits(AutoModelForCausalLM.from_pretrained(tiny_model))
    trained = logits(load_output(original.output, tiny_model))
    checkpoint = Path(original.checkpoint(4)["path"])
    # peft decomposes the base once more, and subtracts the first values from it.
    as_peft_loads_it = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(checkpoint))
    torch.testing.assert_close(trained, logits(as_peft_loads_it), atol=1e-4, rtol=1e-4)
    assert (trained - base).abs().max() > 1e-2, "it has learned something"
    described = json.loads((original.output / "adapter_config.json").read_text())
    assert (described["r"], described["init_lora_weights"]) == (8, True)
    assert (checkpoint / FIRST_VALUES).is_file() and not (original.output / FIRST_VALUES).exists()
    merged = resumed(forks, original, tmp_path, output="merged")
    torch.testing.assert_close(logits(load_output(merged.output, tiny_model)), trained, atol=1e-4, rtol=1e-4)


def test_an_evaluation_of_the_output_or_of_a_checkpoint_is_of_the_trained_model(
    original: Outcome, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = {name: original.job["config"][name] for name in original.job["user_set_fields"] if name != "base_model"}
    losses = []
    for number, path in enumerate((original.output, Path(original.checkpoint(4)["path"])), 1):
        job = make_job(tmp_path / str(number), tiny_model, chats, **config)
        job |= {"task": "evaluate", "weights": {"path": str(path), "step": 4, "epoch": 0.2}}
        losses.append(forks.run(job).result["metrics"]["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    pairs = make_pairs(tmp_path / "pairs.jsonl", 6)
    options = {"max_seq_length": 64, "batch_size": 2, "method": "dpo", "load_in_4bit": False}
    merged = load_output(original.output, tiny_model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "merged")
    compared = []
    for number, (path, adapter) in enumerate(((original.output, config), (tmp_path / "merged", {"lora_r": None})), 3):
        fields = {name: adapter[name] for name in ("lora_r", "use_rslora") if name in adapter}
        job = make_job(tmp_path / str(number), tiny_model, pairs, data_format="preference", **options, **fields)
        job |= {"task": "evaluate", "weights": {"path": str(path), "step": 4, "epoch": 0.2}}
        compared.append(forks.run(job).result["metrics"]["eval_loss"])
    assert compared[0] == pytest.approx(compared[1], abs=1e-4) != pytest.approx(math.log(2), abs=1e-3)
    model = load_output(original.output, tiny_model)
    assert losses[0] < 1.2 * float(original.of("metric")[-1]["loss"]), (losses, type(model))


def test_loftq_starts_closer_to_the_unquantized_base_than_the_quantized_one(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = {**CONFIG, "method": "qlora", "lora_r": 48, "learning_rate": 1e-12, "max_steps": 1}
    exact = logits(AutoModelForCausalLM.from_pretrained(tiny_model))
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    errors = {}
    for init in ("default", "loftq"):
        done = forks.run(make_job(tmp_path / init, tiny_model, chats, **config, init_lora_weights=init))
        assert done.result["outcome"] == "completed", done.result["error"]
        model = load_output(done.output, tiny_model, quantization_config=four_bit, device_map={"": "cpu"})
        keep_evaluation_neutral(model)
        errors[init] = float((logits(model) - exact).norm())
    assert errors["loftq"] < 0.7 * errors["default"], errors


def test_trained_tokens_of_tied_embeddings_are_those_of_input_and_output_in_a_run_as_in_its_output(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "tied"
    AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=True).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model)
    ids = (torch.arange(40) * 7 % 40 + 5).reshape(2, 20)
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": row} for row in ids.tolist()])
    config = {**LORA, "lora_dropout": 0.0, "trainable_token_indices": [*range(5, 45)], "eval_steps": 4}
    original = forks.run(
        make_job(tmp_path / "run", model, rows, data_format="tokenized", eval_data=rows, **config, output="merged")
    )
    assert original.result["outcome"] == "completed", (original.result, original.stderr)
    reported = original.of("eval")[-1]["metrics"]["eval_loss"]
    base, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (model, original.output))
    assert (trained.get_output_embeddings().weight - base.get_output_embeddings().weight).abs().max() > 1e-3
    with torch.no_grad():
        assert reported == pytest.approx(float(trained(input_ids=ids, labels=ids).loss), abs=1e-4)
    again = forks.run(
        make_job(
            tmp_path / "again", model, rows, data_format="tokenized", eval_data=rows, attempt=2,
            resume_from=original.checkpoint(2), **config, output="merged",
        )
    )  # fmt: skip
    assert weights(again) == weights(original)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"init_lora_weights": "pissa", "lora_r": 2048}, "`lora_r` is 2048, and `init_lora_weights: pissa` needs"),
        ({"target_modules": ["mlp"]}, "`mlp` is a LlamaMLP, and adapters are for linear layers, embeddings"),
        ({"target_modules": ["mlp"]}, "name those in it (down_proj, gate_proj, up_proj)"),
        ({"target_modules": ["q_proj", "input_layernorm"]}, "`input_layernorm` is a LlamaRMSNorm"),
        ({"init_lora_weights": "pissa", "target_modules": ["embed_tokens"]}, "embed_tokens is none: leave it out"),
        (
            {"optim": "sgd", "extra": {"optim_args": {"nesterov": True}}},
            "`extra.optim_args.nesterov` needs `momentum` above 0",
        ),
        ({"layers_to_transform": [0, 77]}, "has 1 layers, 0 to 0, and so no 77"),
        ({"trainable_token_indices": [9_000_000]}, "so none for 9000000"),
    ],
)
def test_target_module_missing_in_the_model_fails_the_run_with_a_sentence(
    fields: dict[str, Any], sentence: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    result = forks.run(make_job(tmp_path, tiny_model, chats, **{**LORA, **fields})).result
    assert (result["outcome"], result["error"]["code"]) == ("failed", "config_error"), result
    assert sentence in result["error"]["message"]
