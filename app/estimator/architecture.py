"""Model architectures read from `config.json` alone: families, sizes, and the defaults of each family."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from anneal.contracts.training_config.stored_quantization import StoredQuantization, stored_quantization

Norm = Literal["rms", "gemma", "layer"]
"""Normalization of a layer: RMSNorm, RMSNorm with Gemma's order of casts, or LayerNorm (mean and bias)."""


class UnknownArchitecture(ValueError):
    """Configuration from which parameters cannot be counted; the message is a sentence that says why."""


@dataclass(frozen=True)
class Experts:
    """Experts of a layer: their number, the number that each token is routed to, and their inner widths."""

    number: int
    of_a_token: int
    width: int
    shared_width: int = 0
    """Inner width of the shared expert that processes every token; 0 if there is none."""


@dataclass(frozen=True)
class Architecture:
    """Decoder of one of the families in `FAMILIES`; widths are in elements."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    norm: Norm
    activation: str
    tied: bool
    """True if the head shares the embedding matrix."""
    longest: int | None
    """Maximum number of positions; None if not specified."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    head_bias: bool = False
    head_norms: bool = False
    """True if queries and keys are normalized per head."""
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts in a mixture-of-experts model."""
    learnt_positions: int = 0
    """Rows of the learned position embedding matrix; 0 if there is none."""
    rotary_part: float = 1.0
    """Fraction of a head's width to which rotary embeddings are applied."""
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    soft_cap: bool = False
    """True if attention scores are soft-capped with tanh (eager attention only)."""
    window: int = 0
    """Latest tokens that the layers of `windowed_layers` attend to."""
    windowed_layers: frozenset[int] = frozenset()
    stored_quantization: StoredQuantization | None = None
    """Quantization of the weights in the model's files; None if there is none."""

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer (0-based), or None if the layer has a dense MLP."""
        return None if layer in self.dense_layers else self.experts

    def has_window(self, layer: int) -> bool:
        """Return True if a layer (0-based) attends only to the latest tokens."""
        return layer in self.windowed_layers


_MOST_LAYERS = 512
"""Four times those of the largest published model; the time of an estimate grows with them."""
_NULLABLE = ("attn_logit_softcapping", "sliding_window")
"""Fields in which null is a value of its own."""
_ROTARY = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_ROTARY, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
              "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
    "mistral": {**_ROTARY, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {**_ROTARY, "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22016,
              "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
              "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {**_ROTARY, "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22016,
              "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
              "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "gemma": {**_GEMMA, "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24576,
              "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
              "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
    "gemma2": {**_GEMMA, "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
               "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
               "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
               "max_position_embeddings": 8192, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {**_GEMMA, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
                    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
                    "sliding_window": 4096, "sliding_window_pattern": 6},
    "phi": {**_ROTARY, "hidden_act": "gelu_new", "vocab_size": 51200, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
            "max_position_embeddings": 2048, "partial_rotary_factor": 0.5},
    "phi3": {**_ROTARY, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
             "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
    "mixtral": {**_ROTARY, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "num_experts_per_tok": 2, "num_local_experts": 8, "max_position_embeddings": 131_072},
    "qwen2_moe": {**_ROTARY, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
                  "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
                  "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
                  "mlp_only_layers": [], "qkv_bias": True, "max_position_embeddings": 32768},
    "qwen3_moe": {**_ROTARY, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
                  "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
                  "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
                  "num_experts": 128, "mlp_only_layers": [], "max_position_embeddings": 32768, "sliding_window": 4096},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
             "activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
             "tie_word_embeddings": True},
}  # fmt: skip
"""Default values of each family for fields missing from `config.json` (transformers saves only what differs)."""


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a `config.json` describes.

    Raises:
        UnknownArchitecture: The family is not supported, or a size is impossible.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownArchitecture(
            f"The model family {str(family)[:60]!r} is not supported by the estimator. Supported families: "
            f"{known}. Set `probe: true` to measure the run with two steps on a worker."
        )
    # A null means the same as a missing field, except where null is a valid value.
    fields = {name: value for name, value in config.items() if value is not None or name in _NULLABLE}
    whole = {**FAMILIES[family], **fields}
    try:
        layers = _read_size(whole, "n_layer" if family == "gpt2" else "num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise ValueError(f"{layers} layers exceed the supported maximum")
        model = _read_gpt2(whole) if family == "gpt2" else _read_rotary(family, whole)
        return replace(model, stored_quantization=stored_quantization(config))
    except UnknownArchitecture:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = str(error)[:200] if isinstance(error, ValueError) else "a value has the wrong type"
        raise UnknownArchitecture(f"The model's config.json does not describe a {family} model: {why}.") from error


_POSITIVE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_POSITIVE_GPT2 = ("n_embd", "n_head", "vocab_size", "n_positions")


def impossible_size(config: Mapping[str, Any]) -> str | None:
    """Describe the first size in a known family's `config.json` that cannot be loaded, or return None.

    Less strict than `read_architecture`: only sizes that are certain to fail are reported.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return None
    for name in _POSITIVE_GPT2 if family == "gpt2" else _POSITIVE:
        value = config.get(name)
        is_number = isinstance(value, int | float)
        if value is not None and (not is_number or value < 1):
            return f"`{name}` is {str(value)[:40]!r}, which is not a valid size"
    return None


