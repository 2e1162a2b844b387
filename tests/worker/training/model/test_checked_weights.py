"""Weights that are not those that a model needs end a run before it trains, and name the tensors."""

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_prompts,
    make_rated,
    make_tiny_model,
)  # fmt: skip
from worker.training.failures import TrainingFailure
from worker.training.model import loader
from worker.training.model.base_model import BaseModelSource
from worker.training.model.checked_weights import check_finite, checked_adapters

TENSOR = "model.layers.1.mlp.down_proj.weight"
QUICK: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1, "optim": "adamw_torch",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "4-bit": {"method": "qlora"},
    "8-bit": {"method": "qlora", "load_in_8bit": True},
    "full": {"method": "full"},
    "dpo": {"method": "dpo", "load_in_4bit": False},
    "kto": {"method": "kto", "load_in_4bit": False},
    "reward": {"method": "reward", "load_in_4bit": False},
    "rlhf": {
        "method": "rlhf", "load_in_4bit": False,
        "rlhf": {
            "num_generations": 2, "max_completion_length": 4,
            "rewards": [{"type": "length", "min": 4, "max": 8, "unit": "characters"}],
        },
    },
}  # fmt: skip
DATA = {"dpo": make_pairs, "reward": make_pairs, "kto": make_rated, "rlhf": make_prompts}
FORMATS = {"dpo": "preference", "reward": "preference", "kto": "rated", "rlhf": "prompt"}
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the weights of a model or an adapter in place."""
    (path,) = folder.glob("*.safetensors")
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_value(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[0] = value
        return tensors

    return change


def tied(folder: Path, stored: str) -> Path:
    """Tie the embeddings, which the files hold once, under one of the two names."""
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": True}))

    def change(tensors: Tensors) -> Tensors:
        del tensors["lm_head.weight"]
        tensors[stored] = tensors.pop("model.embed_tokens.weight")
        return tensors

    return edit(folder, change)


def sharded(folder: Path) -> Path:
    """Store the weights in several files."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def sharded_without_tensor(folder: Path) -> Path:
    index = json.loads((sharded(folder) / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][TENSOR]
    save_file(without(TENSOR)(load_file(path)), path, metadata={"format": "pt"})
    return folder


def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


GOOD: dict[str, Callable[[Path], Path]] = {
    "untied": lambda folder: folder,
    "tied": lambda folder: tied(folder, "model.embed_tokens.weight"),
    "tied, stored as head": lambda folder: tied(folder, "lm_head.weight"),
    "sharded": sharded,
    "with old buffers": lambda folder: edit(
        folder, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), torch.inf)}
    ),
    "without the prefix of its body": lambda folder: edit(
        folder, lambda tensors: {key.removeprefix("model."): value for key, value in tensors.items()}
    ),
    "with huge values": lambda folder: edit(folder, lambda tensors: {**tensors, TENSOR: tensors[TENSOR] * 0 + 3e38}),
}  # fmt: skip
FITTING = [pair for pair in itertools.product(GOOD, METHODS) if pair != ("tied, stored as head", "reward")]
"""Bases and methods that fit: a classifier has no head of a language model, from which it could take its embeddings."""
BAD: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing": (lambda folder: edit(folder, without(TENSOR)), ("1 tensor is missing", TENSOR)),
    "missing in a shard": (sharded_without_tensor, ("1 tensor is missing", TENSOR)),
    "prefixed": (
        lambda folder: edit(folder, lambda tensors: {f"base.{key}": value for key, value in tensors.items()}),
        ("tensors are missing", "unexpected (base.", "and 18 more"),
    ),
    "unexpected": (
        lambda folder: edit(
            folder, lambda tensors: {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
        ),
        ("1 tensor is unexpected (model.layers.0.self_attn.q_proj.bias)",),
    ),
    "another size": (
        lambda folder: edit(folder, lambda tensors: {**tensors, TENSOR: torch.zeros(32, 60)}),
        (f"{TENSOR} has the size 32×60 instead of 32×64",),
    ),
    "NaN": (lambda folder: edit(folder, with_value(TENSOR, torch.nan)), ("NaN or infinite", TENSOR)),
    "inf": (lambda folder: edit(folder, with_value(TENSOR, -torch.inf)), ("NaN or infinite", TENSOR)),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=2, dropout=0.1)


