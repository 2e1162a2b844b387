"""Optimizers and learning-rate schedules of transformers, and the options that each of them reads.

A test compares the names and options with the installed transformers, which the API must not import.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from anneal.contracts.field_types import Strict
from anneal.contracts.human_numbers import COUNT

_Positive = Annotated[float, Field(gt=0, le=1e6)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Steps = Annotated[int, Field(ge=1, le=100_000_000), COUNT]


class OptimizerOptions(Strict):
    """Options of single optimizers; transformers calls them `optim_args`."""

    momentum: _Fraction | None = Field(default=None, description="Momentum; for `sgd` and `rmsprop`.")
    dampening: _Fraction | None = Field(default=None, description="Dampening of the momentum; for `sgd`.")
    nesterov: bool | None = Field(default=None, description="Nesterov momentum; for `sgd`.")
    lr_decay: _Fraction | None = Field(default=None, description="Decay of the learning rate; for `adagrad`.")
    eps: _Positive | None = Field(default=None, description="Numerical stability; for `adagrad` and `rmsprop`.")
    alpha: _Positive | None = Field(
        default=None, description="Smoothing of `rmsprop`, or weight of the slow moment of AdEMAMix."
    )
    centered: bool | None = Field(default=None, description="Normalize by the variance of gradients; for `rmsprop`.")
    beta3: _Fraction | None = Field(default=None, description="Decay of the slow moment; for AdEMAMix.")
    t_alpha: _Steps | None = Field(default=None, description="Steps until `alpha` is reached; for AdEMAMix.")
    t_beta3: _Steps | None = Field(default=None, description="Steps until `beta3` is reached; for AdEMAMix.")


class SchedulerOptions(Strict):
    """Options of single learning-rate schedules; transformers calls them `lr_scheduler_kwargs`."""

    num_cycles: _Positive | None = Field(
        default=None, description="Waves of a cosine schedule; restarts of `cosine_with_restarts`."
    )
    min_lr: _Positive | None = Field(default=None, description="Final learning rate; for `cosine_…with_min_lr`.")
    min_lr_rate: _Fraction | None = Field(
        default=None, description="Final learning rate as a fraction of `learning_rate`; instead of `min_lr`."
    )
    warmup_lr_rate: _Fraction | None = Field(
        default=None,
        description="First learning rate as a fraction of `learning_rate`; for `cosine_warmup_with_min_lr`.",
    )
    lr_end: _Positive | None = Field(default=None, description="Final learning rate; for `polynomial`.")
    power: _Positive | None = Field(default=None, description="Exponent; for `polynomial`.")
    timescale: _Steps | None = Field(default=None, description="Time scale in steps; for `inverse_sqrt`.")
    num_decay_steps: _Steps | None = Field(
        default=None, description="Last steps with a falling rate; `warmup_stable_decay` needs it."
    )
    warmup_type: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Form of the warmup; for `warmup_stable_decay`."
    )
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Form of the decay; for `warmup_stable_decay`."
    )
    min_lr_ratio: _Fraction | None = Field(
        default=None, description="Final learning rate as a fraction; for `warmup_stable_decay`."
    )


_BETAS = ("adam_beta1", "adam_beta2")
ADAM_OPTIONS = (*_BETAS, "adam_epsilon")
"""Fields of `extra` that only some optimizers read."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """Properties of an optimizer."""

    adam_options: tuple[str, ...] = ()
    """Those of `ADAM_OPTIONS` that it reads."""
    options: tuple[str, ...] = ()
    """Fields of `OptimizerOptions` that it reads."""
    moments: int = 2
    """Values of its state per trained weight."""
    package: str | None = None
    """Package that it needs, which has a module of the same name."""
    rounds_stochastically: bool = False
    """True if it can update weights in bfloat16 without losing what is below their precision."""


_ADAM = OptimizerTraits(adam_options=ADAM_OPTIONS)
_LION = OptimizerTraits(adam_options=_BETAS, moments=1)
_ADEMAMIX = OptimizerTraits(adam_options=ADAM_OPTIONS, options=("beta3", "alpha", "t_alpha", "t_beta3"), moments=3)
_RMSPROP_BNB = OptimizerTraits(moments=1)
_TORCHAO = OptimizerTraits(adam_options=ADAM_OPTIONS, package="torchao", rounds_stochastically=True)

OPTIMIZERS: Mapping[str, OptimizerTraits] = {
    "paged_adamw_8bit": _ADAM,
    "paged_adamw_32bit": _ADAM,
    "paged_lion_8bit": _LION,
    "paged_lion_32bit": _LION,
    "paged_ademamix_8bit": _ADEMAMIX,
    "paged_ademamix_32bit": _ADEMAMIX,
    "adamw_torch": _ADAM,
    "adamw_torch_fused": _ADAM,
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "adamw_8bit": _ADAM,
    "adamw_bnb_8bit": _ADAM,
    "ademamix": _ADEMAMIX,
    "ademamix_8bit": _ADEMAMIX,
    "lion_8bit": _LION,
    "lion_32bit": _LION,
    "adafactor": OptimizerTraits(),
    "adagrad": OptimizerTraits(options=("lr_decay", "eps"), moments=1),
    "sgd": OptimizerTraits(options=("momentum", "dampening", "nesterov"), moments=0),
    "rmsprop": OptimizerTraits(options=("momentum", "alpha", "eps", "centered"), moments=1),
    "rmsprop_bnb": _RMSPROP_BNB,
    "rmsprop_bnb_8bit": _RMSPROP_BNB,
    "rmsprop_bnb_32bit": _RMSPROP_BNB,
}

SHARDED_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop", "adagrad")
"""Optimizers whose state can be divided among devices; the first is the default of a sharded run."""

STOCHASTIC_OPTIMIZERS = tuple(name for name, traits in OPTIMIZERS.items() if traits.rounds_stochastically)
DEFAULT_STOCHASTIC_OPTIMIZER = "adamw_torch_8bit"
"""Default of a run whose weights are trained in bfloat16."""

SCHEDULERS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "linear": (),
    "constant": (),
    "constant_with_warmup": (),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}
"""Fields of `SchedulerOptions` that each schedule reads."""

_IN_BACKWARD = (
    "it takes its step during the backward pass, so gradients can be neither accumulated nor checked; use "
    "`adafactor` or `paged_adamw_8bit`"
)
_PROJECTIONS = "the projections in its state cannot be loaded from a checkpoint"
_TWO_WEIGHTS = "it evaluates other weights than it trains, and a checkpoint has one set; use `adamw_torch_fused`"
_OF_METRICS = "its rates depend on metrics, so those of a resumed run would differ; use another schedule"

NOT_SUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
         "apollo_adamw_layerwise", "lomo", "adalomo"),
        _IN_BACKWARD,
    ),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "apollo_adamw"), f"{_PROJECTIONS}; use `paged_adamw_8bit`"),
    "galore_adafactor": f"{_PROJECTIONS}; use `adafactor`",
    "grokadamw": "a run that is resumed with it does not continue exactly; use `adamw_torch_fused`",
    "stable_adamw": "workers do not have its package, torch-optimi; use `adamw_torch_fused`, or ask the operator for a "
    "plugin (`extra.optimizer`)",
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), _TWO_WEIGHTS),
    **dict.fromkeys(
        ("adamw_torch_xla", "adamw_torch_npu_fused"), "it needs another kind of device; use `adamw_torch_fused`"
    ),
    "adamw_anyprecision": "its package, torchdistx, is not maintained; use `adamw_torch_8bit`",
    **dict.fromkeys(("reduce_lr_on_plateau", "greedy"), _OF_METRICS),
}  # fmt: skip
"""Names of transformers that are refused, with the reason and what to use."""
