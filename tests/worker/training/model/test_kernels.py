"""A model that is about to be trained uses the kernels that its machine and its family have, and says which."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import is_liger_kernel_available
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils as trl_utils

from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.activations import LIGER_FAMILIES
from app.estimator.architecture import FAMILIES
from tests.worker.training.tiny import Forks, make_job
from worker.training.model import attention
from worker.training.model.kernels import use_kernels, use_liger

CPU, GPU = (DeviceCapabilities(kind=kind, bf16=True) for kind in ("cpu", "cuda"))
SIZE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def trl_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the place of liger-kernel, which needs a GPU: it notes what it is called with."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "def _apply_liger_kernel_to_instance(model, **options): model.liger_options = options\n"
    )
    (package / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None, 'mixtral': None}\n")
    metadata = tmp_path / "liger_kernel-0.8.5.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.8.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    is_liger_kernel_available.cache_clear()
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    is_liger_kernel_available.cache_clear()


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZE))


def adapted(model: Any, **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM", **options))


def test_a_cpu_has_the_norms_of_transformers_though_liger_is_installed(liger: Path) -> None:
    model = llama()
    use_liger(model, CPU)
    assert use_kernels(model) == {"norms": "transformers", "head": "trl"}
    assert not hasattr(model, "liger_options")


def test_a_gpu_has_those_of_liger_and_the_loss_head_of_trl(liger: Path) -> None:
    model = llama()
    use_liger(model, GPU)
    assert use_kernels(adapted(model)) == {"norms": "liger-kernel 0.8.5", "lora": "fused", "head": "two products"}
    assert model.liger_options == {
        "rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False,
    }  # fmt: skip


def test_experts_stay_those_of_transformers(liger: Path) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SIZE, num_local_experts=2))
    use_liger(model, GPU)
    assert not model.liger_options["swiglu"]


def test_a_gpu_has_those_of_transformers_for_a_family_that_liger_lacks(liger: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))
    use_liger(model, GPU)
    assert not hasattr(model, "liger_options")
    assert use_kernels(model)["norms"] == "transformers (liger-kernel does not have gpt2)"


def test_a_gpu_has_those_of_transformers_if_liger_cannot_be_imported(liger: Path) -> None:
    (liger / "monkey_patch.py").write_text("raise ImportError('no triton')\n")
    model = llama()
    use_liger(model, GPU)
    assert use_kernels(adapted(model))["norms"] == "transformers (liger-kernel cannot be used: no triton)"


def test_a_gpu_has_those_of_transformers_if_liger_does_not_know_the_class_of_a_model(liger: Path) -> None:
    (liger / "__init__.py").write_text(
        "def _apply_liger_kernel_to_instance(model, **options): raise TypeError('no classifiers')\n"
    )
    model = llama()
    use_liger(model, GPU)
    assert use_kernels(model)["norms"] == "transformers (liger-kernel cannot be used: no classifiers)"


def test_a_gpu_without_liger_has_those_of_transformers() -> None:
    model = llama()
    use_liger(model, GPU)
    is_installed = importlib.util.find_spec("liger_kernel") is not None
    assert use_kernels(model)["norms"].startswith("liger-kernel" if is_installed else "transformers")


def test_compiled_layers_are_those_of_peft_whose_dropout_the_compiler_computes() -> None:
    used = use_kernels(adapted(llama()), is_compiled=True)
    assert used["lora"] == "peft, compiled" and "dropout" not in used


def test_a_length_of_texts_that_another_kernel_computes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_batched_length", 4096)
    assert use_kernels(llama())["attention"] == "varlen (cudnn for texts of 4096 tokens)"


@pytest.mark.needs("liger-kernel")
def test_the_estimator_knows_the_families_of_liger() -> None:
    monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    assert FAMILIES.keys() & monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.keys() == LIGER_FAMILIES


def test_only_a_frozen_head_takes_two_products() -> None:
    assert use_kernels(adapted(llama()))["head"] == "two products"
    assert use_kernels(adapted(llama(), modules_to_save=["lm_head"]))["head"] == "trl"
    reward = LlamaForSequenceClassification(LlamaConfig(**SIZE, num_labels=1, pad_token_id=0))
    assert "head" not in use_kernels(reward)


def test_a_model_with_kernels_computes_the_losses_of_one_without() -> None:
    torch.manual_seed(0)
    model, ids = adapted(llama()), torch.arange(20).reshape(2, 10)
    trl_utils.add_fused_lm_head(model.get_base_model(), outputs=("log_probs",))
    before = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    use_kernels(model)
    after = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    assert after.grad_fn is not None and after.item() == pytest.approx(before.item(), rel=1e-6)


@pytest.mark.parametrize(("use_dora", "lora"), [(False, "fused"), (True, "peft")])
def test_a_run_reports_its_kernels_and_dropout_that_takes_memory(
    use_dora: bool, lora: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = {"method": "lora", "lora_r": 4, "max_steps": 2, "max_seq_length": 64, "use_dora": use_dora}
    done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
    assert done.result["outcome"] == "completed", done.result
    facts = done.of("config")[0]["facts"]
    dropout = {"dropout": "torch"} if lora == "fused" else {}
    assert facts["kernels"] == {"norms": "transformers", "lora": lora, **dropout, "head": "two products"}
    reported = [record["line"] for record in done.of("message") if "keeps a mask" in record["line"]]
    assert len(reported) == (lora == "peft")