@pytest.fixture
def model(copy_model: Callable[[], Path]) -> Path:
    """A tiny model that a test may change."""
    return copy_model()


def load(folder: Path, method: str, **config: Any) -> Any:
    """Load a base model on the CPU as a run of a method does."""
    options = {**METHODS[method], "base_model": "tiny", **config}
    machine = DeviceCapabilities(kind="cpu", bf16=True)
    resolved = resolve_config(TrainingConfig(**options), set(options), machine).config
    base = BaseModelSource(
        str(folder), str(folder), {"local_files_only": True}, AutoConfig.from_pretrained(folder), "", name="tiny"
    )
    head: loader.Head = "reward" if method == "reward" else "causal"
    return loader.load_model(base, resolved, machine, head)


def message_of(run: Callable[[], Any]) -> str:
    with pytest.raises(TrainingFailure) as ended:
        run()
    assert ended.value.code == "config_error"
    return ended.value.message


class TestBase:
    @pytest.mark.parametrize(
        ("kind", "method"), [pair for pair in FITTING if pair[1] in ("lora", "4-bit", "8-bit", "reward")]
    )
    def test_loads_where_its_files_have_every_tensor_under_any_name_that_transformers_takes(
        self, kind: str, method: str, model: Path
    ) -> None:
        network = load(GOOD[kind](model), method)
        assert not any(parameter.is_meta for parameter in network.parameters())

    def test_of_a_model_for_text_and_images_loads_as_its_language_model(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {"vocab_size": 64, "intermediate_size_mlp": 32, "num_key_value_heads": 2, "head_dim": 16}
        text |= {"num_local_experts": 2, "pad_token_id": 0}
        images = {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
        images |= {"projector_input_dim": 32, "projector_output_dim": 32}
        described = Llama4Config(text_config=sizes | text, vision_config=sizes | images)
        Llama4ForConditionalGeneration(described).save_pretrained(tmp_path)
        assert type(load(tmp_path, "lora")) is Llama4ForCausalLM
        edit(tmp_path, without("language_model.model.layers.0.self_attn.q_proj.weight"))
        assert "1 tensor is missing" in message_of(lambda: load(tmp_path, "lora"))

    def test_with_the_causal_masks_that_earlier_versions_of_transformers_saved_loads(self, tmp_path: Path) -> None:
        GPTJForCausalLM(
            GPTJConfig(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
        ).save_pretrained(tmp_path)
        masks = {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e9),
        }
        load(edit(tmp_path, lambda tensors: tensors | masks), "lora")

    @pytest.mark.parametrize("method", ["lora", "4-bit", "8-bit", "reward"])
    @pytest.mark.parametrize("kind", BAD)
    def test_is_refused_where_a_tensor_is_missing_unexpected_of_another_size_or_not_finite(
        self, kind: str, method: str, model: Path
    ) -> None:
        change, said = BAD[kind]
        change(model)
        message = message_of(lambda: load(model, method))
        assert all(text in message for text in said)
        assert message.startswith("The base model tiny cannot be used: ")

    def test_with_a_prefix_on_every_name_says_which(self, model: Path) -> None:
        edit(model, lambda tensors: {f"module.{key}": value for key, value in tensors.items()})
        assert "start with `module.`: save the model again without that prefix" in message_of(
            lambda: load(model, "lora")
        )

    def test_whose_values_float16_cannot_hold_is_told_to_use_another_type(self, model: Path) -> None:
        edit(model, with_value(TENSOR, 1e6))
        load(model, "lora")
        message = message_of(lambda: load(model, "lora", dtype="float16"))
        assert "65,504" in message and "`dtype`" in message and TENSOR in message

    @pytest.mark.parametrize("method", ["4-bit", "8-bit"])
    def test_stored_in_few_bits_is_refused_without_a_part_of_a_weight_and_with_one_that_is_not_finite(
        self, method: str, model: Path, tmp_path: Path
    ) -> None:
        stored = tmp_path / "stored"
        load(model, method).save_pretrained(stored)
        load(stored, method)
        parts = [name for name in load_file(stored / "model.safetensors") if name.startswith(TENSOR[:-7])]
        scale = next(name for name in parts if name.endswith(("nested_absmax", "SCB")))
        assert len(parts) >= 2
        for name in parts:
            if name.endswith(("weight_format", "quant_map")):
                continue
            broken = edit(Path(shutil.copytree(stored, tmp_path / name)), without(name))
            assert "model.layers.1.mlp.down_proj" in message_of(lambda folder=broken: load(folder, method))
        edit(stored, with_value(scale, torch.nan))
        assert TENSOR in message_of(lambda: load(stored, method))

    @pytest.mark.parametrize("kind", ["missing", "another size", "NaN"])
    def test_with_experts_is_refused_where_the_tensors_of_an_expert_do_not_fit(self, kind: str, tmp_path: Path) -> None:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        network = MixtralForCausalLM(
            MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        )
        network.save_pretrained(tmp_path)
        load(tmp_path, "lora")
        name = next(key for key in load_file(tmp_path / "model.safetensors") if "experts.2.w1" in key)
        changes = {
            "missing": without(name), "another size": lambda tensors: {**tensors, name: torch.zeros(8, 8)},
            "NaN": with_value(name, torch.nan),
        }  # fmt: skip
        edit(tmp_path, changes[kind])
        assert "experts" in message_of(lambda: load(tmp_path, "lora"))

    def test_that_a_factory_has_made_is_checked_for_values_that_are_not_finite(self) -> None:
        network = LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
        check_finite(network, "The model")
        with torch.no_grad():
            network.lm_head.weight[0, 0] = torch.nan
        assert "lm_head.weight" in message_of(lambda: check_finite(network, "The model"))


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """An adapter on the tiny model, with an own copy of its head."""
    network = AutoModelForCausalLM.from_pretrained(model)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def with_resized_embeddings(model: Path, folder: Path) -> Path:
    """Write an adapter of a model to which two tokens were added."""
    network = AutoModelForCausalLM.from_pretrained(model)
    network.resize_token_embeddings(network.config.vocab_size + 2)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(folder)
    return folder


LORA = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


class TestAdapter:
    @pytest.mark.parametrize(
        "options",
        [
            LoraConfig(target_modules=["q_proj", "embed_tokens"], use_dora=True),
            LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], bias="all"),
            LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]),
            LoraConfig(target_modules=["q_proj"], layers_to_transform=[1], init_lora_weights="pissa"),
            IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
            VeraConfig(target_modules=["q_proj"]),
            VBLoRAConfig(target_modules=["q_proj"], vector_length=8),
            PromptTuningConfig(num_virtual_tokens=4),
        ],
        ids=["DoRA on embeddings", "modules", "tokens", "PiSSA on a layer", "IA3", "VeRA", "VB-LoRA", "prompt"],
    )
    @pytest.mark.parametrize("kind", ["untied", "tied"])
    def test_that_peft_has_saved_is_taken(self, kind: str, options: PeftConfig, model: Path, tmp_path: Path) -> None:
        GOOD[kind](model)
        described = copy.deepcopy(options)
        described.task_type = "CAUSAL_LM"
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), described).save_pretrained(tmp_path / "adapter")
        with checked_adapters("The adapter mine"):
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "adapter"))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (without(LORA), ("1 tensor is missing", "layers.1.self_attn.q_proj.lora_B")),
            (without("base_model.model.lm_head.weight"), ("1 tensor is missing", "lm_head")),
            (
                lambda tensors: {**tensors, LORA.replace("layers.1", "layers.2"): tensors[LORA].clone()},
                ("1 tensor is unexpected", "layers.2.self_attn"),
            ),
            (
                lambda tensors: {**tensors, LORA: torch.zeros(30, 4)},
                ("model.layers.1.self_attn.q_proj.lora_B.weight has the size 30×4 instead of 32×4",),
            ),
            (with_value(LORA, torch.inf), ("NaN or infinite", "layers.1.self_attn.q_proj.lora_B")),
        ],
        ids=["missing", "missing module", "unexpected", "another size", "inf"],
    )
    def test_that_does_not_fit_its_base_is_refused(
        self, change: Callable[[Tensors], Tensors], said: tuple[str, ...], model: Path, adapter: Path
    ) -> None:
        network = AutoModelForCausalLM.from_pretrained(model)
        with checked_adapters("The adapter mine"):
            PeftModel.from_pretrained(network, str(adapter)).unload()
        edit(adapter, change)

        def load_adapter() -> None:
            with checked_adapters("The adapter mine"):
                PeftModel.from_pretrained(network, str(adapter))

        message = message_of(load_adapter)
        assert all(text in message for text in said)
        assert message.startswith("The adapter mine cannot be used: ")

    def test_with_more_embeddings_than_its_base_is_a_config_error_with_both_sizes(
        self, forks: Forks, model: Path, chats: Path, tmp_path: Path
    ) -> None:
        rows = AutoConfig.from_pretrained(model).vocab_size
        resized = with_resized_embeddings(model, tmp_path / "resized")
        error = forks.run(make_job(tmp_path / "run", resized, chats, method="lora", **QUICK)).result["error"]
        assert error["code"] == "config_error"
        assert f"lm_head.weight has the size {rows + 2}×32 instead of {rows}×32" in error["message"]
        assert f"model.embed_tokens.weight has the size {rows + 2}×32" in error["message"]
        assert "resize_token_embeddings" in error["message"]


