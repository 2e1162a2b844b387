"""Forward pass of a decoder on a tape: records the tensors that a training step keeps, by model family."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from app.estimator.architecture import Architecture, Experts
from app.estimator.parameters import Weight, layer_weights
from app.estimator.tape import Layer, Tape, Value

Attention = Literal["sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3"]


@dataclass(frozen=True)
class Batch:
    """Shape of a micro-batch as the model receives it."""

    sequences: int
    length: int
    masked: bool = False
    """True if an attention mask is passed: a sequence is padded, or several documents share one."""
    positions_each: bool = False
    """True if each sequence has its own position ids."""
    texts: int = 1
    """Number of texts of equal length in each sequence, whose tokens attend to their own text only."""
    sequence_parallel: int = 1
    """Number of devices that share each sequence."""

    @property
    def length_each(self) -> int:
        """Number of tokens of each sequence on a device."""
        return -(-self.length // self.sequence_parallel)

    @property
    def tokens(self) -> int:
        """Number of tokens on a device, padding included."""
        return self.sequences * self.length_each

    @property
    def pairs(self) -> int:
        """Number of token pairs in the attention mask, or of those that attend to each other."""
        return self.sequences * self.length**2 // self.texts

    def attention_scores(self, heads: int) -> int:
        """Return the number of attention scores on a device, which has all pairs for its part of the heads."""
        return self.pairs * heads // self.sequence_parallel


@dataclass(frozen=True)
class Loaded:
    """Lookup by weight: the type in which it is loaded, and whether it trains."""

    layer: Callable[[Weight], Layer]
    norm_trains: Callable[[Weight], bool]
    norm_bytes: int
    hidden_bytes: int
    """Bytes per element of the embeddings."""


WITH_NEW_NORM_GRADIENTS = ("gemma2", "gemma3_text")
"""Families whose norms of liger-kernel do not write the gradient of their input over that of their result."""


class Forward:
    """One forward pass; `tape` records the tensors that it keeps."""

    def __init__(
        self,
        model: Architecture,
        batch: Batch,
        attention: Attention,
        loaded: Loaded,
        tape: Tape,
        *,
        has_liger: bool = False,
    ) -> None:
        self._model, self._batch, self._attention = model, batch, attention
        self._loaded, self.tape, self._has_liger = loaded, tape, has_liger
        tokens = batch.tokens if batch.positions_each else batch.length_each
        width = round(model.head_width * model.rotary_part)
        turn = tokens * width, loaded.hidden_bytes, False
        self._rotary = Value(*turn), Value(*turn)
        self._joins = model.family in ("phi", "phi3") and not has_liger

    @property
    def has_turned(self) -> bool:
        """True if the tape already holds the rotary sines and cosines, which all layers share."""
        return all(one.storage in self.tape.saved for one in self._rotary)

    def apply_layer(self, at: int, value: Value) -> Value:
        """Apply layer `at` (0-based) to hidden states."""
        parts = {one.name.removeprefix("layer."): one for one in layer_weights(self._model, at)}
        self.tape.referenced = (value,)
        if self._model.family == "phi":
            return self._apply_parallel_layer(parts, value)
        names = [name for name in parts if parts[name].kind == "norm" and name.count(".") == 0]
        first, before = names[0], names[1] if len(names) == 2 else names[2]
        out = self._apply_attention(parts, self.apply_norm(parts[first], value), self._has_window(at))
        if len(names) == 4:
            out = self.apply_norm(parts[names[1]], out)
        value = self.tape.plus(value, self._apply_dropout(out))
        self.tape.referenced = (value,)
        inner = self.apply_norm(parts[before], value)
        experts = self._model.experts_of(at)
        out = self._apply_mlp(parts, "mlp", inner) if experts is None else self._apply_experts(parts, experts, inner)
        if len(names) == 4:
            out = self.apply_norm(parts[names[3]], out)
        return self.tape.plus(value, self._apply_dropout(out))

    def apply_norm(self, weight: Weight, value: Value) -> Value:
        """Apply a norm over the width of its weights."""
        trains, size = self._loaded.norm_trains(weight), self._loaded.norm_bytes
        width = weight.rows // weight.tensors
        if self._model.norm == "layer":
            return self.tape.layer_norm(value, trains=trains, size=size, width=width)
        gemma = self._model.norm == "gemma"
        if self._has_liger:
            is_in_place = self._model.family not in WITH_NEW_NORM_GRADIENTS
            return self.tape.liger_rms_norm(value, trains=trains, width=width, in_place=is_in_place)
        return self.tape.rms_norm(value, trains=trains, size=size, gemma=gemma, width=width)

    def _has_window(self, at: int) -> bool:
        """Return True if the layer attends only to the latest tokens, which `sdpa` can only do with a mask."""
        return self._model.has_window(at) and self._batch.length >= self._model.window

    def _apply_parallel_layer(self, parts: dict[str, Weight], value: Value) -> Value:
        inner = self.apply_norm(parts["input_layernorm"], value)
        attended = self._apply_dropout(self._apply_attention(parts, inner))
        return self.tape.plus(value, attended, self._apply_dropout(self._apply_mlp(parts, "mlp", inner)))

    def _apply_dropout(self, value: Value) -> Value:
        return self.tape.dropout(value) if self._model.residual_dropout else value

    def _apply_linear(self, parts: dict[str, Weight], name: str, value: Value) -> Value:
        return self.tape.linear(value, self._loaded.layer(parts[name]))

    def _apply_attention(self, parts: dict[str, Weight], value: Value, has_window: bool = False) -> Value:
        model, tokens = self._model, self._batch.tokens
        query_elements, kv_elements = (
            tokens * model.heads * model.head_width,
            tokens * model.kv_heads * model.head_width,
        )
        if "attn.c_attn" in parts or "self_attn.qkv_proj" in parts:
            joined = self._apply_linear(parts, "attn.c_attn" if "attn.c_attn" in parts else "self_attn.qkv_proj", value)
            query, key, states = (
                self.tape.view_part(joined, size) for size in (query_elements, kv_elements, kv_elements)
            )
        else:
            query, key, states = (self._apply_linear(parts, f"self_attn.{name}_proj", value) for name in "qkv")
        if model.head_norms:
            suffix = "layernorm" if model.family == "phi" else "norm"
            query = self.apply_norm(parts[f"self_attn.q_{suffix}"], query)
            key = self.apply_norm(parts[f"self_attn.k_{suffix}"], key)
        if model.rotary_part:
            query, key = self._apply_rotary(query), self._apply_rotary(key)
        # Two products per pair of tokens, regardless of whether the kernel skips the causal half.
        grad = query.grad or key.grad or states.grad
        tape, operations = self.tape, 4 * self._batch.attention_scores(model.heads) * model.head_width
        tape.count_product(operations, grad, grad)
        masked = (self._batch.masked or has_window) and self._attention == "sdpa"
        out = next(name for name in ("attn.c_proj", "self_attn.dense", "self_attn.o_proj") if name in parts)
        if self._batch.sequence_parallel > 1:
            # Copies that the devices have exchanged; each needs heads of keys and values.
            repeats = math.lcm(model.kv_heads, self._batch.sequence_parallel) // model.kv_heads
            query = tape.new_value(query.elements, query.bytes, query)
            key, states = (tape.new_value(one.elements * repeats, one.bytes, one) for one in (key, states))
        if self._attention == "eager":
            result = self._eager_attention(query, key, states)
        else:
            result = self._fused_attention(query, key, states, masked=masked)
        if self._batch.sequence_parallel > 1:
            result = tape.new_value(result.elements, result.bytes, result)
        return self._apply_linear(parts, out, result)

    def _apply_rotary(self, value: Value) -> Value:
        if self._has_liger:
            return self._rotate_in_place(value)
        size = max(value.bytes, self._rotary[0].bytes)
        halves = self.tape.new_value(value.elements, value.bytes, value, workspace=2 * value.elements * value.bytes)
        turned = []
        for factor, part in zip(self._rotary, (value, halves), strict=True):
            if value.grad:
                self.tape.save_value(factor)
            turned.append(self.tape.new_value(value.elements, size, part))
        return self.tape.plus(*turned)

    def _rotate_in_place(self, value: Value) -> Value:
        """Rotate as liger-kernel does, which copies a part of a larger tensor first."""
        if value.grad:
            for factor in self._rotary:
                self.tape.save_value(factor)
        return self.tape.new_value(value.elements, value.bytes, value) if value.storage_bytes is not None else value

    def _repeat_heads(self, value: Value) -> Value:
        """Expand keys or values to all heads that share them."""
        times = self._model.heads // self._model.kv_heads
        return value if times == 1 else self.tape.new_value(value.elements * times, value.bytes, value)

    def _fused_attention(self, query: Value, key: Value, states: Value, *, masked: bool) -> Value:
        if self._model.attention_dropout and self.tape.device == "cpu":
            return self._unfused_attention(query, key, states)
        if self._attention in ("sdpa", "varlen") and (masked or self._model.head_width > 256):
            key, states = self._repeat_heads(key), self._repeat_heads(states)
        if self.tape.autocast:
            query, key, states = (self.tape.cast(one, 2) for one in (query, key, states))
        rows = self._batch.tokens * self._model.heads
        if query.grad or key.grad or states.grad:
            for tensor in (query, key, states):
                self.tape.save_value(tensor)
            self.tape.save_value(Value(rows, 4, False))
            if masked:
                # The mask is boolean; each layer converts it to the type of the query.
                self.tape.save_value(Value(self._batch.pairs, query.bytes, False))
        workspace = 0
        if self.tape.device == "cuda" and not masked:
            # A query gradient in 32 bits, and gradients of keys and values before those of shared heads are summed.
            shared = 2 * query.elements * query.bytes if key.elements < query.elements else 0
            workspace = query.elements * 4 + rows * 4 + shared
        result = self.tape.new_value(
            query.elements, query.bytes, query, key, states, workspace=workspace, keeps_output=True
        )
        # With partial rotary embeddings the parts are concatenated in another order, so the output is a copy; on a CPU,
        # the results of the texts of a sequence are concatenated.
        by_text = self._attention == "varlen" and self._batch.positions_each and self.tape.device == "cpu"
        return self.tape.new_value(result.elements, result.bytes, result) if self._joins or by_text else result

    def _unfused_attention(self, query: Value, key: Value, states: Value) -> Value:
        """Apply attention with dropout on a CPU, which has no fused kernel for it: each operation separately."""
        tape, pairs = self.tape, self._batch.attention_scores(self._model.heads)
        key, states = self._repeat_heads(key), self._repeat_heads(states)
        scores = tape.new_value(pairs, query.bytes, query, key)
        if scores.grad:
            for tensor in (query, key):
                tape.save_value(tape.new_value(tensor.elements, tensor.bytes, tensor))
            tape.save_value(scores)
        shares = tape.dropout(tape.new_value(pairs, query.bytes, scores))
        if states.grad or shares.grad:
            tape.save_value(shares)
            tape.save_value(tape.new_value(states.elements, states.bytes, states))
        return tape.new_value(query.elements, query.bytes, shares, states)

    def _eager_attention(self, query: Value, key: Value, states: Value) -> Value:
        tape, pairs = self.tape, self._batch.attention_scores(self._model.heads)
        key, states = self._repeat_heads(key), self._repeat_heads(states)
        if tape.autocast:
            query, key, states = (tape.cast(one, 2) for one in (query, key, states))
        size = query.bytes
        if key.grad or query.grad:
            for tensor in (query, key):
                tape.save_value(tensor)
        scores = tape.new_value(pairs, size, query, key)
        if self._model.soft_cap:
            scores = tape.new_value(pairs, size, scores, keeps_output=True)
        probabilities = tape.new_value(pairs, 4, tape.cast(scores, 4), keeps_output=True)
        shares = tape.cast(probabilities, size)
        if self._model.attention_dropout:
            shares = tape.dropout(shares)
        if shares.grad:
            tape.save_value(states)
        if states.grad:
            tape.save_value(shares)
        return tape.new_value(query.elements, size, shares, states)

    def _apply_mlp(self, parts: dict[str, Weight], prefix: str, value: Value) -> Value:
        tape, act = self.tape, self._model.activation
        # A worker leaves the MLPs of models with experts to transformers.
        has_liger = self._has_liger and self._model.experts is None
        if f"{prefix}.gate_up_proj" in parts:
            joined = self._apply_linear(parts, f"{prefix}.gate_up_proj", value)
            gate, up = (tape.view_part(joined, joined.elements // 2) for _ in range(2))
            if has_liger:
                inner = tape.liger_gated(*(tape.new_value(half.elements, half.bytes, half) for half in (gate, up)))
            else:
                inner = tape.times(up, tape.activation(gate, act))
        elif f"{prefix}.gate_proj" in parts:
            gate = self._apply_linear(parts, f"{prefix}.gate_proj", value)
            if has_liger:
                inner = tape.liger_gated(gate, self._apply_linear(parts, f"{prefix}.up_proj", value))
            else:
                gate = tape.activation(gate, act)
                inner = tape.times(gate, self._apply_linear(parts, f"{prefix}.up_proj", value))
        else:
            first = "fc1" if f"{prefix}.fc1" in parts else "c_fc"
            inner = tape.activation(self._apply_linear(parts, f"{prefix}.{first}", value), act)
        last = next(name for name in ("down_proj", "fc2", "c_proj") if f"{prefix}.{name}" in parts)
        return self._apply_linear(parts, f"{prefix}.{last}", inner)

    def _apply_experts(self, parts: dict[str, Weight], experts: Experts, value: Value) -> Value:
        """Apply a mixture of experts; each expert keeps only the tensors of the tokens routed to it."""
        tape, tokens = self.tape, self._batch.tokens
        sent, hidden = tokens * experts.of_a_token, self._model.hidden
        gate = self._loaded.layer(parts["mlp.gate"])
        # Peft adds the adapter to the router's matrix, as it does to those of experts.
        router = tape.linear(value, replace(gate, trains=gate.trains or gate.rank > 0, rank=0))
        if router.grad:
            tape.save_value(Value(router.elements, 4, False))  # its probabilities
            tape.save_value(Value(sent, 8, False))
        chosen = tape.new_value(sent, 4, router)
        up = self._loaded.layer(parts["mlp.experts.gate_up_proj"])
        down = self._loaded.layer(parts["mlp.experts.down_proj"])
        taken = tape.new_value(sent * hidden, value.bytes, value)
        joined = self._of_experts(taken, sent * 2 * experts.width, up, parts["mlp.experts.gate_up_proj"])
        half = sent * experts.width
        inner = tape.times(
            tape.activation(tape.view_part(joined, half), self._model.activation), tape.view_part(joined, half)
        )
        inner = self._of_experts(inner, sent * hidden, down, parts["mlp.experts.down_proj"])
        result = tape.times(inner, chosen)
        out = tape.new_value(tokens * hidden, value.bytes, result)
        if not experts.shared_width:
            return out
        shared = self._apply_mlp(parts, "mlp.shared_expert", value)
        share = tape.activation(self._apply_linear(parts, "mlp.shared_expert_gate", value), "sigmoid")
        return tape.plus(out, tape.times(share, shared))

    def _of_experts(self, value: Value, elements: int, loaded: Layer, weight: Weight) -> Value:
        """Multiply by the experts' matrices; peft adds the adapter to the matrices themselves, which makes a copy."""
        if loaded.rank:
            size = 2 if self.tape.autocast else loaded.bytes
            self.tape.save_value(Value(weight.weights, size, True))
        trains = loaded.trains or loaded.rank > 0
        return self.tape.product(value, elements, loaded.bytes, inner=weight.columns, trains=trains)
