"""Run configurations of the demo: sizes and learning rates with a visible effect in minutes on two cores."""

from dataclasses import dataclass
from typing import Any

from app.cli.demo.base_model import MAX_TOKENS

_NOT_MEASURABLE = 1e-12
"""Learning rate at which one step changes none of the printed digits."""


@dataclass(frozen=True)
class Plan:
    """Configuration of the fine-tuning run and limits on the number of rows."""

    tuning: dict[str, Any]
    most_rows: int | None
    most_held_out: int | None
    offline: bool
    remark: str = ""
    """Note on the quality of the completions, printed after them."""

    @property
    def baseline_options(self) -> dict[str, Any]:
        """Configuration with one step that changes nothing, which evaluates the base model as loaded."""
        one_step = {"max_steps": 1, "eval_steps": 1, "logging_steps": 1, "batch_size": 1}
        return {**self.tuning, **one_step, "learning_rate": _NOT_MEASURABLE, "lora_dropout": 0.0}


def from_scratch(base_model: str) -> dict[str, Any]:
    """Return the configuration of method `full` on a model without weights; the loss covers every token."""
    return {
        "base_model": base_model,
        "method": "full",
        "max_steps": 300,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 4e-3,
        "packing": True,
        "max_seq_length": MAX_TOKENS,
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "logging_steps": 5,
        "eval_steps": 100,
        "save_steps": 150,
        "extra": {"eval_batch_size": 8},
    }


def small() -> Plan:
    """Return the plan for QLoRA on the model trained here; the loss covers only the assistant's answers."""
    tuning = {
        "method": "qlora",
        "lora_r": 16,
        "lora_alpha": 32,
        "max_steps": 120,
        "batch_size": 12,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-3,
        "loss_on": "assistant",
        "max_seq_length": MAX_TOKENS,
        "gradient_checkpointing": False,
        "logging_steps": 5,
        "eval_steps": 40,
        "save_steps": 40,
        "extra": {"eval_batch_size": 8},
    }
    remark = (
        "The model has 1.5 million parameters and trained for 120 steps. It now answers with an English sentence "
        "instead of more code, but the sentence is not yet correct."
    )
    return Plan(tuning, most_rows=None, most_held_out=None, offline=True, remark=remark)


def hub() -> Plan:
    """Return the plan for QLoRA on a model of the Hugging Face Hub, which needs few rows."""
    tuning = {
        "method": "qlora",
        "lora_r": 16,
        "lora_alpha": 32,
        "max_steps": 60,
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-4,
        "loss_on": "completion",
        "max_seq_length": 512,
        "logging_steps": 2,
        "eval_steps": 20,
        "save_steps": 20,
    }
    return Plan(tuning, most_rows=2000, most_held_out=64, offline=False)
