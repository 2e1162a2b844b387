"""The runs that the demo asks for: sizes and rates that learn something visible within minutes on two cores."""

from dataclasses import dataclass
from typing import Any

from app.demo.base_model import MAX_TOKENS

_NOT_MEASURABLE = 1e-12
"""A learning rate at which one step changes no digit that is shown."""


@dataclass(frozen=True)
class Plan:
    """Configurations of the fine-tuning, and how much data goes with them."""

    tuning: dict[str, Any]
    most_rows: int | None
    most_held_out: int | None
    offline: bool
    remark: str = ""
    """What to think of the model's answers."""

    @property
    def measuring(self) -> dict[str, Any]:
        """The same run with one step that changes nothing: its evaluation is that of the base model, as loaded."""
        one_step = {"max_steps": 1, "eval_steps": 1, "logging_steps": 1, "batch_size": 1}
        return {**self.tuning, **one_step, "learning_rate": _NOT_MEASURABLE, "lora_dropout": 0.0}


def from_scratch(base_model: str) -> dict[str, Any]:
    """Method `full` on an architecture without weights: every token of code with its docstrings is learnt."""
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
    """QLoRA on the model trained here: only the answers are learnt."""
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
        "1.5 million parameters after two minutes: it has learnt that the answer is a sentence in English and not "
        "more code, but not yet which sentence is true."
    )
    return Plan(tuning, most_rows=None, most_held_out=None, offline=True, remark=remark)


def hub() -> Plan:
    """QLoRA on a model of the hub: few rows, for it knows both Python and English already."""
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
