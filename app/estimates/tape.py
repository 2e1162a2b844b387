"""What autograd keeps for the backward pass, operation by operation, without computing any.

A value is a tensor of which only size, type and ancestry are known. Each operation keeps what torch's own keeps for
it; what several operations keep is one storage and counts once. Parameters are no activations and never count.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Literal

Device = Literal["cpu", "cuda"]
_storages = count(1)


@dataclass(frozen=True)
class Value:
    """A tensor: its elements, bytes of each, whether gradients flow through it, and where it lies."""

    elements: int
    bytes: int
    grad: bool
    storage: int = field(default_factory=lambda: next(_storages))
    storage_bytes: int | None = None
    """Of a view: bytes of the whole tensor that it keeps alive."""

    @property
    def kept(self) -> int:
        """Bytes that stay while it is kept."""
        return self.elements * self.bytes if self.storage_bytes is None else self.storage_bytes

    def copied(self) -> "Value":
        """Another tensor like it."""
        return Value(self.elements, self.bytes, self.grad)

    def part(self, elements: int) -> "Value":
        """A view of some of its elements."""
        return Value(elements, self.bytes, self.grad, self.storage, self.kept)


@dataclass(frozen=True)
class Layer:
    """A linear layer as it is loaded: outputs, inputs, what trains, and what it is multiplied as."""

    rows: int
    columns: int
    trains: bool = False
    bytes: int = 4
    """Of each of its weights; ignored where it is quantised."""
    quantised: Literal["4bit", "8bit"] | None = None
    rank: int = 0
    """Of its adapter; 0: none."""
    adapter_bytes: int = 4
    dropout: bool = False
    dora: bool = False


@dataclass
class Tape:
    """Keeps what is kept, in bytes by storage.

    `autocast`: products are computed in 2 bytes, whatever comes in. `adapters`: whether those layers' dropout draws
    masks of a byte (a GPU) or of the type of their input (a CPU).
    """

    device: Device
    autocast: bool
    saved: dict[int, int] = field(default_factory=dict)
    forward_operations: int = 0
    backward_operations: int = 0
    """Of products, as `worker.training.flops` counts them."""

    @property
    def total(self) -> int:
        """Bytes kept so far."""
        return sum(self.saved.values())

    def save(self, value: Value) -> None:
        """Keep a value until the backward pass."""
        self.saved[value.storage] = value.kept

    def cast(self, value: Value, size: int) -> Value:
        """The value in another type, which is a copy; in its own, the value itself."""
        return value if value.bytes == size else Value(value.elements, size, value.grad)

    def made(self, elements: int, size: int, *sources: Value, grad: bool = False) -> Value:
        """A new tensor made of others, for which nothing is kept."""
        return Value(elements, size, grad or any(one.grad for one in sources))

    def dropout(self, value: Value) -> Value:
        """Some of the elements set to zero."""
        if self.device == "cuda":
            if value.grad:
                self.save(Value(value.elements, 1, False))
        elif value.grad:
            self.save(Value(value.elements, value.bytes, False))
        return self.made(value.elements, value.bytes, value)

    def linear(self, value: Value, layer: Layer) -> Value:
        """A product with a matrix of weights, and its adapter."""
        rows = value.elements // layer.columns * layer.rows
        result = self._base(value, layer, rows)
        if not layer.rank:
            return result
        # What is on a 4 or 8-bit base leaves the cast to autocast, where there is one.
        cast = not (layer.quantised and self.autocast)
        narrow = self.cast(value, layer.adapter_bytes) if cast else value
        dropped = self.dropout(narrow) if layer.dropout else narrow
        if layer.dora:
            return self._dora(result, layer, dropped, rows)
        return self.made(rows, result.bytes, result, self._adapter(dropped, layer, rows))

    def multiplied(self, operations: int, trains: bool, needed: bool) -> None:
        """Count a product of so many operations: one more for its weights where they train, one for its input."""
        self.forward_operations += operations
        self.backward_operations += operations * (trains + needed)

    def product(self, value: Value, elements: int, size: int, *, inner: int, trains: bool, weights: int = 0) -> Value:
        """`value` times a parameter of `size` bytes an element (`weights` of them); keeps it where that trains.

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
        size, rank = layer.adapter_bytes, layer.rank
        narrow = value.elements // layer.columns * rank
        columns = layer.columns
        down = self.product(value, narrow, size, inner=columns, trains=True, weights=rank * columns)
        return self.product(down, rows, size, inner=rank, trains=True, weights=rank * layer.rows)

    def _dora(self, result: Value, layer: Layer, dropped: Value, rows: int) -> Value:
        up = self._adapter(dropped, layer, rows)
        # The matrix of the adapter, of its norm and of what is scaled are tensors of the layer's own size, of which
        # only the scale is kept; the scaled results are.
        self.save(self.made(rows, result.bytes, result))
        self.save(up)
        return self.made(rows, result.bytes, result, up)

    def rms_norm(self, value: Value, *, trains: bool, size: int, gemma: bool, width: int) -> Value:
        """Divide by the root mean square of `width` elements, in 32 bits, and scale by weights of `size` bytes."""
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
        """Take off the mean, divide by the deviation, scale and shift."""
        if self.autocast and self.device == "cuda":
            value = self.cast(value, 4)
        result = self.made(value.elements, value.bytes, value, grad=trains)
        if result.grad:
            self.save(value)
            self.save(Value(value.elements // width, 4, False))
            self.save(Value(value.elements // width, 4, False))
        return result

    def activation(self, value: Value, name: str) -> Value:
        """A function of each element."""
        if value.grad:
            self.save(value)
            if name in ("gelu_new", "gelu_fast"):
                for _ in range(3):  # a formula of several operations, of which each keeps what it takes
                    self.save(self.made(value.elements, value.bytes, value))
        return self.made(value.elements, value.bytes, value)

    def times(self, one: Value, other: Value) -> Value:
        """Element by element; each is kept where the other has a gradient."""
        if other.grad:
            self.save(one)
        if one.grad:
            self.save(other)
        return self.made(max(one.elements, other.elements), max(one.bytes, other.bytes), one, other)

    def plus(self, *values: Value) -> Value:
        """A sum, for which nothing is kept."""
        return self.made(max(one.elements for one in values), max(one.bytes for one in values), *values)
