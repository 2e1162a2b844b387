"""Training methods: one row per method, and the models of their options.

Code that depends on the method reads a property of its row, so that a new method needs no other comparison.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from anneal.contracts.field_types import DatasetFormat, ModelName, Strict, Traits
from anneal.contracts.human_numbers import COUNT
from anneal.contracts.rewards import SERVICE_TYPES, USAGE_METRICS, Rewards


class TrainingMethod(StrEnum):
    """Training method: the objective, and which weights are trained."""

    full = "full"
    lora = "lora"
    qlora = "qlora"
    dpo = "dpo"
    kto = "kto"
    orpo = "orpo"
    simpo = "simpo"
    reward = "reward"
    rlhf = "rlhf"
    sft = "sft"
    gkd = "gkd"


DEFAULT_METHOD = TrainingMethod.qlora

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "sigmoid_norm",
]  # fmt: skip
"""TRL losses that need no further options."""

_ReferenceBeta = Annotated[
    float,
    Traits(usual=(0.001, 5)),
    Field(gt=0, le=100, description="Controls the deviation from the reference model; higher values stay closer."),
]


class DpoOptions(Strict):
    """Options of direct preference optimization; for method `dpo` only."""

    beta: _ReferenceBeta = 0.1
    loss_type: Annotated[DpoLoss, Traits()] = Field(default="sigmoid", description="DPO loss function.")
    label_smoothing: Annotated[float, Traits()] = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Expected fraction of reversed pairs; for `robust`, `exo_pair`, `aot` and `aot_unpaired`.",
    )


class KtoOptions(Strict):
    """Options of Kahneman-Tversky optimization; for method `kto` only."""

    beta: _ReferenceBeta = 0.1
    loss_type: Annotated[Literal["kto", "apo_zero_unpaired"], Traits()] = Field(
        default="kto", description="KTO loss function; `apo_zero_unpaired` has no KL term."
    )
    desirable_weight: Annotated[float, Traits()] = Field(
        default=1.0, ge=0, le=1000, description="Weight of the loss of desirable rows, whose `label` is true."
    )
    undesirable_weight: Annotated[float, Traits()] = Field(
        default=1.0, ge=0, le=1000, description="Weight of the loss of undesirable rows, whose `label` is false."
    )


class OrpoOptions(Strict):
    """Options of odds ratio preference optimization; for method `orpo` only."""

    beta: Annotated[float, Traits(usual=(0.001, 5))] = Field(
        default=0.1,
        gt=0,
        le=100,
        description="Weight of the loss of the odds ratio beside the loss of the better answers.",
    )


class SimpoOptions(Strict):
    """Options of simple preference optimization; for method `simpo` only."""

    beta: Annotated[float, Traits(usual=(0.05, 20))] = Field(
        default=2.0,
        gt=0,
        le=100,
        description="Factor of the mean log-probability of an answer, which is its reward.",
    )
    gamma: Annotated[float, Traits(usual=(0, 10))] = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Margin by which the reward of the better answer is to exceed that of the worse one.",
    )


class RlhfOptions(Strict):
    """Options of reinforcement learning from rewards; for method `rlhf` only."""

    algorithm: Annotated[Literal["grpo", "rloo"], Traits()] = Field(
        default="grpo", description="Algorithm that computes the advantages (GRPO or RLOO)."
    )
    rewards: Annotated[Rewards, Traits()] = Field(
        default=[], description="Reward functions; the reward of a completion is their weighted sum."
    )
    num_generations: Annotated[Annotated[int, Field(ge=2, le=1024), COUNT], Traits()] = Field(
        default=8, description="Completions per prompt, whose rewards are compared with each other."
    )
    max_completion_length: Annotated[Annotated[int, Field(ge=1, le=1_000_000), COUNT], Traits()] = Field(
        default=256, description="Maximum number of tokens generated per completion."
    )
    temperature: Annotated[float, Traits(usual=(0.2, 2))] = Field(
        default=1.0, gt=0, le=100, description="Sampling temperature."
    )
    beta: Annotated[float, Traits(usual=(0, 1))] = Field(
        default=0.0,
        ge=0,
        le=100,
        description="KL coefficient: keeps the policy close to the base model; 0 disables it.",
    )


class GkdOptions(Strict):
    """Options of generalized knowledge distillation; for method `gkd` only."""

    teacher: Annotated[ModelName | None, Traits()] = Field(
        default=None,
        description="Model whose next-token probabilities are learned, as `base_model`: a base model, or a run. Its "
        "tokenizer must be that of the base model.",
    )
    lmbda: Annotated[float, Traits()] = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Fraction of the micro-batches whose answers the model generates itself; 0: all are those of the "
        "dataset.",
    )
    beta: Annotated[float, Traits()] = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Divergence: 0 is the forward KL divergence, 1 the reverse one, and values between are the "
        "generalized Jensen-Shannon divergence.",
    )
    temperature: Annotated[float, Traits(usual=(0.2, 2))] = Field(
        default=1.0, gt=0, le=100, description="Sampling temperature of generated answers."
    )
    seq_kd: Annotated[bool, Traits()] = Field(
        default=False, description="Whether the teacher generates the answers that the model does not."
    )
    max_completion_length: Annotated[Annotated[int, Field(ge=1, le=1_000_000), COUNT], Traits()] = Field(
        default=256, description="Maximum number of tokens of a generated answer."
    )


class LearningRate(NamedTuple):
    """Default peak learning rates of a method."""

    adapter: float
    full: float
    """Without an adapter, when all weights are trained."""


_SUPERVISED_RATE = LearningRate(adapter=2e-4, full=2e-5)
_PREFERENCE_RATE = LearningRate(adapter=5e-6, full=1e-6)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Properties of a training method."""

    name: TrainingMethod
    summary: str
    """Data that the method learns from, for the documentation."""
    objective: Literal["supervised", "preference", "reward", "rl", "distillation"]
    trainer: str
    """Function that trains a run, as `module:function`."""
    formats: tuple[DatasetFormat, ...]
    """Accepted dataset formats."""
    learning_rate: LearningRate
    row_noun: Literal["rows", "pairs", "prompts"] = "rows"
    """Contents of a dataset row: one sequence, two answers to a prompt, or a prompt without an answer."""
    options: type[Strict] | None = None
    """Model of the options, which are in the field of the configuration that has the method's name."""
    adapter: Literal["forbidden", "optional", "required"] = "optional"
    quantization: Literal["forbidden", "optional", "required"] = "optional"
    """Quantization of the base model; unless forbidden, 4-bit is the default of a run with an adapter."""
    has_reference: bool = False
    """True if the loss compares the model with a frozen reference model."""
    min_batch_size: int = 1
    """Minimum number of rows per micro-batch; more than 1 if the loss compares the rows of one."""
    averages_tokens: bool = False
    """True if the loss is a mean over the tokens of a micro-batch, whose rows then count by their lengths."""
    truncates: bool = True
    """False if rows that are too long are skipped."""
    smaller: TrainingMethod | None = None
    """Method with the same objective that needs less memory."""

    def trains_adapter(self, lora_r: int | None) -> bool:
        """Return True if a run with this `lora_r` trains an adapter rather than all weights."""
        return self.adapter != "forbidden" and lora_r is not None

    def default_fields(self, lora_r: int | None) -> dict[str, Any]:
        """Return the defaults of the fields that depend on the method, and on whether it trains an adapter."""
        if self.trains_adapter(lora_r):
            # The state of an adapter's optimizer is small, so paging or 8 bits would save nothing and cost time.
            return {"learning_rate": self.learning_rate.adapter, "optim": "adamw_torch_fused"}
        return {"learning_rate": self.learning_rate.full, "optim": "paged_adamw_8bit"}

    @property
    def has_teacher(self) -> bool:
        """True if the probabilities of another model are learned, which the options name as `teacher`."""
        return self.objective == "distillation"

    @property
    def mixes_rows(self) -> bool:
        """True if what is learned of a row depends on how the rows of a step are divided into micro-batches."""
        # With a teacher, a fraction of the micro-batches has generated answers.
        return self.min_batch_size > 1 or self.averages_tokens or self.has_teacher

    @property
    def is_supervised(self) -> bool:
        """True if the loss is that of given tokens, as in pretraining."""
        return self.objective == "supervised"

    @property
    def generates(self) -> bool:
        """True if the model generates completions during training; the options are then `RlhfOptions`."""
        return self.objective == "rl"

    @property
    def has_reward_head(self) -> bool:
        """True if the output is a reward model, which has a score head instead of a language-model head."""
        return self.objective == "reward"

    @property
    def has_pairs(self) -> bool:
        """True if a dataset row makes two sequences."""
        return self.row_noun == "pairs"

    @property
    def eval_metric(self) -> Literal["eval_loss", "eval_reward"]:
        """Evaluation metric by which checkpoints are compared."""
        return "eval_reward" if self.generates else "eval_loss"

    @property
    def higher_is_better(self) -> bool:
        """True if a higher `eval_metric` is better."""
        return self.eval_metric == "eval_reward"

    def to_score(self, metric: float) -> float:
        """Return an `eval_metric` as a score of which less is better, or a score as its metric."""
        return -metric if self.higher_is_better else metric


