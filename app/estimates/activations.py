"""Bytes that a training step holds for its backward pass, by the shape of its micro-batch and by what is recomputed."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from app.estimates.architecture import Architecture
from app.estimates.layers import Attention, Batch, Forward, Loaded
from app.estimates.parameters import Trained, Weight, trained
from app.estimates.tape import Device, Layer, Tape, Value
from app.runs.config import TrainingConfig, TrainingMethod

Checkpointing = Literal["off", "selective", "full"]
"""Which layers are computed again in the backward pass: none, every second, all."""
EVERY: dict[Checkpointing, int] = {"selective": 2, "full": 1}
"""Of so many layers one is computed again."""

HEAD_TOKENS, HEAD_WORDS = 4096, 32768
"""Tokens and words of the tile in which TRL projects hidden states to probabilities, in place of whole logits."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, by what it belongs to, as a worker loads it."""

    device: Device
    autocast: bool
    """Products in 16 bits, whatever type their weights have."""
    base: int
    """Weights that are neither quantised nor trained beside an adapter."""
    adapter: int

    @classmethod
    def of(cls, config: TrainingConfig, device: Device, *, bf16: bool = True) -> "Precision":
        """What the worker chooses on that kind of device for an effective configuration."""
        gpu = device == "cuda"
        quantised = config.load_in_4bit or config.load_in_8bit
        return cls(
            device=device,
            autocast=gpu,
            base=2 if gpu and config.lora_r is not None else 4,
            # TRL casts adapters on a quantised base to bfloat16; float16 GPUs need 32 bits for what trains.
            adapter=2 if quantised and not (gpu and not bf16) else 4,
        )


@dataclass(frozen=True)
class Activations:
    """Bytes: held when the forward pass ends, held again while a layer is recomputed, and what the head takes."""

    kept: int
    again: int
    mask: int
    """Which tokens may see each other: there as long as the forward pass, kept by no operation."""
    head: int
    """Kept for the loss."""
    forward: int
    """Operations of products in the forward pass."""
    operations: int
    """The same, forward and backward."""
    operations_again: int
    """Of products that are computed a second time."""
    head_workspace: int
    """Of the tile of logits and of the gradients that are summed in 32 bits, in the backward pass."""


def activations(
    model: Architecture,
    config: TrainingConfig,
    precision: Precision,
    batch: Batch,
    checkpointing: Checkpointing,
    attention: Attention,
) -> Activations:
    """Of a micro-batch under an effective configuration; `batch` holds both answers of each pair.

    Raises:
        CannotTrain: not with this configuration.
    """
    found = trained(model, config)
    loaded = _Loaded(config, precision, found)
    tape = Tape(precision.device, precision.autocast)
    forward = Forward(model, batch, attention, loaded.described(), tape)
    value = _embedded(model, loaded, batch, tape, checkpointing)
    every, again, repeated = EVERY.get(checkpointing, 0), 0, 0
    walks: dict[tuple[Any, ...], _Walk] = {}
    for at in range(model.layers):
        is_repeated = every > 0 and at % every == 0
        if is_repeated:
            tape.save(value)
        # Most layers are like one that was walked through before: all that a walk depends on is in the key.
        shape, has_saved = replace(value, storage=0), value.storage in tape.saved
        key = model.experts_of(at), shape, has_saved, forward.has_turned, is_repeated
        walk = walks.get(key)
        if walk is None:
            walk = walks[key] = _walk(forward, at, value, keeps=not is_repeated)
            value = walk.result
        else:
            tape.forward_operations += walk.forward
            tape.backward_operations += walk.backward
            if not is_repeated:
                tape.save(Value(walk.kept, 1, False))
            value = walk.result.copied()
        if is_repeated:
            again = max(again, walk.kept)
            repeated += walk.forward
    kept, backbone = tape.total, forward.norm(_last_norm(model), value)
    head, workspace = _head(model, config, loaded, batch, backbone, tape)
    mask = batch.pairs * (precision.base if attention == "eager" else 1)
    return Activations(
        kept=kept,
        again=again,
        mask=mask if attention == "eager" or (batch.masked and attention == "sdpa") else 0,
        head=tape.total - kept + head,
        forward=tape.forward_operations,
        operations=tape.forward_operations + tape.backward_operations,
        operations_again=repeated,
        head_workspace=workspace,
    )


@dataclass(frozen=True)
class _Walk:
    """What the way through one layer comes to."""

    result: Value
    kept: int
    """Bytes of what it keeps that was not kept before."""
    forward: int
    backward: int


