"""Exact counts of a model's total and trainable parameters by formula, without loading the model."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.architecture import Architecture

Kind = Literal["linear", "embedding", "norm", "router", "experts"]
ADAPTED_EXPERTS = ("mixtral", "qwen3_moe")
"""Families whose experts peft adapts with `all-linear`, although they are stored as plain tensors."""
SCORE = "score"
"""Name of the score head of a reward model (one output per text)."""


@dataclass(frozen=True)
class Weight:
    """Matrix or vector of the model, with its bias.

    `linear` layers support adapters and 4-bit or 8-bit loading; experts and routers are plain tensors, which do not.
    """

    name: str
    kind: Kind
    rows: int
    """Output features of a linear layer."""
    columns: int = 1
    """Input features of a linear layer."""
    bias: bool = False
    copies: int = 1
    """Number of experts stored in one tensor."""
    tensors: int = 1

    @property
    def weights(self) -> int:
        """Number of elements without the bias."""
        return self.rows * self.columns * self.copies

    @property
    def count(self) -> int:
        """Number of elements, including the bias."""
        return self.weights + (self.rows if self.bias else 0)

    def is_named(self, name: str) -> bool:
        """Return True if a module name of the configuration (`q_proj`, `mlp.up_proj`) matches this weight."""
        return self.name == name or self.name.endswith(f".{name}")


@lru_cache(maxsize=4)  # called about ten times per memory estimate, and one estimate per advised change
def all_weights(model: Architecture, *, reward_head: bool = False) -> tuple[Weight, ...]:
    """Return all weights in forward order; a tied head is omitted because it is the embedding matrix."""
    weights = list(_backbone_weights(model))
    if reward_head:
        weights.append(Weight(SCORE, "linear", 1, model.hidden))
    elif not model.tied:
        weights.append(Weight("lm_head", "linear", model.vocabulary, model.hidden, model.head_bias))
    elif model.head_bias:
        weights.append(Weight("lm_head.bias", "norm", model.vocabulary))
    return tuple(weights)


@lru_cache(maxsize=4)
def distinct_weights(model: Architecture, *, reward_head: bool = False) -> tuple[tuple[Weight, int], ...]:
    """Return the weights that differ in more than their layer, named as by `module_name`, with their numbers."""
    every = all_weights(model, reward_head=reward_head)
    return tuple(Counter(replace(one, name=module_name(one.name)) for one in every).items())


def module_names(model: Architecture) -> frozenset[str] | None:
    """Return the names of all modules with weights and of their parents; None if they are not certain.

    The layout of experts differs between versions of transformers.
    """
    if model.experts is not None:
        return None
    paths = [one.name.split(".") for one in all_weights(model, reward_head=True)]
    return frozenset({"lm_head", *(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))})


def total_parameters(model: Architecture, *, reward_head: bool = False) -> int:
    """Return the number of parameters of the model without adapters."""
    return sum(one.count * number for one, number in distinct_weights(model, reward_head=reward_head))


@dataclass(frozen=True)
class Trained:
    """Trainable part of a model; counts are numbers of parameters."""

    whole: tuple[Weight, ...]
    """Fully trained weights: all, or with an adapter those of `modules_to_save`, which are copies."""
    adapted: tuple[Weight, ...]
    """Linear layers with an adapter."""
    rank: int
    dora: bool
    tokens: Weight | None = None
    """Embeddings of single tokens that train beside an adapter; None without any."""

    @cached_property
    def adapter(self) -> int:
        """Number of adapter parameters."""
        return sum(self.adapter_of(one) for one in self.adapted)

    @cached_property
    def count(self) -> int:
        """Total number of trainable parameters."""
        tokens = 0 if self.tokens is None else self.tokens.count
        return self.adapter + tokens + sum(one.count for one in self.whole)

    def adapter_of(self, weight: Weight) -> int:
        """Return the number of parameters that the adapter adds to a layer."""
        return self.rank_of(weight) * (weight.rows + weight.columns) + (weight.rows if self.dora else 0)

    def rank_of(self, weight: Weight) -> int:
        """Return the rank of a layer's adapter, summed over experts; doubled for two matrices stored as one."""
        joined = weight.kind == "experts" and weight.is_named("gate_up_proj")
        return self.rank * weight.copies * (2 if joined else 1)

    @cached_property
    def tensors(self) -> tuple[tuple[str, int, int], ...]:
        """Each trained tensor as (kind of weight or `adapter`, rows, columns); a vector has one column."""
        tensors: list[tuple[str, int, int]] = []
        for weight in self.whole:
            tensors += [(weight.kind, weight.rows * weight.copies, weight.columns)] if weight.kind != "norm" else []
            tensors += (
                [(weight.kind, weight.rows // weight.tensors, 1)] * weight.tensors if weight.kind == "norm" else []
            )
            tensors += [("norm", weight.rows, 1)] if weight.bias else []
        for weight in self.adapted:
            tensors += [
                ("adapter", self.rank_of(weight), weight.columns),
                ("adapter", weight.rows, self.rank_of(weight)),
            ]
            tensors += [("adapter", weight.rows, 1)] if self.dora else []
        tensors += [] if self.tokens is None else [("adapter", self.tokens.rows, self.tokens.columns)]
        return tuple(tensors)

    @cached_property
    def whole_modules(self) -> frozenset[str]:
        """Names of `whole` within a layer, as those of `module_name`."""
        return frozenset(module_name(one.name) for one in self.whole)

    @cached_property
    def adapted_modules(self) -> frozenset[str]:
        """Names of `adapted` within a layer, as those of `module_name`."""
        return frozenset(module_name(one.name) for one in self.adapted)


class CannotTrain(ValueError):
    """Configuration with which this model cannot be trained; the message is a sentence."""


def trainable_part(model: Architecture, config: TrainingConfig) -> Trained:
    """Return the trainable part of the model under an effective configuration (`lora_r` null: everything).

    Raises:
        CannotTrain: A module name matches no weight, or peft rejects the adapter.
    """
    reward = METHODS[config.method].has_reward_head
    if config.lora_r is None:
        return Trained(all_weights(model, reward_head=reward), (), 0, False)
    targets = None if config.target_modules is None else tuple(config.target_modules)
    saved = (*(config.modules_to_save or ()), *([SCORE] if reward else []))
    layers = None if config.layers_to_transform is None else frozenset(config.layers_to_transform)
    adapted = _part_with_adapter(
        model, reward, config.lora_r, targets, saved, layers, has_dropout=config.lora_dropout > 0, dora=config.use_dora
    )
    if not config.trainable_token_indices:
        return adapted
    rows = len(config.trainable_token_indices)
    return replace(adapted, tokens=Weight("trainable_tokens", "embedding", rows, model.hidden))


@lru_cache(maxsize=8)  # called for each choice and each advised change, which have the same adapter
def _part_with_adapter(
    model: Architecture,
    reward: bool,
    rank: int,
    targets: tuple[str, ...] | None,
    saved: tuple[str, ...],
    layers: frozenset[int] | None,
    *,
    has_dropout: bool,
    dora: bool,
) -> Trained:
    every = all_weights(model, reward_head=reward)
    linear = [one for one in every if one.kind == "linear" and one.name not in ("lm_head", SCORE)]
    if layers is not None:
        linear = [one for one in linear if _layer_of(one.name) in layers]
        if not linear:
            raise CannotTrain(f"`layers_to_transform`: this model has no layer {', '.join(map(str, sorted(layers)))}.")
    if targets is not None:
        linear = _named_weights(
            linear, targets, _name_endings, "`target_modules`: this model has no linear layer named"
        )
    elif layers is None and model.family in ADAPTED_EXPERTS and any(one.kind == "experts" for one in every):
        if has_dropout or dora:
            raise CannotTrain(
                f"On a {model.family} model adapters also target the experts, which peft supports only with "
                "`lora_dropout` 0 and without `use_dora`. Change these options, or set `target_modules`."
            )
        linear += [one for one in every if one.kind in ("experts", "router")]
    saveable = _saveable_weights(model, every, reward)
    whole = _named_weights(saveable, saved, _module_names_of, "`modules_to_save`: this model has no module named")
    whole_names = {one.name for one in whole}
    return Trained(tuple(whole), tuple(one for one in linear if one.name not in whole_names), rank, dora)


def _named_weights(
    candidates: Sequence[Weight], names: Sequence[str], names_of: Callable[[str], Iterator[str]], error: str
) -> list[Weight]:
    """Return the weights that one of `names` matches; `names_of` yields all names that match a weight.

    The time is that of one pass over the weights, for any number of names.

    Raises:
        CannotTrain: A name matches no weight; `error` is the start of the sentence.
    """
    requested, matched = frozenset(names), set[str]()
    selected = []
    for candidate in candidates:
        if matching := requested.intersection(names_of(candidate.name)):
            matched |= matching
            selected.append(candidate)
    if missing := next((name for name in names if name not in matched), None):
        raise CannotTrain(f"{error} {missing}.")
    return selected


def _name_endings(weight: str) -> Iterator[str]:
    """Yield the names that match a weight in `target_modules`: its own, and what follows each of its dots."""
    parts = weight.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def _module_names_of(weight: str) -> Iterator[str]:
    """Yield the names that match a weight in `modules_to_save`: of each module that is it or contains it."""
    parts = weight.split(".")
    return (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))


def _layer_of(weight: str) -> int | None:
    return next((int(part) for part in weight.split(".") if part.isdigit()), None)


@cache
def module_name(weight: str) -> str:
    """Strip the layer prefix of a weight's name: `model.layers.3.mlp.up_proj` becomes `mlp.up_proj`."""
    parts = weight.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    if numbers:
        return ".".join(parts[numbers[0] + 1 :])
    return ".".join(parts[1:]) if parts[0] in ("layer", "model", "transformer") else weight


def _saveable_weights(model: Architecture, every: tuple[Weight, ...], reward: bool) -> tuple[Weight, ...]:
    # A tied head gets its own copy of the matrix when it is trained.
    tied = model.tied and not reward
    return (*every, Weight("lm_head", "linear", model.vocabulary, model.hidden)) if tied else every


def _backbone_weights(model: Architecture) -> Iterator[Weight]:
    gpt2 = model.family == "gpt2"
    base, blocks, last = ("transformer", "h", "ln_f") if gpt2 else ("model", "layers", "norm")
    if model.family == "phi":
        last = "final_layernorm"
    yield Weight(f"{base}.{'wte' if gpt2 else 'embed_tokens'}", "embedding", model.vocabulary, model.hidden)
    if model.learnt_positions:
        yield Weight(f"{base}.wpe", "embedding", model.learnt_positions, model.hidden)
    for at in range(model.layers):
        yield from layer_weights(model, at, f"{base}.{blocks}.{at}")
    yield _norm_weight(model, f"{base}.{last}", model.hidden)


def layer_weights(model: Architecture, at: int, prefix: str = "layer") -> Iterator[Weight]:
    """Yield the weights of layer `at` (0-based)."""
    names = _NORMS.get(model.family, ("input_layernorm", "post_attention_layernorm"))
    yield _norm_weight(model, f"{prefix}.{names[0]}", model.hidden)
    yield from _attention_weights(model, f"{prefix}.{'attn' if model.family == 'gpt2' else 'self_attn'}")
    for name in names[1:]:
        yield _norm_weight(model, f"{prefix}.{name}", model.hidden)
    experts = model.experts_of(at)
    if experts is None:
        yield from _mlp_weights(model, f"{prefix}.mlp", model.intermediate)
        return
    yield Weight(f"{prefix}.mlp.gate", "router", experts.number, model.hidden)
    gate_and_up_width, mlp = 2 * experts.width, f"{prefix}.mlp.experts"
    yield Weight(f"{mlp}.gate_up_proj", "experts", gate_and_up_width, model.hidden, copies=experts.number)
    yield Weight(f"{mlp}.down_proj", "experts", model.hidden, experts.width, copies=experts.number)
    if experts.shared_width:
        yield from _mlp_weights(model, f"{prefix}.mlp.shared_expert", experts.shared_width)
        yield Weight(f"{prefix}.mlp.shared_expert_gate", "linear", 1, model.hidden)


_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_NORMS = {
    "gpt2": ("ln_1", "ln_2"),
    "phi": ("input_layernorm",),
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
}
"""Norms of a layer in families that deviate from one before attention and one before the MLP."""


def _attention_weights(model: Architecture, prefix: str) -> Iterator[Weight]:
    query_width, kv_width = model.heads * model.head_width, model.kv_heads * model.head_width
    if model.family in ("gpt2", "phi3"):
        name = "c_attn" if model.family == "gpt2" else "qkv_proj"
        yield Weight(f"{prefix}.{name}", "linear", query_width + 2 * kv_width, model.hidden, model.qkv_bias)
    else:
        for name, rows in (("q_proj", query_width), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield Weight(f"{prefix}.{name}", "linear", rows, model.hidden, model.qkv_bias)
    if model.head_norms:
        suffix = "layernorm" if model.family == "phi" else "norm"
        yield _norm_weight(model, f"{prefix}.q_{suffix}", model.head_width)
        yield _norm_weight(model, f"{prefix}.k_{suffix}", model.head_width)
    out = {"gpt2": "c_proj", "phi": "dense"}.get(model.family, "o_proj")
    yield Weight(f"{prefix}.{out}", "linear", model.hidden, query_width, model.out_bias)


def _mlp_weights(model: Architecture, prefix: str, width: int) -> Iterator[Weight]:
    names = _UP.get(model.family, ("gate_proj", "up_proj"))
    for name in names:
        rows = 2 * width if name == "gate_up_proj" else width
        yield Weight(f"{prefix}.{name}", "linear", rows, model.hidden, model.mlp_bias)
    down = {"gpt2": "c_proj", "phi": "fc2"}.get(model.family, "down_proj")
    yield Weight(f"{prefix}.{down}", "linear", model.hidden, width, model.mlp_bias)


_UP = {"gpt2": ("c_fc",), "phi": ("fc1",), "phi3": ("gate_up_proj",)}


def _norm_weight(model: Architecture, name: str, width: int) -> Weight:
    vectors = 2 if model.norm == "layer" else 1
    return Weight(name, "norm", vectors * width, tensors=vectors)
