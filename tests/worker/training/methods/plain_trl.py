"""Plain TRL on the same data, seed and settings, as its manual says to use it."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from worker.training.model import loader

TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig), "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig),
    "orpo": (ORPOTrainer, ORPOConfig), "simpo": (CPOTrainer, partial(CPOConfig, loss_type="simpo", cpo_alpha=0.0)),
    "gkd": (GKDTrainer, GKDConfig),
}  # fmt: skip


def plain_losses(*arguments: Any, **options: Any) -> list[float]:
    """Return the loss of each step of TRL's trainer; the arguments are those of `plain_log`."""
    return [entry["loss"] for entry in plain_log(*arguments, **options)]


def plain_log(
    kind: str,
    model: Path,
    data: Path,
    folder: Path,
    adapter: str,
    *,
    steps: int,
    batch_size: int,
    lora_dropout: float = 0.0,
    chat_template: str | None = None,
    dtype: torch.dtype = torch.float32,
    peft_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Return what TRL's trainer logs of each step.

    `adapter` is `full`, `lora`, `qlora` or `8bit`. In 32 bits adapters are as ours: TRL has those on a quantized base
    in 16 bits, which rounds them.
    """
    is_reward, is_precise = kind == "reward", dtype is torch.float32
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    torch.set_num_threads(1)  # as in the process beside it: the order of sums depends on it
    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    set_seed(42)
    loading: dict[str, Any] = {"num_labels": 1} if is_reward else {}
    unquantized = ["score"] if is_reward else None
    if adapter == "qlora":
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=unquantized,
        )  # fmt: skip
    elif adapter == "8bit":
        loading["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=unquantized)
    if "quantization_config" in loading:
        loading["device_map"] = {"": "cpu"}
    auto = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    network = auto.from_pretrained(model, dtype=torch.float32 if adapter == "full" else dtype, **loading)
    loader.keep_evaluation_neutral(network)
    of_trainer = {name: options.pop(name) for name in ("reward_funcs", "teacher_model") if name in options}
    trainer_class, arguments_class = TRAINERS[kind]
    with ExitStack() as precision:
        if is_precise:
            precision.enter_context(loader.unrounded_adapters())
        trainer = trainer_class(
            model=network,
            args=arguments_class(
                output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=0.03, weight_decay=0.01,
                optim="adamw_torch", use_cpu=True, bf16=not is_precise, logging_steps=1, report_to="none", seed=42,
                save_strategy="no", disable_tqdm=True,
                **{"learning_rate": 1e-2, "activation_checkpointing": False, **options},
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                task_type="SEQ_CLS" if is_reward else "CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=lora_dropout,
                modules_to_save=["score"] if is_reward else None,
                **{"target_modules": "all-linear", **(peft_options or {})},
            ) if adapter != "full" else None,
            **of_trainer,
        )  # fmt: skip
    if is_precise:
        loader.keep_full_precision(trainer.model)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]
