"""Training methods and their options."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from app.contracts.field_types import Strict
from app.contracts.rewards import Rewards


class TrainingMethod(StrEnum):
    """Training method: the objective, and which weights are trained."""

    full = "full"
    lora = "lora"
    qlora = "qlora"
    dpo = "dpo"
    reward = "reward"
    rlhf = "rlhf"
    sft = "sft"


SUPERVISED = (TrainingMethod.full, TrainingMethod.lora, TrainingMethod.qlora, TrainingMethod.sft)
"""Methods that learn from examples; the only list of them."""

PREFERENCE = (TrainingMethod.dpo, TrainingMethod.reward)
"""Methods that learn from pairs of a chosen and a rejected answer."""

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "sigmoid_norm",
]  # fmt: skip
"""TRL losses that need no further options."""


class DpoOptions(Strict):
    """Options of direct preference optimization; for method `dpo` only."""

    beta: float = Field(
        default=0.1,
        gt=0,
        le=100,
        description="Controls the deviation from the reference model; higher values stay closer.",
    )
    loss_type: DpoLoss = Field(default="sigmoid", description="DPO loss function.")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Expected fraction of reversed pairs; for `robust`, `exo_pair`, `aot` and `aot_unpaired`.",
    )


class RlhfOptions(Strict):
    """Options of reinforcement learning from rewards; for method `rlhf` only."""

    algorithm: Literal["grpo", "rloo"] = Field(
        default="grpo", description="Algorithm that computes the advantages (GRPO or RLOO)."
    )
    rewards: Rewards = Field(
        default_factory=list, description="Reward functions; the reward of a completion is their weighted sum."
    )
    num_generations: int = Field(
        default=8, ge=2, le=1024, description="Completions per prompt, whose rewards are compared with each other."
    )
    max_completion_length: int = Field(
        default=256, ge=1, le=1_000_000, description="Maximum number of tokens generated per completion."
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="Sampling temperature.")
    beta: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="KL coefficient: keeps the policy close to the base model; 0 disables it.",
    )
