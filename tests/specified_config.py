"""The training configuration of the specification: a dataclass that sends every field, whatever the method uses."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SpecifiedConfig:
    """Fields and defaults as specified; `to_dict` is what a client of that interface sends."""

    base_model: str
    method: str = "qlora"
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    target_modules: list[str] | None = None
    learning_rate: float = 2e-4
    batch_size: int = 4
    gradient_accumulation_steps: int = 4
    epochs: int = 3
    max_steps: int | None = None
    warmup_ratio: float = 0.03
    weight_decay: float = 0.01
    load_in_4bit: bool = True
    load_in_8bit: bool = False
    bnb_4bit_compute_dtype: str = "bfloat16"
    bnb_4bit_quant_type: str = "nf4"
    optim: str = "paged_adamw_8bit"
    lr_scheduler_type: str = "cosine"
    gradient_checkpointing: bool = True
    save_steps: int = 100
    save_total_limit: int = 3
    logging_steps: int = 10
    max_seq_length: int = 2048
    packing: bool = False
    seed: int = 42
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)
