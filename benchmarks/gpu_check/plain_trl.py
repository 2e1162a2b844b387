"""The peer: TRL's trainers, used as their documentation says, in processes of their own.

What Anneal replaces in TRL and transformers, it replaces when it creates a trainer, and so never here.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from anneal.contracts.training_config.fields import TrainingConfig
from worker.training.model.loader import keep_evaluation_neutral, keep_full_precision, unrounded_adapters

RESULT = "result.json"


def losses(model: str, data: str, effective: dict[str, Any], folder: str) -> None:
    """Write the loss of each step of a run with the configuration that Anneal's run had in effect.

    Adapters have 32 bits and the values that peft draws, as in Anneal; TRL rounds those on a base of 16 bits or fewer.
    """
    config, cuda = TrainingConfig.model_validate(effective), torch.cuda.is_available()
    torch.set_num_threads(1)  # the order of sums depends on it
    set_seed(config.seed)
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, config.dtype), **_quantization(config, cuda)
    )
    if not cuda:
        keep_evaluation_neutral(network)
    preference = config.method == "dpo"
    shared = {
        "output_dir": folder, "max_steps": config.max_steps, "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps, "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type, "warmup_steps": config.warmup_ratio,
        "weight_decay": config.weight_decay, "optim": config.optim, "max_length": config.max_seq_length,
        "use_cpu": not cuda, "bf16": config.dtype == "bfloat16", "fp16": config.dtype == "float16",
        "activation_checkpointing": False, "logging_steps": 1, "report_to": "none", "seed": config.seed,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    arguments = DPOConfig(**shared, beta=config.dpo.beta) if preference else SFTConfig(**shared, packing=config.packing)
    with unrounded_adapters():
        trainer = (DPOTrainer if preference else SFTTrainer)(
            model=network, args=arguments, train_dataset=_rows(data),
            processing_class=AutoTokenizer.from_pretrained(model), peft_config=_adapter(config.lora_dropout),
        )  # fmt: skip
    keep_full_precision(trainer.model)
    trainer.train()
    reported = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(folder, RESULT).write_text(json.dumps(reported))


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Time at the end of each step, when the device has finished it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if not self.ends:
                torch.cuda.reset_peak_memory_stats()  # that of loading does not count
        self.ends.append(time.monotonic())


def speed(model: str, data: str, folder: str, options: dict[str, Any]) -> None:
    """Write tokens per second, without padding, and peak memory of an SFT run with TRL's defaults.

    `options`: `four_bit`, `dropout`, `length`, `steps`, `warm_up`, `batch_size`, `packing`, `flash`.
    """
    cuda = torch.cuda.is_available()
    loading: dict[str, Any] = {"dtype": torch.bfloat16 if cuda else torch.float32}
    if options["four_bit"]:
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if cuda else torch.float32,
        )  # fmt: skip
    if options["flash"]:
        loading["attn_implementation"] = "flash_attention_2"
    on_cpu = {} if cuda else {"use_cpu": True, "bf16": False, "activation_checkpointing": False}
    clock = _Clock()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder, max_steps=options["steps"], per_device_train_batch_size=options["batch_size"],
            gradient_accumulation_steps=1, max_length=options["length"], packing=options["packing"], logging_steps=1,
            save_strategy="no", report_to="none", model_init_kwargs=loading, disable_tqdm=True, **on_cpu,
        ),
        train_dataset=_rows(data), peft_config=_adapter(options["dropout"]), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    ends, first, last = clock.ends, options["warm_up"] - 1, options["steps"] - 1
    steps = [after - before for before, after in itertools.pairwise(ends[first:])]
    recomputes = trainer.args.activation_checkpointing
    measured = {
        "tokens_per_second": round((tokens[last] - tokens[first]) / (ends[last] - ends[first]), 1),
        "step_seconds": round(statistics.median(steps), 4),
        "peak_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1) if cuda else None,
        "in_effect": f"recomputes {recomputes}, {trainer.model.config._attn_implementation}",
    }
    Path(folder, RESULT).write_text(json.dumps(measured))


def _rows(path: str) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in Path(path).read_text().splitlines()])


def _adapter(dropout: float) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear")


def _quantization(config: TrainingConfig, cuda: bool) -> dict[str, Any]:
    if not config.load_in_4bit:
        return {}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_compute_dtype=getattr(torch, config.bnb_4bit_compute_dtype),
            bnb_4bit_use_double_quant=config.trainer_options.double_quant,
        ),
        "device_map": {"": 0 if cuda else "cpu"},
    }  # fmt: skip
