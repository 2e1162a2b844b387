"""Before the first step: TRL's loss must be that of the model, and texts of a sequence must not depend on others."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.tiny import Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.loop.loss_check import check_loss, check_separation

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "modernbert-decoder": {"local_attention": 8},
    "recurrent_gemma": {
        "lru_width": 64,
        "block_types": ["recurrent", "attention"],
        "head_dim": 16,
        "logits_soft_cap": 0.5,
    },
    "llama4_text": {"head_dim": 16, "num_local_experts": 2, "moe_layers": [], "intermediate_size_mlp": 96},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "bloom": {"n_head": 4, "n_layer": 2},
}
"""Options of tiny models. TRL leaves out a layer of ModernBERT before the last one, and the cap of RecurrentGemma.
The convolutions of LFM2 need a package to separate texts."""


def trainer_of(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | FAMILIES[family]))
    add_fused_lm_head(model)
    text = torch.randint(3, 128, (40,)).tolist()
    run = SimpleNamespace(config=TrainingConfig(base_model="tiny", max_seq_length=64, **config))
    accelerator = SimpleNamespace(autocast=nullcontext)
    return SimpleNamespace(run=run, model=model, accelerator=accelerator, pinned_text=lambda: text)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "lfm2", "mamba", "bloom"])
def test_a_model_whose_loss_trl_computes_is_taken_and_left_as_it_was(family: str) -> None:
    trainer = trainer_of(family)
    trainer.model.train()
    check_loss(trainer)
    assert trainer.model.training and all(one.grad is None for one in trainer.model.parameters())


@pytest.mark.parametrize("family", ["modernbert-decoder", "recurrent_gemma", "llama4_text"])
def test_a_model_of_which_trl_computes_another_loss_or_none_is_refused(family: str) -> None:
    with pytest.raises(TrainingFailure, match=f"`{family}` can be neither trained nor evaluated") as refused:
        check_loss(trainer_of(family))
    assert refused.value.code == "config_error"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_of_a_sequence_that_do_not_mix_are_taken(family: str) -> None:
    check_separation(trainer_of(family, packing=True))


@pytest.mark.parametrize("family", ["mamba", "bloom", "lfm2"])
def test_texts_of_a_sequence_that_mix_are_refused(family: str) -> None:
    for config, advice in (({"packing": True}, "`wrapped`"), ({}, "`extra.padding_free`")):
        with pytest.raises(TrainingFailure, match="does not separate the texts") as refused:
            check_separation(trainer_of(family, **config))
        assert refused.value.code == "config_error" and advice in refused.value.message


def test_a_run_whose_packed_texts_would_mix_ends_before_its_first_step(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    size = len(AutoTokenizer.from_pretrained(model))
    config = AutoConfig.for_model("bloom", **SMALL | FAMILIES["bloom"] | {"vocab_size": size})
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    fields: dict[str, Any] = {"method": "full", "max_seq_length": 64, "max_steps": 1, "packing": True}
    done = forks.run(make_job(tmp_path / "run", Path(model), chats, **fields))
    assert (done.result["error"]["code"], done.steps) == ("config_error", {})
    assert "`bloom` does not separate the texts" in done.result["error"]["message"]
