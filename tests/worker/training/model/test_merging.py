"""Merged models compute what the adapted ones do, whatever the adapter changes and however the base is stored."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import match_stored_quantization, resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from worker.training.model import base_model, loader
from worker.training.model.base_model import BaseModelSource
from worker.training.model.checked_weights import load_pretrained
from worker.training.model.loader import keep_evaluation_neutral
from worker.training.model.merging import merge_adapter
from worker.wire.heartbeat import no_heartbeat

CPU = DeviceCapabilities(kind="cpu", bf16=True)
IDS = torch.arange(5, 45).reshape(2, 20)
ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj", "down_proj"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "embeddings_dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both_tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "whole_embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole_both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "embeddings_whole_head": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 11]},
}


def logits(model: Any) -> torch.Tensor:
    keep_evaluation_neutral(model)
    with torch.inference_mode():
        values: torch.Tensor = model.eval()(IDS).logits.float()
    return values


@dataclass
class Base:
    """A base in a folder, as a run finds it, and the configuration that it is trained with."""

    source: BaseModelSource
    config: TrainingConfig

    def load(self) -> Any:
        return loader.load_model(self.source, self.config, CPU)


def make_base(folder: Path, *, tied: bool, stored_bits: int | None = None, **config: Any) -> Base:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=tied, initializer_range=0.2))
    model.save_pretrained(folder)
    if stored_bits is not None:
        options = BitsAndBytesConfig(
            load_in_4bit=stored_bits == 4, load_in_8bit=stored_bits == 8, bnb_4bit_quant_type="nf4"
        )
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, device_map={"": "cpu"})
        folder = folder / f"stored_{stored_bits}"
        model.save_pretrained(folder)
    source = BaseModelSource(str(folder), str(folder), {}, AutoConfig.from_pretrained(folder), "tiny")
    method = "lora" if stored_bits is None and not config else "qlora"
    parsed = TrainingConfig(base_model="tiny", method=method, **config)
    resolved = resolve_config(parsed, {"base_model", *config}, CPU).config
    return Base(source, match_stored_quantization(resolved, source.stored_quantization)[0])


def make_mxfp4_base(folder: Path, method: str) -> Base:
    """A tiny GPT-OSS whose experts have 4 bits with a scale for 32 of them, as those that are published."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2,
        layer_types=["full_attention", "full_attention"], max_position_embeddings=256,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, columns, rows // 32), 124, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": {"quant_method": "mxfp4"}}))
    source = BaseModelSource(str(folder), str(folder), {}, AutoConfig.from_pretrained(folder), "tiny")
    return Base(source, resolve_config(TrainingConfig(base_model="tiny", method=method), set(), CPU).config)


def train(model: Any, folder: Path, adapter: dict[str, Any]) -> Any:
    """Return the model with an adapter of random weights, which is saved in a folder."""
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **adapter))
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return adapted


def trained_logits(base: Base, folder: Path, adapter: dict[str, Any]) -> torch.Tensor:
    """Return what a model computes with a trained adapter, which is saved in a folder."""
    trained = logits(train(base.load(), folder, adapter))
    if not base.config.load_in_8bit:
        return trained
    # 8-bit layers also quantize their inputs, to about 1 % of the largest; the weights are what is merged.
    exact = logits(PeftModel.from_pretrained(loader.load_for_merge(base.source, base.config, CPU), str(folder)))
    assert (exact - trained).abs().max() < 0.05 * trained.abs().max()
    return exact


def check_merged(base: Base, adapter: dict[str, Any], tmp_path: Path) -> Any:
    """Check that the merged model, saved and loaded again, computes what the trained one does; return it."""
    untrained = logits(base.load())
    trained = trained_logits(base, tmp_path / "adapter", adapter)
    whole = loader.load_for_merge(base.source, base.config, CPU)
    merge_adapter(whole, tmp_path / "adapter", "The adapter").save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - trained).abs().max() < 1e-4
    assert (trained - untrained).abs().max() > 0.1
    return merged


class TestMerge:
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("adapter", ADAPTERS)
    def test_computes_what_the_adapted_model_does(self, adapter: str, tied: bool, tmp_path: Path) -> None:
        merged = check_merged(make_base(tmp_path / "base", tied=tied), ADAPTERS[adapter], tmp_path)
        assert merged.config.tie_word_embeddings == (tied and adapter in ("layers", "rows"))
        assert merged.config.get_text_config().tie_word_embeddings == merged.config.tie_word_embeddings

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("adapter", ["layers", "embeddings", "whole_head"])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_of_a_base_that_is_quantized_when_loaded(self, bits: int, adapter: str, tied: bool, tmp_path: Path) -> None:
        quantization = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True}
        base = make_base(tmp_path / "base", tied=tied, **quantization)
        merged = check_merged(base, ADAPTERS[adapter], tmp_path)
        assert not hasattr(merged.config, "quantization_config")

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("adapter", ["layers", "embeddings", "whole_head"])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_of_a_base_that_is_stored_quantized(self, bits: int, adapter: str, tied: bool, tmp_path: Path) -> None:
        base = make_base(tmp_path / "base", tied=tied, stored_bits=bits)
        assert (base.config.load_in_4bit, base.config.load_in_8bit) == (bits == 4, bits == 8)
        merged = check_merged(base, ADAPTERS[adapter], tmp_path)
        assert not hasattr(merged.config, "quantization_config")

    def test_of_a_base_that_is_dequantized_when_loaded(self, tmp_path: Path) -> None:
        check_merged(make_mxfp4_base(tmp_path / "base", "lora"), {"target_modules": ["q_proj", "o_proj"]}, tmp_path)

    def test_weights_that_were_dequantized_when_loaded_are_saved_as_such(self, tmp_path: Path) -> None:
        model = make_mxfp4_base(tmp_path / "base", "full").load()
        model.save_pretrained(tmp_path / "saved")
        saved = load_pretrained(AutoModelForCausalLM, tmp_path / "saved", "The model")
        assert torch.equal(logits(saved), logits(model))

    @pytest.mark.parametrize("bits", [None, 4, 8])
    @pytest.mark.parametrize("adapter", ["embeddings", "whole_embeddings", "whole_head"])
    def test_for_a_run_on_an_adapter_is_the_model_that_was_trained(
        self, adapter: str, bits: int | None, tiny_model: Path, tmp_path: Path
    ) -> None:
        base = make_base(tmp_path / "base", tied=True, stored_bits=bits)
        trained = trained_logits(base, tmp_path / "adapter", ADAPTERS[adapter])
        source = replace(base.source, tokenizer_source=str(tiny_model), adapter=tmp_path / "adapter")
        with base_model.merged_base(source, tmp_path / "merged", torch.float32, no_heartbeat) as merged:
            start = loader.load_model(
                merged, resolve_config(TrainingConfig(base_model="tiny", method="lora"), set(), CPU).config, CPU
            )
        assert merged.stored_quantization is None
        assert (logits(start) - trained).abs().max() < 1e-4
