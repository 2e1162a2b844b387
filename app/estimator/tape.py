"""Simulated autograd tape: records the tensors kept for the backward pass without computing them.

A value is a tensor with known size, type and gradient flag only. Each operation keeps what the corresponding torch
operation keeps; storage shared by several operations counts once. Parameters are not activations and never count.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

Device = Literal["cpu", "cuda"]
_storages = count(1)


@dataclass(frozen=True)
class Value:
    """Tensor: number of elements, bytes per element, gradient flag, and storage id."""

    elements: int
    bytes: int
    grad: bool
    storage: int = field(default_factory=lambda: next(_storages))
    storage_bytes: int | None = None
    """For a view, bytes of the whole tensor that it keeps alive."""

    @property
    def kept(self) -> int:
        """Bytes that stay allocated while the value is kept."""
        return self.elements * self.bytes if self.storage_bytes is None else self.storage_bytes

    def copied(self) -> "Value":
        """Return a new tensor of the same shape and type."""
        return Value(self.elements, self.bytes, self.grad)

    def part(self, elements: int) -> "Value":
        """Return a view of some of its elements."""
        return Value(elements, self.bytes, self.grad, self.storage, self.kept)


@dataclass(frozen=True)
class Layer:
    """Linear layer as loaded: output and input features, trainable parts, and types."""

    rows: int
    columns: int
    trains: bool = False
    bytes: int = 4
    """Bytes per weight; ignored if the layer is quantized."""
    quantised: Literal["4bit", "8bit"] | None = None
    rank: int = 0
    """Rank of its adapter; 0 if it has none."""
    dropout: bool = False
    dora: bool = False


@dataclass
class Tape:
    """Record of kept bytes by storage.

    `autocast`: products are computed in 2 bytes regardless of the input type. `device`: dropout masks take one byte per
    element on a GPU, and the type of the input on a CPU.
    """

    device: Device
    autocast: bool
    saved: dict[int, int] = field(default_factory=dict)
    forward_operations: int = 0
    backward_operations: int = 0
    """Operations of matrix products, as `app.estimator.flops` describes them."""

    @property
    def total(self) -> int:
        """Total kept bytes."""
        return sum(self.saved.values())

    def save(self, value: Value) -> None:
        """Keep a value until the backward pass."""
        self.saved[value.storage] = value.kept

    def cast(self, value: Value, size: int) -> Value:
        """Return a copy of the value in another type, or the value itself if it already has that type."""
        return value if value.bytes == size else Value(value.elements, size, value.grad)

    def made(self, elements: int, size: int, *sources: Value, grad: bool = False) -> Value:
        """Return a new tensor computed from others without keeping anything."""
        return Value(elements, size, grad or any(one.grad for one in sources))

    def dropout(self, value: Value) -> Value:
        """Apply dropout."""
        if self.device == "cuda":
            if value.grad:
                self.save(Value(value.elements, 1, False))
        elif value.grad:
            self.save(Value(value.elements, value.bytes, False))
        return self.made(value.elements, value.bytes, value)

    def linear(self, value: Value, layer: Layer) -> Value:
        """Apply a linear layer and its adapter."""
        rows = value.elements // layer.columns * layer.rows
        result = self._base(value, layer, rows)
        if not layer.rank:
            return result
        # An adapter on a 4-bit or 8-bit base relies on autocast for the cast, if autocast is on.
        cast = not (layer.quantised and self.autocast)
        narrow = self.cast(value, 4) if cast else value
        dropped = self.dropout(narrow) if layer.dropout else narrow
        if layer.dora:
            return self._dora(result, layer, dropped, rows)
        return self.made(rows, result.bytes, result, self._adapter(dropped, layer, rows))

    def multiplied(self, operations: int, trains: bool, needed: bool) -> None:
        """Count a product of `operations`: once forward, once more each for the gradients of weights and input."""
        self.forward_operations += operations
        self.backward_operations += operations * (trains + needed)

    def product(self, value: Value, elements: int, size: int, *, inner: int, trains: bool, weights: int = 0) -> Value:
        """Multiply `value` by a parameter of `weights` elements with `size` bytes each; keep it if that trains.

        Each of the `elements` of the result is a sum of `inner` products.
        """
        self.multiplied(2 * elements * inner, trains, value.grad)
        if self.autocast:
            value = self.cast(value, 2)
            if size != 2 and value.grad and weights:
                self.save(Value(weights, 2, False))
        if trains:
            self.save(value)
        return Value(elements, 2 if self.autocast else value.bytes, value.grad or trains)

    def _base(self, value: Value, layer: Layer, rows: int) -> Value:
        if layer.quantised is None:
            weights = layer.rows * layer.columns
            return self.product(value, rows, layer.bytes, inner=layer.columns, trains=layer.trains, weights=weights)
        self.multiplied(2 * rows * layer.columns, False, value.grad)
        if layer.quantised == "8bit" and value.grad:
            self.save(value)
        return self.made(rows, value.bytes, value)

    def _adapter(self, value: Value, layer: Layer, rows: int) -> Value:
        rank, columns = layer.rank, layer.columns
        narrow = value.elements // columns * rank
        down = self.product(value, narrow, 4, inner=columns, trains=True, weights=rank * columns)
        return self.product(down, rows, 4, inner=rank, trains=True, weights=rank * layer.rows)

    def _dora(self, result: Value, layer: Layer, dropped: Value, rows: int) -> Value:
        up = self._adapter(dropped, layer, rows)
        # The adapter's matrix, its norm and the scaled matrix have the size of the layer; of these only the scale
        # is kept. The scaled results are kept.
        self.save(self.made(rows, result.bytes, result))
        self.save(up)
        return self.made(rows, result.bytes, result, up)

    def rms_norm(self, value: Value, *, trains: bool, size: int, gemma: bool, width: int) -> Value:
        """Apply RMSNorm over `width` elements in 32 bits, and scale by weights of `size` bytes per element."""
        wide = self.cast(value, 4)
        if value.grad:
            self.save(wide)
            self.save(Value(value.elements // width, 4, False))
        normed = self.made(value.elements, 4, value)
        if gemma:
            if trains:
                self.save(normed)
            if normed.grad:
                self.save(Value(width, 4, False))
            return self.cast(self.made(value.elements, 4, value, grad=trains), value.bytes)
        narrow = self.cast(normed, value.bytes)
        if trains:
            self.save(narrow)
        return self.made(value.elements, max(value.bytes, size), value, grad=trains)

    def layer_norm(self, value: Value, *, trains: bool, size: int, width: int) -> Value:
        """Apply LayerNorm over `width` elements."""
        if self.autocast and self.device == "cuda":
            value = self.cast(value, 4)
        result = self.made(value.elements, value.bytes, value, grad=trains)
        if result.grad:
            self.save(value)
            self.save(Value(value.elements // width, 4, False))
            self.save(Value(value.elements // width, 4, False))
        return result

    def activation(self, value: Value, name: str) -> Value:
        """Apply an activation function to each element."""
        if value.grad:
            self.save(value)
            if name in ("gelu_new", "gelu_fast"):
                for _ in range(3):  # implemented as several operations, each of which keeps its input
                    self.save(self.made(value.elements, value.bytes, value))
        return self.made(value.elements, value.bytes, value)

    def times(self, one: Value, other: Value) -> Value:
        """Multiply element-wise; each factor is kept if the other requires a gradient."""
        if other.grad:
            self.save(one)
        if one.grad:
            self.save(other)
        return self.made(max(one.elements, other.elements), max(one.bytes, other.bytes), one, other)

    def plus(self, *values: Value) -> Value:
        """Add the values without keeping anything."""
        return self.made(max(one.elements for one in values), max(one.bytes for one in values), *values)
