"""The weights on the device: pinned to a commit, in the precision that training needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from app.runs.config import Machine, TrainingConfig
from worker.training import base, model

CPU = Machine(kind="cpu", bf16=True)
OLD_GPU = Machine(kind="cuda", bf16=False)
FLASH_GPU = Machine(kind="cuda", bf16=True, flash_attention=True)
COMMIT = "c" * 40


@pytest.fixture
def adapted(tiny_model: Path) -> Any:
    """A model in 16 bits with an adapter in 16 bits and an embedding that trains whole, as TRL leaves them."""
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    made = get_peft_model(network, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return made


def types(network: Any, part: str) -> set[torch.dtype]:
    return {p.dtype for name, p in network.named_parameters() if p.requires_grad and part in name}


class TestPrecision:
    def test_a_gpu_that_computes_in_16_bits_floats_trains_everything_in_32(self, adapted: Any) -> None:
        model.keep_full_precision(adapted, OLD_GPU)
        assert types(adapted, "") == {torch.float32}
        frozen = {p.dtype for p in adapted.parameters() if not p.requires_grad}
        assert frozen == {torch.bfloat16}

    @pytest.mark.parametrize("machine", [CPU, FLASH_GPU])
    def test_elsewhere_only_modules_that_train_whole_are_raised_to_32(self, machine: Machine, adapted: Any) -> None:
        model.keep_full_precision(adapted, machine)
        assert types(adapted, "modules_to_save") == {torch.float32}
        assert types(adapted, "lora_") == {torch.bfloat16}


class TestAttention:
    @pytest.mark.parametrize(
        ("fields", "machine", "used"),
        [
            ({"method": "qlora"}, FLASH_GPU, "flash_attention_2"),
            ({"method": "full", "lora_r": None}, FLASH_GPU, None),
            ({"method": "qlora"}, OLD_GPU, None),
            ({"method": "qlora"}, CPU, None),
            ({"method": "qlora", "attn_implementation": "eager"}, FLASH_GPU, "eager"),
        ],
    )
    def test_flash_attention_is_used_where_it_is_there_and_the_weights_have_16_bits(
        self, fields: dict[str, Any], machine: Machine, used: str | None, tiny_model: Path
    ) -> None:
        config = TrainingConfig(base_model="tiny", **fields)
        start = base.find_base({"base_model": {"name": "tiny", "path": str(tiny_model)}}, config)
        assert model._attention(start, config, machine) == used


class TestRevision:
    def test_a_hub_model_is_pinned_to_the_commit_that_its_branch_means(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def resolve(source: str, **options: Any) -> Any:
            asked.append((source, options["revision"]))
            architecture = AutoConfig.for_model("llama")
            architecture._commit_hash = COMMIT
            return architecture

        monkeypatch.setattr(base, "AutoConfig", SimpleNamespace(from_pretrained=resolve))
        job = {"base_model": {"name": "owner/m", "path": None, "hub": "owner/m", "revision": "v1"}, "offline": True}
        found = base.find_base(job, TrainingConfig(base_model="owner/m", revision="v1"))
        assert asked == [("owner/m", "v1")]
        assert found.options["revision"] == found.revision == COMMIT
        assert COMMIT in found.identity
        described = model.lora_config(TrainingConfig(base_model="owner/m"), found.revision)
        assert described is not None and described.revision == COMMIT

    def test_a_run_on_an_adapter_loads_the_base_at_the_commit_that_the_adapter_names(
        self, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        LoraConfig(base_model_name_or_path="owner/m", revision=COMMIT).save_pretrained(tmp_path)
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        monkeypatch.setattr(
            base, "AutoConfig", SimpleNamespace(from_pretrained=lambda source, **options: SimpleNamespace(**options))
        )
        job = {"base_model": {"name": "adapter", "path": str(tmp_path)}}
        found = base.find_base(job, TrainingConfig(base_model="adapter"))
        assert (found.source, found.options["revision"], found.adapter) == ("owner/m", COMMIT, tmp_path)