_SUPERVISED_FORMATS: tuple[DatasetFormat, ...] = ("chat", "prompt_completion", "text", "tokenized")

METHODS: Mapping[TrainingMethod, Method] = {
    method.name: method
    for method in (
        Method(
            name=TrainingMethod.full,
            summary="examples",
            objective="supervised",
            trainer="worker.training.methods.sft:train",
            formats=_SUPERVISED_FORMATS,
            learning_rate=_SUPERVISED_RATE,
            adapter="forbidden",
            quantization="forbidden",
            smaller=TrainingMethod.lora,
        ),
        Method(
            name=TrainingMethod.lora,
            summary="examples",
            objective="supervised",
            trainer="worker.training.methods.sft:train",
            formats=_SUPERVISED_FORMATS,
            learning_rate=_SUPERVISED_RATE,
            adapter="required",
            quantization="forbidden",
            smaller=TrainingMethod.qlora,
        ),
        Method(
            name=TrainingMethod.qlora,
            summary="examples",
            objective="supervised",
            trainer="worker.training.methods.sft:train",
            formats=_SUPERVISED_FORMATS,
            learning_rate=_SUPERVISED_RATE,
            adapter="required",
            quantization="required",
        ),
        Method(
            name=TrainingMethod.dpo,
            summary="pairs of a better and a worse answer",
            objective="preference",
            trainer="worker.training.methods.dpo:train",
            formats=("preference",),
            learning_rate=_PREFERENCE_RATE,
            row_noun="pairs",
            options=DpoOptions,
            has_reference=True,
        ),
        Method(
            name=TrainingMethod.kto,
            summary="answers rated as desirable or undesirable",
            objective="preference",
            trainer="worker.training.methods.kto:train",
            formats=("rated",),
            learning_rate=_PREFERENCE_RATE,
            options=KtoOptions,
            has_reference=True,
            min_batch_size=2,
        ),
        Method(
            name=TrainingMethod.orpo,
            summary="pairs of a better and a worse answer",
            objective="preference",
            trainer="worker.training.methods.orpo:train",
            formats=("preference",),
            learning_rate=LearningRate(adapter=2e-5, full=5e-6),
            row_noun="pairs",
            options=OrpoOptions,
            averages_tokens=True,
        ),
        Method(
            name=TrainingMethod.simpo,
            summary="pairs of a better and a worse answer",
            objective="preference",
            trainer="worker.training.methods.simpo:train",
            formats=("preference",),
            learning_rate=_PREFERENCE_RATE,
            row_noun="pairs",
            options=SimpoOptions,
        ),
        Method(
            name=TrainingMethod.reward,
            summary="pairs of a better and a worse answer",
            objective="reward",
            trainer="worker.training.methods.reward_model:train",
            formats=("preference",),
            learning_rate=LearningRate(adapter=1e-4, full=1e-5),
            row_noun="pairs",
            truncates=False,
        ),
        Method(
            name=TrainingMethod.rlhf,
            summary="rewards for the completions that the model generates",
            objective="rl",
            trainer="worker.training.methods.rlhf:train",
            formats=("prompt",),
            learning_rate=LearningRate(adapter=1e-5, full=1e-6),
            row_noun="prompts",
            options=RlhfOptions,
            has_reference=True,
            truncates=False,
        ),
        Method(
            name=TrainingMethod.sft,
            summary="examples",
            objective="supervised",
            trainer="worker.training.methods.sft:train",
            formats=_SUPERVISED_FORMATS,
            learning_rate=_SUPERVISED_RATE,
        ),
        Method(
            name=TrainingMethod.gkd,
            summary="the next-token probabilities of a teacher model",
            objective="distillation",
            trainer="worker.training.methods.gkd:train",
            formats=("chat", "prompt_completion"),
            learning_rate=_SUPERVISED_RATE,
            options=GkdOptions,
        ),
    )
}
"""Properties of each training method; the only place that lists them."""