def _walk(forward: Forward, at: int, value: Value, *, keeps: bool) -> _Walk:
    """Through one layer; unless it `keeps`, the tape is afterwards without what the layer has kept."""
    tape = forward.tape
    before, there, done, to_do = dict(tape.saved), tape.total, tape.forward_operations, tape.backward_operations
    result = forward.layer(at, value)
    kept = tape.total - there
    if not keeps:
        tape.saved = before
    return _Walk(result, kept, tape.forward_operations - done, tape.backward_operations - to_do)


class _Loaded:
    """What is known of each weight by name."""

    def __init__(self, config: TrainingConfig, precision: Precision, found: Trained) -> None:
        self._config, self._precision = config, precision
        self._full = config.lora_r is None
        self._whole = {_short(one.name) for one in found.whole}
        self._adapted = {_short(one.name) for one in found.adapted}
        self._rank, self._dora = found.rank, found.dora

    def described(self) -> Loaded:
        return Loaded(
            layer=self.layer,
            norm_trains=self.trains,
            norm_bytes=self._precision.base,
            hidden_bytes=self._precision.base,
        )

    def trains(self, weight: Weight) -> bool:
        return self._full or _short(weight.name) in self._whole

    def layer(self, weight: Weight) -> Layer:
        config, precision, short = self._config, self._precision, _short(weight.name)
        trains = self.trains(weight)
        quantises = weight.kind == "linear" and not trains and short not in ("lm_head", "score")
        return Layer(
            rows=weight.rows,
            columns=weight.columns,
            trains=trains,
            bytes=4 if trains else precision.base,
            quantised=("4bit" if config.load_in_4bit else "8bit" if config.load_in_8bit else None)
            if quantises
            else None,
            rank=self._rank if short in self._adapted else 0,
            adapter_bytes=precision.adapter,
            dropout=config.lora_dropout > 0,
            dora=self._dora,
        )


def _short(name: str) -> str:
    """A weight's name without the number of its layer: `model.layers.3.mlp.up_proj` is `mlp.up_proj`."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    if numbers:
        return ".".join(parts[numbers[0] + 1 :])
    return ".".join(parts[1:]) if parts[0] in ("layer", "model", "transformer") else name


def _embedded(model: Architecture, loaded: _Loaded, batch: Batch, tape: Tape, checkpointing: Checkpointing) -> Value:
    matrix = Weight("model.embed_tokens" if model.family != "gpt2" else "transformer.wte", "embedding", 1)
    trains = loaded.trains(matrix)
    if trains:
        tape.save(Value(batch.tokens, 8, False))
    # What is computed again must have an input with a gradient, so the embeddings' output gets one.
    grad = trains or checkpointing != "off"
    value = Value(batch.tokens * model.hidden, loaded.described().hidden_bytes, grad)
    return tape.dropout(value) if model.family == "gpt2" and model.residual_dropout else value


def _last_norm(model: Architecture) -> Weight:
    vectors = 2 if model.norm == "layer" else 1
    return Weight("model.norm", "norm", vectors * model.hidden, tensors=vectors)


def _head(
    model: Architecture, config: TrainingConfig, loaded: _Loaded, batch: Batch, value: Value, tape: Tape
) -> tuple[int, int]:
    """Bytes that the loss keeps beyond the tape, and its workspace."""
    if config.method is TrainingMethod.reward:
        tape.linear(value, loaded.layer(Weight("score", "linear", 1, model.hidden)))
        return 0, 0
    taught = batch.sequences * (batch.length - 1)
    head = loaded.layer(Weight("lm_head", "linear", model.vocabulary, model.hidden))
    operations = 2 * batch.tokens * model.hidden * model.vocabulary
    tape.multiplied(operations, head.trains or (model.tied and config.lora_r is None), value.grad)
    # The last position of each sequence teaches nothing; without it the rest is a copy.
    cut = batch.sequences > 1 or tape.device == "cuda"
    tape.save(Value(taught * model.hidden, value.bytes, True) if cut else value)
    small = taught * (8 + 4 + 4 + 1)  # targets, normalisers, entropies, a mask
    size = 2 if tape.autocast else value.bytes
    tile = min(taught, HEAD_TOKENS) * min(HEAD_WORDS, model.vocabulary) * size
    sums = taught * model.hidden * 4 + (model.vocabulary * model.hidden * 4 if head.trains else 0)
    return small, tile + sums
