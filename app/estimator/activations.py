"""Activation memory of a training step, by micro-batch shape and gradient checkpointing."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Attention, Batch, Forward, Loaded
from app.estimator.parameters import Trained, Weight, module_name, trainable_part
from app.estimator.tape import BackwardPass, Device, Layer, Operation, Tape, Value

Checkpointing = Literal["off", "selective", "full"]
"""Layers recomputed in the backward pass: none, the first half, all."""

HEAD_TOKENS, HEAD_WORDS = 4096, 32768
"""Tokens and vocabulary entries of the tile in which TRL projects hidden states, instead of full logits."""
HEAD_ROWS = 256
"""A tile of all vocabulary entries, for a frozen head, has a multiple of so many tokens."""
LIGER_FAMILIES = frozenset({
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe",
})  # fmt: skip
"""Families of `FAMILIES` that are in `MODEL_TYPE_TO_APPLY_LIGER_FN` of liger-kernel 0.8.5."""
LIGER_PACKAGE = "liger-kernel"
"""Name of the package, as workers report it if it is installed."""


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each part of the model as a worker loads it, and the kernels that compute it."""

    device: Device
    autocast: bool
    """True if products are computed in 16 bits regardless of the weight type."""
    base: int
    """Bytes of weights that are not quantized."""
    trained: int = 4
    """Bytes of weights that are trained, adapters among them, and of their gradients."""
    has_liger: bool = False
    """True if liger-kernel computes norms, rotary embeddings and gated layers of the families that it has."""

    @classmethod
    def for_device(cls, config: TrainingConfig, device: Device, *, has_liger: bool = False) -> "Precision":
        """Return the precision that a worker uses on that kind of device for an effective configuration.

        `has_liger`: liger-kernel is installed there. It is used on a GPU only, and not in compiled layers.
        """
        half = config.dtype != "float32" if device == "cuda" else config.dtype == "bfloat16"
        is_half_trained = config.lora_r is None and config.weights_dtype == "bfloat16"
        return cls(
            device=device,
            autocast=half,
            base=2 if is_half_trained or (half and config.lora_r is not None) else 4,
            trained=2 if is_half_trained else 4,
            has_liger=has_liger and device == "cuda" and not config.torch_compile,
        )


@dataclass(frozen=True)
class Activations:
    """Bytes kept after the forward pass, recomputed in the backward pass, and used by the head; operation counts."""

    kept_bytes: int
    again: int
    mask: int
    """Bytes of the attention mask: allocated during the forward pass, kept by no operation."""
    head: int
    """Bytes kept for the loss."""
    forward: int
    """Operations of matrix products in the forward pass."""
    operations: int
    """Operations of matrix products, forward and backward."""
    operations_again: int
    """Operations of recomputed matrix products."""
    head_workspace: int
    """Bytes of the logits tile and of gradients accumulated in 32 bits, in the backward pass."""
    peak: int
    """Highest bytes within the step: kept tensors, temporaries, and gradients, of weights only those that are new."""


def compute_activations(
    model: Architecture,
    config: TrainingConfig,
    precision: Precision,
    batch: Batch,
    checkpointing: Checkpointing | int,
    attention: Attention,
    shards: int = 1,
) -> Activations:
    """Compute the activations of a micro-batch under an effective configuration.

    `batch` contains both answers of each pair. `checkpointing` may be the number of recomputed layers. `shards` is the
    number of devices that share the gradients of weights.

    Raises:
        CannotTrain: The model cannot be trained with this configuration.
    """
    trainable = trainable_part(model, config)
    loaded = _Loaded(model, config, precision, trainable)
    tape = Tape(precision.device, precision.autocast)
    has_liger = precision.has_liger and is_in_liger(model, config)
    forward = Forward(model, batch, attention, loaded.as_loaded(), tape, has_liger=has_liger)
    recomputed = recomputed_layers(checkpointing, model.layers)
    value = _embed_tokens(model, loaded, batch, tape, recomputes=recomputed > 0)
    again = repeated = 0
    walks: dict[tuple[Any, ...], _Walk] = {}
    layers: list[tuple[int, _Walk]] = []
    for at in range(model.layers):
        is_repeated = at < recomputed  # a worker recomputes the layers next to the input
        if is_repeated:
            tape.save_value(value)
        # Most layers equal an earlier one; the key contains everything that the result depends on.
        shape, has_saved = replace(value, storage=0), value.storage in tape.saved
        key = model.experts_of(at), model.has_window(at), shape, has_saved, forward.has_turned, is_repeated
        walk, before = walks.get(key), tape.total
        if walk is None:
            walk = walks[key] = _walk_layer(forward, at, value, keeps=not is_repeated)
            value = walk.result
        else:
            tape.forward_operations += walk.forward
            tape.backward_operations += walk.backward
            if not is_repeated:
                tape.save_value(Value(walk.kept_bytes, 1, False))
            value = walk.result.new_like()
        layers.append((before, walk))
        if is_repeated:
            again = max(again, walk.kept_bytes)
            repeated += walk.forward
    kept_bytes, first, saved = tape.total, len(tape.operations), set(tape.saved)
    backbone = forward.apply_norm(_last_norm(model), value)
    kept_by_norm = tape.total - kept_bytes
    loss, head, highest, workspace = _apply_head(model, config, loaded, batch, backbone, tape)
    head_saved = {storage: size for storage, size in tape.saved.items() if storage not in saved}
    has_mask, windowed = batch.masked or attention == "eager", len(model.windowed_layers)
    highest += kept_by_norm
    masks = (windowed > 0 and (has_mask or batch.length >= model.window)) + (has_mask and windowed < model.layers)
    return Activations(
        kept_bytes=kept_bytes,
        again=again,
        mask=masks * batch.pairs * {"eager": precision.base, "sdpa": 1}.get(attention, 0),
        head=tape.total - kept_bytes + head,
        forward=tape.forward_operations,
        operations=tape.forward_operations + tape.backward_operations,
        operations_again=repeated,
        head_workspace=workspace,
        peak=_peak_bytes(
            [
                *layers,
                (kept_bytes, _Walk(loss, tape.total - kept_bytes + head, tape.operations[first:], head_saved, highest)),
            ],
            config, model, loaded, shards,
        ),
    )  # fmt: skip