def failure_of(outcome: Outcome) -> str:
    """The message of a run that ended with `config_error` before its first step."""
    error = outcome.result["error"]
    assert error is not None and error["code"] == "config_error", (outcome.result, outcome.stderr[-2000:])
    assert not outcome.steps and not outcome.output.exists()
    return str(error["message"])


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (LoraConfig(target_modules=["q_proj"]), "does not fit its base model: Target modules {'nope'} not found"),
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "(PROMPT_TUNING) is no change of weights and cannot be merged",
        ),
    ],
    ids=["module that the base lacks", "prompt"],
)
def test_an_adapter_that_cannot_be_merged_into_its_base_says_why(
    described: PeftConfig, said: str, forks: Forks, model: Path, chats: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), described).save_pretrained(adapter)
    written = json.loads((adapter / "adapter_config.json").read_text())
    if "target_modules" in written:
        (adapter / "adapter_config.json").write_text(json.dumps({**written, "target_modules": ["nope"]}))
    message = failure_of(forks.run(make_job(tmp_path / "run", adapter, chats, method="lora", **QUICK)))
    assert f"The adapter tiny {said}" in message


class TestRun:
    @pytest.mark.parametrize(
        "method",
        [
            "lora",
            "full",
            *(pytest.param(name, marks=pytest.mark.full) for name in METHODS if name not in ("lora", "full")),
        ],
    )
    @pytest.mark.parametrize(
        "kind", ["missing", *(pytest.param(name, marks=pytest.mark.full) for name in BAD if name != "missing")]
    )
    def test_on_a_base_that_its_files_do_not_fit_ends_before_its_first_step(
        self, kind: str, method: str, forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        change, said = BAD[kind]
        data = DATA.get(method, make_chat_dataset)(tmp_path / "rows.jsonl", 8)
        job = make_job(
            tmp_path / "run", change(model), data, data_format=FORMATS.get(method, "chat"), **QUICK, **METHODS[method]
        )
        message = failure_of(forks.run(job))
        assert said[-1] in message

    @pytest.mark.full
    @pytest.mark.parametrize(("kind", "method"), [pair for pair in FITTING if pair[0] != "with huge values"])
    def test_on_a_base_that_its_files_fit_trains(
        self, kind: str, method: str, forks: Forks, model: Path, tmp_path: Path
    ) -> None:
        data = DATA.get(method, make_chat_dataset)(tmp_path / "rows.jsonl", 8)
        job = make_job(
            tmp_path / "run",
            GOOD[kind](model),
            data,
            data_format=FORMATS.get(method, "chat"),
            **QUICK,
            **METHODS[method],
        )
        done = forks.run(job)
        assert done.result["outcome"] == "completed", (done.result, done.stderr[-2000:])

    def test_on_pickled_weights_ends_before_its_first_step_and_says_what_to_write(
        self, forks: Forks, model: Path, chats: Path, tmp_path: Path
    ) -> None:
        error = forks.run(make_job(tmp_path / "run", pickled(model), chats, method="lora", **QUICK)).result["error"]
        assert error["code"] == "model_not_found" and "save it as safetensors" in error["message"]

    @pytest.mark.parametrize("method", ["lora", "full"])
    @pytest.mark.parametrize("change", ["layers", "size"])
    def test_does_not_continue_from_a_checkpoint_of_another_model(
        self, change: str, method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        first = forks.run(make_job(tmp_path, tiny_model, chats, method=method, **QUICK))
        sizes = {"layers": 3} if change == "layers" else {"hidden": 64}
        other = make_tiny_model(tmp_path / "other", **sizes)
        job = make_job(
            tmp_path, other, chats, attempt=2, resume_from=first.checkpoint(2), method=method,
            **{**QUICK, "max_steps": 4},
        )  # fmt: skip
        message = failure_of(forks.run(job))
        assert message.startswith("The checkpoint cannot be used: ")
        assert ("missing" if change == "layers" else "instead of") in message

    def test_continues_from_a_checkpoint_with_tied_embeddings_which_it_holds_once(
        self, forks: Forks, model: Path, chats: Path, tmp_path: Path
    ) -> None:
        tied(model, "model.embed_tokens.weight")
        first = forks.run(make_job(tmp_path, model, chats, method="full", **QUICK))
        assert "lm_head.weight" not in load_file(Path(first.checkpoint(2)["path"]) / "model.safetensors")
        job = make_job(
            tmp_path, model, chats, attempt=2, resume_from=first.checkpoint(2), method="full",
            **{**QUICK, "max_steps": 4},
        )  # fmt: skip
        done = forks.run(job)
        assert (done.result["outcome"], [*done.steps]) == ("completed", [3, 4]), done.stderr[-2000:]

    def test_evaluates_no_adapter_that_lacks_a_tensor(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        output = forks.run(make_job(tmp_path / "train", tiny_model, chats, method="lora", **QUICK)).output
        name = next(name for name in load_file(output / "adapter_model.safetensors") if "layers.1" in name)
        edit(output, without(name))
        job = make_job(tmp_path / "evaluate", tiny_model, chats, method="lora", **QUICK)
        weights = {"path": str(output), "step": 2, "epoch": 1.0}
        message = failure_of(forks.run(job | {"task": "evaluate", "weights": weights, "reward_models": []}))
        assert "1 tensor is missing" in message

    def test_asks_no_language_model_for_rewards_that_was_given_the_config_of_a_reward_model(
        self, forks: Forks, model: Path, tiny_model: Path, tmp_path: Path
    ) -> None:
        described = json.loads((model / "config.json").read_text())
        one_label = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        (model / "config.json").write_text(json.dumps({**described, **one_label}))
        rlhf = {**METHODS["rlhf"]["rlhf"], "rewards": [{"type": "model", "model": "judge"}]}
        config = {**QUICK, **METHODS["rlhf"], "rlhf": rlhf}
        prompts = make_prompts(tmp_path / "prompts.jsonl", 8)
        job = make_job(tmp_path / "run", tiny_model, prompts, data_format="prompt", **config)
        named = {"name": "judge", "path": str(model), "hub": None, "revision": None}
        message = failure_of(forks.run(job | {"reward_models": [named]}))
        assert message.startswith("The reward model judge cannot be used: ") and "score.weight" in message

    def test_that_skipped_every_step_fails_and_exports_nothing(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        repairs = [
            {"kind": "non_finite", "reason": "a bad step", "step": step, "rows": [], "singled_out": [], "changes": {}}
            for step in (1, 2)
        ]
        job = make_job(tmp_path, tiny_model, chats, method="lora", on_non_finite="rewind", **QUICK)
        done = forks.run(job | {"auto_repairs": repairs})
        assert (done.result["outcome"], done.result["error"]["code"]) == ("failed", "non_finite_loss")
        assert "All 2 steps were skipped" in done.result["error"]["message"]
        assert not done.output.exists()
        trained = forks.run(job | {"auto_repairs": repairs[:1], "attempt_dir": str(tmp_path / "a1")})
        assert trained.result["outcome"] == "completed"