def _read_rotary(family: str, fields: Mapping[str, Any]) -> Architecture:
    heads, hidden = _read_size(fields, "num_attention_heads"), _read_size(fields, "hidden_size")
    layers = _read_size(fields, "num_hidden_layers")
    kv_heads = _read_size(fields, "num_key_value_heads") if "num_key_value_heads" in fields else heads
    if kv_heads > heads:
        raise ValueError(f"{kv_heads} key-value heads are more than the {heads} attention heads that share them")
    gemma, phi = family.startswith("gemma"), family == "phi"
    attention_bias = bool(fields.get("attention_bias")) and family not in ("mistral", "mixtral", "phi3")
    windowed_layers = _windowed_layers(family, fields, layers)
    return Architecture(
        family=family,
        vocabulary=_read_size(fields, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=_read_size(fields, "head_dim") if "head_dim" in fields else _head_width(hidden, heads),
        intermediate=_read_size(fields, "intermediate_size"),
        norm="gemma" if gemma else "layer" if phi else "rms",
        activation=str(fields.get("hidden_activation") or fields.get("hidden_act")),
        tied=bool(fields["tie_word_embeddings"]),
        longest=_read_size(fields, "max_position_embeddings"),
        qkv_bias={"qwen2": True, "phi": True, "qwen2_moe": bool(fields.get("qkv_bias"))}.get(family, attention_bias),
        out_bias=phi or (attention_bias and family not in ("qwen2", "qwen2_moe")),
        mlp_bias=phi or (family == "llama" and bool(fields.get("mlp_bias"))),
        head_bias=phi,
        head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text") or (phi and bool(fields.get("qk_layernorm"))),
        experts=_read_experts(family, fields),
        dense_layers=_dense_layers(fields, layers) if family in ("qwen2_moe", "qwen3_moe") else frozenset(),
        rotary_part=_rotary_part(fields) if family in ("phi", "phi3") else 1.0,
        residual_dropout=_check_fraction("resid_pdrop", fields.get("resid_pdrop") or 0.0),
        attention_dropout=_check_fraction("attention_dropout", fields.get("attention_dropout") or 0.0),
        soft_cap=family == "gemma2" and fields.get("attn_logit_softcapping") is not None,
        window=_read_size(fields, "sliding_window") if windowed_layers else 0,
        windowed_layers=windowed_layers,
    )


def _read_gpt2(fields: Mapping[str, Any]) -> Architecture:
    hidden, heads = _read_size(fields, "n_embd"), _read_size(fields, "n_head")
    if fields.get("add_cross_attention"):
        raise UnknownArchitecture("The model has cross-attention, which no training method supports.")
    return Architecture(
        family="gpt2",
        vocabulary=_read_size(fields, "vocab_size"),
        hidden=hidden,
        layers=_read_size(fields, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_width=_head_width(hidden, heads),
        intermediate=_read_size(fields, "n_inner") if "n_inner" in fields else 4 * hidden,
        norm="layer",
        activation=str(fields["activation_function"]),
        tied=bool(fields["tie_word_embeddings"]),
        longest=_read_size(fields, "n_positions"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learnt_positions=_read_size(fields, "n_positions"),
        rotary_part=0.0,
        residual_dropout=_check_fraction("resid_pdrop", fields["resid_pdrop"]),
        attention_dropout=_check_fraction("attn_pdrop", fields["attn_pdrop"]),
    )


def _read_experts(family: str, fields: Mapping[str, Any]) -> Experts | None:
    if family == "mixtral":
        number, width = _read_size(fields, "num_local_experts"), _read_size(fields, "intermediate_size")
        return Experts(number, _read_size(fields, "num_experts_per_tok"), width)
    if family in ("qwen2_moe", "qwen3_moe"):
        shared = _read_size(fields, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0
        # transformers 5 reads both names and saves `num_local_experts`.
        number = _read_size(fields, "num_local_experts" if "num_local_experts" in fields else "num_experts")
        width = _read_size(fields, "moe_intermediate_size")
        return Experts(number, _read_size(fields, "num_experts_per_tok"), width, shared)
    return None


def _dense_layers(fields: Mapping[str, Any], layers: int) -> frozenset[int]:
    named, step = set(fields["mlp_only_layers"]), _read_size(fields, "decoder_sparse_step")
    return frozenset(at for at in range(layers) if at in named or (at + 1) % step)


def _windowed_layers(family: str, fields: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Return the layers that attend to a window of tokens, as the configuration class of the family finds them."""
    uses_windows = not family.startswith("qwen") or fields.get("use_sliding_window")
    if fields.get("sliding_window") is None or not uses_windows:
        return frozenset()
    if "layer_types" in fields:
        return frozenset(at for at, kind in enumerate(fields["layer_types"][:layers]) if kind == "sliding_attention")
    if family in ("qwen2", "qwen3"):
        return frozenset(range(fields["max_window_layers"], layers))
    every = fields.get("sliding_window_pattern")
    return frozenset(at for at in range(layers) if every is None or (at + 1) % every)


def _rotary_part(fields: Mapping[str, Any]) -> float:
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    name = "partial_rotary_factor"
    return _check_fraction(name, nested.get(name, fields.get(name, 1.0)))


def _head_width(hidden: int, heads: int) -> int:
    if heads > hidden:
        raise ValueError(f"{heads} attention heads exceed the hidden size of {hidden}")
    return hidden // heads


def _check_fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` is {str(value)[:40]!r}, which is not a number from 0 to 1")
    return float(value)


def _read_size(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
        raise ValueError(f"`{name}` is {str(value)[:40]!r}, which is not a valid size")
    return value