def recomputed_layers(checkpointing: Checkpointing | int, layers: int) -> int:
    """Return the number of recomputed layers of a model that has `layers`."""
    if isinstance(checkpointing, int):
        return checkpointing
    return {"off": 0, "selective": -(-layers // 2), "full": layers}[checkpointing]


def is_in_liger(model: Architecture, config: TrainingConfig) -> bool:
    """Return True if liger-kernel has the class of the model that the method of the configuration trains."""
    # Of Gemma 3, it has the causal model alone.
    is_known = model.family != "gemma3_text" or not METHODS[config.method].has_reward_head
    return is_known and model.family in LIGER_FAMILIES


def _peak_bytes(
    parts: list[tuple[int, "_Walk"]], config: TrainingConfig, model: Architecture, loaded: "_Loaded", shards: int
) -> int:
    """Return the highest bytes within the step; `parts` are layers and head, with the bytes kept before each."""
    keeps_gradients = config.gradient_accumulation_steps == 1
    passes: dict[int, BackwardPass] = {}
    peak = cached = gradients = 0
    for before, walk in parts:
        peak = max(peak, before + cached + walk.highest)
        cached += walk.cached
    for before, walk in reversed(parts):
        if id(walk) not in passes:
            passes[id(walk)] = BackwardPass(
                walk.operations, walk.saved, walk.result, keeps_gradients=keeps_gradients and shards == 1
            )
        # A layer that keeps nothing runs again while the gradient of its result waits.
        again = walk.highest + walk.result.kept_bytes
        peak = max(peak, before + gradients + max(again, walk.kept_bytes + passes[id(walk)].peak))
        if keeps_gradients:
            gradients += sum(operation.weights for operation in walk.operations) // shards
    if loaded.is_trained(_embedding_weight(model)) and shards == 1:
        # The gradient of a matrix that the head shares is added to that of the head.
        peak = max(
            peak, gradients + model.vocabulary * model.hidden * loaded.loaded_layer(_embedding_weight(model)).bytes
        )
    return peak


@dataclass(frozen=True)
class _Walk:
    """Result of the forward pass through one layer or the head."""

    result: Value
    kept_bytes: int
    """Newly kept bytes."""
    operations: list[Operation]
    saved: dict[int, int]
    """Newly kept bytes by storage."""
    highest: int
    """Highest number of bytes alive while it ran, beyond those kept before."""
    cached: int = 0
    """Bytes that it adds to autocast's cache of trained weights and does not keep itself."""
    forward: int = 0
    backward: int = 0


def _walk_layer(forward: Forward, at: int, value: Value, *, keeps: bool) -> _Walk:
    """Run one layer; unless `keeps` is set, remove the layer's kept tensors from the tape again."""
    tape = forward.tape
    before, first, cached = dict(tape.saved), len(tape.operations), tape.cached
    done, to_do = tape.forward_operations, tape.backward_operations
    tape.highest = there = tape.total
    result = forward.apply_layer(at, value)
    saved = {storage: size for storage, size in tape.saved.items() if storage not in before}
    if not keeps:
        tape.saved = before
    return _Walk(
        result, sum(saved.values()), tape.operations[first:], saved, tape.highest - there,
        0 if keeps else tape.cached - cached,
        tape.forward_operations - done, tape.backward_operations - to_do,
    )  # fmt: skip


class _Loaded:
    """Properties of each weight, by name."""

    def __init__(self, model: Architecture, config: TrainingConfig, precision: Precision, trainable: Trained) -> None:
        self._config, self._precision = config, precision
        self._full = config.lora_r is None
        self._whole, self._adapted = trainable.whole_modules, trainable.adapted_modules
        self._rank, self._dora = trainable.rank, trainable.dora
        # The linear layers of GPT-2 are of a class of their own until they are quantized.
        self._fuses = model.family != "gpt2" or config.load_in_4bit or config.load_in_8bit

    def as_loaded(self) -> Loaded:
        return Loaded(
            layer=self.loaded_layer,
            norm_trains=self.is_trained,
            norm_bytes=self._precision.base,
            hidden_bytes=self._precision.base,
        )

    def is_trained(self, weight: Weight) -> bool:
        return self._full or module_name(weight.name) in self._whole

    def loaded_layer(self, weight: Weight) -> Layer:
        config, precision, short = self._config, self._precision, module_name(weight.name)
        trains = self.is_trained(weight)
        is_quantized = weight.kind == "linear" and not trains and short not in ("lm_head", "score")
        return Layer(
            rows=weight.rows,
            columns=weight.columns,
            trains=trains,
            bytes=precision.trained if trains else precision.base,
            quantised=("4bit" if config.load_in_4bit else "8bit" if config.load_in_8bit else None)
            if is_quantized
            else None,
            rank=self._rank if short in self._adapted else 0,
            dropout=config.lora_dropout > 0,
            dora=self._dora,
            fused=self._fuses,
        )


def _embed_tokens(model: Architecture, loaded: _Loaded, batch: Batch, tape: Tape, *, recomputes: bool) -> Value:
    trains = loaded.is_trained(_embedding_weight(model))
    if trains:
        tape.save_value(Value(batch.tokens, 8, False))
    # A recomputed layer needs an input that requires a gradient, so the embedding output gets one.
    grad = trains or recomputes
    value = Value(batch.tokens * model.hidden, loaded.as_loaded().hidden_bytes, grad)
    return tape.dropout(value) if model.family == "gpt2" and model.residual_dropout else value


def _embedding_weight(model: Architecture) -> Weight:
    name = "transformer.wte" if model.family == "gpt2" else "model.embed_tokens"
    return Weight(name, "embedding", model.vocabulary, model.hidden)


def _last_norm(model: Architecture) -> Weight:
    vectors = 2 if model.norm == "layer" else 1
    return Weight("model.norm", "norm", vectors * model.hidden, tensors=vectors)


def _apply_head(
    model: Architecture, config: TrainingConfig, loaded: _Loaded, batch: Batch, value: Value, tape: Tape
) -> tuple[Value, int, int, int]:
    """Return the loss of each token, the bytes kept beside the tape, and those alive in either pass.

    In the forward pass these are its input too, which the model's output refers to, and the part that has targets.
    """
    if METHODS[config.method].has_reward_head:
        return tape.linear(value, loaded.loaded_layer(Weight("score", "linear", 1, model.hidden))), 0, 0, 0
    taught = batch.sequences * (batch.length - 1) if batch.sequence_parallel == 1 else batch.tokens
    head = loaded.loaded_layer(Weight("lm_head", "linear", model.vocabulary, model.hidden))
    operations = 2 * batch.tokens * model.hidden * model.vocabulary
    trains = head.trains or (model.tied and config.lora_r is None)
    tape.count_product(operations, trains, value.grad)
    alive = value.kept_bytes
    # The last position of each sequence has no target; slicing it off makes a copy.
    if batch.sequence_parallel == 1 and (batch.sequences > 1 or tape.device == "cuda"):
        value = tape.new_value(value.elements, value.bytes, value)
        value = tape.new_value(taught * model.hidden, value.bytes, value)
        alive += value.kept_bytes
    size, states = 2 if tape.autocast else value.bytes, taught * model.hidden
    words = min(HEAD_WORDS, model.vocabulary)
    cast = words * model.hidden * size if head.bytes != size else 0
    if trains:
        tile = min(taught, HEAD_TOKENS) * words * size
        gradient = model.vocabulary * model.hidden * head.bytes
        tape.save_value(value)
        sums = states * 4
    else:
        # The derivative of each token's log-probability is computed with it; a tile has the whole vocabulary.
        rows = HEAD_TOKENS * HEAD_WORDS // model.vocabulary
        tile = min(taught, rows // HEAD_ROWS * HEAD_ROWS or rows) * model.vocabulary * size
        cast *= -(-model.vocabulary // words)
        gradient, sums = 0, states * 4
        tape.save_value(Value(states, size, True))
        alive += states * size
    small = taught * (8 + 4 + 4 + 1)  # targets, normalizers, entropies, a mask
    backward = sums + (tile + cast if trains else 0)
    loss = tape.new_value(taught, 4, value, grad=trains, workspace=backward, weights=gradient)
    return loss, small, alive + tile + cast, max(tile + cast, backward + gradient)
