"""The weights on the device: pinned to a commit, in the precision that training needs."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BitsAndBytesConfig,
    Gemma2Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.jobs import make_spec
from tests.worker.training.tiny import Forks, make_job, make_pairs
from worker.training.failures import TrainingFailure
from worker.training.model import base_model, loader

CPU = DeviceCapabilities(kind="cpu", bf16=True)
OLD_GPU = DeviceCapabilities(kind="cuda", bf16=False)
FLASH_GPU = DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True)
FLASH_3_GPU = DeviceCapabilities(kind="cuda", bf16=True, flash_attention_3=True)
COMMIT = "c" * 40


@pytest.fixture
def adapted(tiny_model: Path) -> Any:
    """A model in 16 bits with an adapter in 16 bits and an embedding that trains whole, as TRL leaves them."""
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    adapted_model = get_peft_model(network, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    for parameter in adapted_model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return adapted_model


def types(network: Any, part: str) -> set[torch.dtype]:
    return {p.dtype for name, p in network.named_parameters() if p.requires_grad and part in name}


class TestPrecision:
    def test_everything_that_trains_has_32_bits_and_the_rest_keeps_16(self, adapted: Any) -> None:
        loader.keep_full_precision(adapted)
        assert types(adapted, "") == {torch.float32}
        frozen = {p.dtype for p in adapted.parameters() if not p.requires_grad}
        assert frozen == {torch.bfloat16}

    @pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}])
    @pytest.mark.parametrize("quantized", [None, "4bit", "8bit"])
    def test_adapters_on_a_16_bit_base_start_with_the_values_that_peft_draws_on_one_of_32_bits(
        self, quantized: str | None, options: dict[str, Any], tiny_model: Path, tmp_path: Path
    ) -> None:
        lora = LoraConfig(**{"target_modules": "all-linear", **options})

        def base(dtype: torch.dtype, quantized: str | None) -> Any:
            loading: dict[str, Any] = {}
            if quantized is not None:
                quantization = {f"load_in_{quantized}": True}
                quantization |= {"bnb_4bit_compute_dtype": dtype} if quantized == "4bit" else {}
                loading = {"quantization_config": BitsAndBytesConfig(**quantization), "device_map": {"": "cpu"}}
            network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype, **loading)
            set_seed(SFTConfig.seed)  # as the trainer does at its start
            return network

        reference = dict(get_peft_model(base(torch.float32, None), lora).named_parameters())
        texts = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
        arguments = SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=True, report_to="none",
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        with loader.unrounded_adapters():
            trainer = SFTTrainer(
                base(torch.bfloat16, quantized), arguments, train_dataset=texts, peft_config=lora,
                processing_class=AutoTokenizer.from_pretrained(tiny_model),
            )  # fmt: skip
        adapters = {name: one for name, one in trainer.model.named_parameters() if "lora_" in name}
        assert len(adapters) == sum("lora_" in name for name in reference)
        for name, parameter in adapters.items():
            expected = reference[name]
            assert parameter.dtype == torch.float32 and parameter.requires_grad
            if "magnitude" in name:  # norms of the rows of the base, whose weights are rounded
                assert quantized or torch.allclose(parameter, expected, rtol=0.01)
            else:
                assert torch.equal(parameter, expected), name
                is_drawn = bool(expected.any())  # the other matrix of a pair is zero
                assert not is_drawn or not torch.equal(parameter, parameter.bfloat16().float()), (
                    "16 bits do not hold it"
                )

    def test_adapters_on_a_quantized_base_learn_where_rates_are_low_and_resume_with_32_bits(
        self, forks: Forks, tiny_model: Path, tmp_path: Path
    ) -> None:
        pairs = make_pairs(tmp_path / "pairs.jsonl", 24)
        config = {
            "method": "dpo", "learning_rate": 5e-6, "lr_scheduler_type": "constant", "max_steps": 6, "save_steps": 2,
            "batch_size": 2, "gradient_accumulation_steps": 1, "max_seq_length": 64,
        }  # fmt: skip
        first = forks.run(make_job(tmp_path, tiny_model, pairs, data_format="preference", **config))
        again = make_job(
            tmp_path, tiny_model, pairs, data_format="preference", attempt=2, resume_from=first.checkpoint(2), **config
        )
        assert forks.run(again).result["outcome"] == "completed"
        before, after, resumed = (
            load_file(folder / name / "adapter_model.safetensors")
            for folder, name in (
                (first.folder, "checkpoint-2"), (first.folder, "checkpoint-6"), (tmp_path / "a2", "checkpoint-6")
            )
        )  # fmt: skip
        for name, numbers in before.items():
            assert numbers.dtype == torch.float32
            assert (after[name] != numbers).float().mean() > 0.9, name  # with 16 bits 4 % of them move
            assert torch.equal(after[name], resumed[name])

    @pytest.mark.parametrize("method", ["lora", "qlora", "full"])
    def test_a_run_in_bfloat16_trains_32_bit_weights_near_the_losses_of_32_bits_and_resumes_exactly(
        self, method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = {
            "method": method, "learning_rate": 1e-3, "max_steps": 4, "save_steps": 2, "batch_size": 2,
            "logging_steps": 1, "gradient_accumulation_steps": 1, "max_seq_length": 64, "optim": "adamw_torch",
        }  # fmt: skip
        precise, half = (
            forks.run(make_job(tmp_path / dtype, tiny_model, chats, dtype=dtype, **config))
            for dtype in ("float32", "bfloat16")
        )
        facts = half.of("config")[0]["facts"]
        assert facts["loaded_dtype"] == ("torch.float32" if method == "full" else "torch.bfloat16")
        losses, in_half = ([metric["loss"] for metric in run.of("metric")] for run in (precise, half))
        assert in_half != losses and in_half == pytest.approx(losses, rel=0.01)
        again = make_job(
            tmp_path / "bfloat16",
            tiny_model,
            chats,
            dtype="bfloat16",
            attempt=2,
            resume_from=half.checkpoint(2),
            **config,
        )
        assert forks.run(again).steps == {step: reported for step, reported in half.steps.items() if step > 2}
        weights = "model" if method == "full" else "adapter_model"
        assert {one.dtype for one in load_file(half.output / f"{weights}.safetensors").values()} == {torch.float32}


class TestAttention:
    @pytest.mark.parametrize(
        ("fields", "machine", "used"),
        [
            ({"method": "qlora"}, FLASH_GPU, "flash_attention_2"),
            ({"method": "qlora"}, FLASH_3_GPU, "flash_attention_3"),
            ({"method": "full", "lora_r": None}, FLASH_GPU, "flash_attention_2"),
            ({"method": "qlora"}, OLD_GPU, "varlen"),
            ({"method": "qlora"}, CPU, "varlen"),
            ({"method": "full", "lora_r": None}, CPU, "varlen"),
            ({"method": "qlora", "attn_implementation": "eager"}, FLASH_GPU, "eager"),
        ],
    )
    def test_flash_attention_is_used_where_it_is_there_and_computes_in_16_bits(
        self, fields: dict[str, Any], machine: DeviceCapabilities, used: str, tiny_model: Path
    ) -> None:
        config = TrainingConfig(base_model="tiny", **fields)
        start = base_model.find_base(
            make_spec(tiny_model, base_model={"name": "tiny", "path": str(tiny_model), "hub": None, "revision": None}),
            config,
        )
        assert loader._choose_attention(start, config, machine) == used

    @pytest.mark.parametrize("architecture", [Gemma2Config(), GptOssConfig(), BertConfig(), Qwen3NextConfig()])
    def test_of_other_layers_than_causal_ones_over_a_text_is_left_to_the_model_and_varlen_is_refused(
        self, architecture: PretrainedConfig
    ) -> None:
        start = base_model.BaseModelSource("any", "any", {}, architecture, identity="")
        assert loader._choose_attention(start, TrainingConfig(base_model="any"), CPU) is None
        with pytest.raises(TrainingFailure, match="`attn_implementation` is `varlen`") as raised:
            loader._choose_attention(start, TrainingConfig(base_model="any", attn_implementation="varlen"), CPU)
        assert raised.value.code == "config_error"


class TestRevision:
    @pytest.mark.full
    def test_a_hub_model_is_pinned_to_its_commit_in_every_part_and_so_are_adapters_on_it(
        self, hub_cache: Path, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        cache = hub_cache / "models--owner--m"
        shutil.copytree(tiny_model, cache / "snapshots" / COMMIT)
        (cache / "refs").mkdir()
        (cache / "refs" / "v1").write_text(COMMIT)
        config = {"method": "lora", "max_steps": 1, "max_seq_length": 64}
        job = make_job(tmp_path / "1", tiny_model, chats, **config)
        job["base_model"] = {"name": "owner/m", "path": None, "hub": "owner/m", "revision": "v1"}
        with closing(Forks(HF_HUB_CACHE=str(hub_cache), HF_HUB_OFFLINE="1")) as trainers:
            first = trainers.run(job)
            assert first.result["outcome"] == "completed", (first.result, first.stderr[-2000:])
            assert first.of("config")[0]["facts"]["base_revision"] == COMMIT
            assert f"commit `{COMMIT}`" in (first.output / "README.md").read_text()
            described = json.loads((first.output / "adapter_config.json").read_text())
            assert (described["base_model_name_or_path"], described["revision"]) == ("owner/m", COMMIT)

            # No branch leads there any more: what builds on the adapter asks for the commit that the adapter names.
            shutil.rmtree(cache / "refs")
            again = trainers.run(make_job(tmp_path / "2", first.output, chats, **config))
        assert again.result["outcome"] == "completed", (again.result, again.stderr[-2000:])
        assert again.of("config")[0]["facts"]["base_revision"] == COMMIT