EVALUATION_METRICS = frozenset(
    {
        *("loss", "perplexity", "seconds", "samples_per_second", "token_accuracy", "entropy", "kl"),
        *("preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "logps_chosen", "logps_rejected"),
        *("reward_desirable", "reward_undesirable", "logps_desirable", "logps_undesirable"),
        *("reward_mean", "reward_min", "reward_max", "reward", "reward_std", "rewards_all_equal"),
        *("completion_length", "completions_cut", *USAGE_METRICS),
    }
)
"""Metrics of evaluations of all methods, without `eval_`; no extra evaluation set has such a name."""

OPTION_GROUPS: Mapping[str, type[Strict]] = {
    method.name.value: method.options for method in METHODS.values() if method.options is not None
}
"""Options of methods, by their field in the configuration."""


def method_of(config: Mapping[str, Any]) -> Method:
    """Return the method of a raw or stored configuration; the default one if it names none that is known."""
    name = config.get("method")
    return METHODS[TrainingMethod(name) if name in list(METHODS) else DEFAULT_METHOD]


def options_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the method in a raw or stored configuration; empty if there are none."""
    options = config.get(method_of(config).name)
    return options if isinstance(options, Mapping) else {}


def predict_options(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the options of a prediction in a raw or stored configuration; None if it is of another task."""
    extra = config.get("extra")
    options = extra.get("predict") if isinstance(extra, Mapping) else None
    return options if isinstance(options, Mapping) else None


RANKING_METRIC = "eval_score"
"""Evaluation metric by which predictions are ranked, of which more is better."""


def ranking_metric(config: Mapping[str, Any]) -> str:
    """Return the evaluation metric by which a run of a raw or stored configuration is ranked among others."""
    return method_of(config).eval_metric if predict_options(config) is None else RANKING_METRIC


def to_score(config: Mapping[str, Any], metric: float) -> float:
    """Return the `ranking_metric` of a run as a score of which less is better, or a score as the metric."""
    return method_of(config).to_score(metric) if predict_options(config) is None else -metric


def rewards_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield field and content of each reward of a raw or stored configuration; malformed entries are skipped."""
    group, options = "extra.predict", predict_options(config)
    if options is None:
        group, options = method_of(config).name.value, options_of(config) if method_of(config).generates else {}
    listed = options.get("rewards")
    for at, reward in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(reward, Mapping):
            yield f"{group}.rewards.{at}", reward


def service_urls(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield field and URL of each reward of a raw or stored configuration that is a call over HTTP."""
    for field, reward in rewards_of(config):
        if reward.get("type") in SERVICE_TYPES and isinstance(reward.get("url"), str):
            yield f"{field}.url", reward["url"]


ModelRole = Literal["reward", "teacher"]
"""Use of a model that the options of a run name: it scores completions, or its probabilities are learned."""


def models_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str, ModelRole]]:
    """Yield field, name and role of each model that the options in a raw or stored configuration name."""
    for field, reward in rewards_of(config):
        if reward.get("type") == "model" and isinstance(reward.get("model"), str):
            yield f"{field}.model", reward["model"], "reward"
    teacher = options_of(config).get("teacher")
    if isinstance(teacher, str) and predict_options(config) is None:
        yield f"{method_of(config).name}.teacher", teacher, "teacher"
