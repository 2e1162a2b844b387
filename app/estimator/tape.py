"""Simulated autograd tape: records the tensors kept for the backward pass without computing them.

A value is a tensor with known size, type and gradient flag only. Each operation keeps what the corresponding torch
operation keeps; storage shared by several operations counts once. Parameters are not activations and never count.
The backward pass is simulated over the recorded operations in reverse order, as torch's engine runs them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

Device = Literal["cpu", "cuda"]
_storages = count(1)
_LARGEST_RANK_OF_KERNELS = 128
"""Largest rank of an adapter whose dropout the kernels of a worker compute."""


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
    def kept_bytes(self) -> int:
        """Bytes that stay allocated while the value is kept."""
        return self.elements * self.bytes if self.storage_bytes is None else self.storage_bytes

    def new_like(self) -> "Value":
        """Return a new tensor of the same shape and type."""
        return Value(self.elements, self.bytes, self.grad)


@dataclass(frozen=True)
class Operation:
    """Recorded operation, with what its backward pass allocates and frees."""

    output: Value
    inputs: tuple[Value, ...]
    """Inputs that require a gradient."""
    saved: tuple[int, ...] = ()
    """Storages kept until its backward pass is over."""
    workspace: int = 0
    """Bytes that its backward pass allocates for its own duration, besides the gradients of its inputs; negative if
    it writes these over tensors that it kept, which are counted until it is over."""
    passes: bool = False
    """True if the gradients of its inputs are that of its output, and not new tensors."""
    weights: int = 0
    """Bytes of the gradients of its weights, which outlive the backward pass."""


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
    fused: bool = True
    """True if the layer and its adapter are one operation, which keeps only its input."""


@dataclass
class Tape:
    """Record of kept bytes by storage.

    `autocast`: products are computed in 2 bytes regardless of the input type. `device`: dropout masks take one byte per
    element on a GPU, and the type of the input on a CPU.
    """

    device: Device
    autocast: bool
    saved: dict[int, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    referenced: tuple[Value, ...] = ()
    """Values that the model's code refers to until a layer is over, whether an operation keeps them or not."""
    cached: int = 0
    """Bytes of trained weights in 16 bits, which autocast keeps until the forward pass is over."""
    highest: int = 0
    """Highest number of bytes alive so far in the forward pass, as noted by `note_alive`."""
    _unassigned: list[int] = field(default_factory=list)
    """Storages saved for the operation that is recorded next."""
    forward_operations: int = 0
    backward_operations: int = 0
    """Operations of matrix products, as `app.estimator.flops` describes them."""

    @property
    def total(self) -> int:
        """Total kept bytes."""
        return sum(self.saved.values())

    def save_value(self, value: Value) -> None:
        """Keep a value until the backward pass."""
        self.saved[value.storage] = value.kept_bytes
        self._unassigned.append(value.storage)

    def note_alive(self, *values: Value, workspace: int = 0) -> None:
        """Note a moment of the forward pass at which these values exist, beside those that are kept."""
        values = tuple(value for value in (*self.referenced, *values) if value.storage not in self.saved)
        others = {value.storage: value.kept_bytes for value in values}
        self.highest = max(self.highest, self.total + sum(others.values()) + workspace)

    def cast(self, value: Value, size: int) -> Value:
        """Return a copy of the value in another type, or the value itself if it already has that type."""
        return value if value.bytes == size else self.new_value(value.elements, size, value)

    def new_value(
        self,
        elements: int,
        size: int,
        *sources: Value,
        grad: bool = False,
        workspace: int = 0,
        passes: bool = False,
        weights: int = 0,
        keeps_output: bool = False,
    ) -> Value:
        """Return a new tensor computed from others; its operation keeps what was saved since the last one."""
        output = Value(elements, size, grad or any(one.grad for one in sources))
        if keeps_output and output.grad:
            self.save_value(output)
        self._record_operation(output, sources, workspace, passes, weights)
        return output

    def view_part(self, value: Value, elements: int) -> Value:
        """Return a view of some elements of a value."""
        view = Value(elements, value.bytes, value.grad, value.storage, value.kept_bytes)
        self._record_operation(view, (value,))
        return view

    def _record_operation(
        self, output: Value, sources: Sequence[Value], workspace: int = 0, passes: bool = False, weights: int = 0
    ) -> None:
        saved, self._unassigned = tuple(self._unassigned), []
        if output.grad:
            inputs = tuple(source for source in sources if source.grad)
            self.operations.append(Operation(output, inputs, saved, workspace, passes, weights))

    def dropout(self, value: Value) -> Value:
        """Apply dropout."""
        if self.device == "cuda":
            if value.grad:
                self.save_value(Value(value.elements, 1, False))
        elif value.grad:
            self.save_value(Value(value.elements, value.bytes, False))
        return self.new_value(value.elements, value.bytes, value)

    def linear(self, value: Value, layer: Layer) -> Value:
        """Apply a linear layer and its adapter."""
        rows = value.elements // layer.columns * layer.rows
        if not layer.rank:
            return self._apply_base(value, layer, rows)
        if layer.fused and not layer.dora:
            return self._fused_lora(value, layer, rows)
        result = self._apply_base(value, layer, rows)
        # An adapter on a 4-bit or 8-bit base relies on autocast for the cast, if autocast is on.
        cast = not (layer.quantised and self.autocast)
        narrow = self.cast(value, 4) if cast else value
        dropped = self.dropout(narrow) if layer.dropout else narrow
        if layer.dora:
            return self._apply_dora(result, layer, dropped, rows)
        up = self._apply_adapter(dropped, layer, rows)
        scaled = self.new_value(rows, up.bytes, up)
        total = self.plus(result, scaled)
        self.note_alive(value, narrow, result, scaled, total)
        return total

    def count_product(self, operations: int, trains: bool, needed: bool) -> None:
        """Count a product of `operations`: once forward, once more each for the gradients of weights and input."""
        self.forward_operations += operations
        self.backward_operations += operations * (trains + needed)

    def product(self, value: Value, elements: int, size: int, *, inner: int, trains: bool, weights: int = 0) -> Value:
        """Multiply `value` by a parameter of `weights` elements with `size` bytes each; keep it if that trains.

        Each of the `elements` of the result is a sum of `inner` products.
        """
        self.count_product(2 * elements * inner, trains, value.grad)
        cast = self.autocast and size != 2
        if cast and trains:
            self.cached += weights * 2
        if self.autocast:
            value = self.cast(value, 2)
            if cast and value.grad and weights:
                self.save_value(Value(weights, 2, False))
        if trains:
            self.save_value(value)
        return self.new_value(
            elements, 2 if self.autocast else value.bytes, value, grad=trains,
            workspace=weights * 2 if trains and cast else 0, weights=weights * size if trains else 0,
        )  # fmt: skip

    def _apply_base(self, value: Value, layer: Layer, rows: int) -> Value:
        if layer.quantised is None:
            weights = layer.rows * layer.columns
            return self.product(value, rows, layer.bytes, inner=layer.columns, trains=layer.trains, weights=weights)
        self.count_product(2 * rows * layer.columns, False, value.grad)
        if layer.quantised == "8bit" and value.grad:
            self.save_value(value)
        dequantized = layer.rows * layer.columns * (2 if self.autocast else 4)
        return self.new_value(rows, value.bytes, value, workspace=dequantized)

    def _fused_lora(self, value: Value, layer: Layer, rows: int) -> Value:
        """Apply a layer and its adapter as `worker.training.model.fused_lora` does."""
        rank, size = layer.rank, 2 if self.autocast else value.bytes
        narrow = value.elements // layer.columns * rank
        self.count_product(2 * rows * layer.columns, False, value.grad)
        self.count_product(2 * narrow * layer.columns, True, value.grad)
        self.count_product(2 * rows * rank, True, True)
        self.save_value(value)
        self.save_value(Value(narrow, size, False))
        weight = layer.rows * layer.columns * size if layer.quantised or layer.bytes != size else 0
        cast, dropped = value.elements * (size if value.bytes != size else 0), value.elements * size
        if layer.dropout and self.device == "cuda" and rank <= _LARGEST_RANK_OF_KERNELS and size == 2:
            # The kernels of dropout, which compute in 16 bits, write neither a mask nor a copy of the input.
            self.save_value(Value(1, 8, False))
            result = self.new_value(
                rows, size, value, grad=True, workspace=cast + weight if value.grad else 0,
                weights=4 * rank * (layer.rows + layer.columns),
            )  # fmt: skip
            self.note_alive(value, result, workspace=weight)
            return result
        mask = value.elements if layer.dropout else 0
        if mask and self.device == "cpu":
            self.save_value(Value(mask, 1, False))
            mask = 0
        # Backward, the input is dropped out again, then the gradients through the base and through the adapter are
        # computed one after the other.
        if value.grad:
            through_adapter = dropped * (2 if layer.dropout else 1) if layer.dropout or cast else 0
            workspace = mask + max(cast + weight, through_adapter)
        else:
            workspace = cast
        workspace = max(workspace, mask + dropped if layer.dropout else cast)
        result = self.new_value(
            rows, size, value, grad=True, workspace=workspace, weights=4 * rank * (layer.rows + layer.columns)
        )
        self.note_alive(value, result, workspace=max(weight, cast + (mask + dropped if layer.dropout else 0)))
        return result

    def _apply_adapter(self, value: Value, layer: Layer, rows: int) -> Value:
        rank, columns = layer.rank, layer.columns
        narrow = value.elements // columns * rank
        down = self.product(value, narrow, 4, inner=columns, trains=True, weights=rank * columns)
        return self.product(down, rows, 4, inner=rank, trains=True, weights=rank * layer.rows)

    def _apply_dora(self, result: Value, layer: Layer, dropped: Value, rows: int) -> Value:
        up = self._apply_adapter(dropped, layer, rows)
        # The adapter's matrix, its norm and the scaled matrix have the size of the layer; of these only the scale
        # is kept. The scaled results are kept.
        self.save_value(self.new_value(rows, result.bytes, result))
        self.save_value(up)
        return self.new_value(rows, result.bytes, result, up)

    def rms_norm(self, value: Value, *, trains: bool, size: int, gemma: bool, width: int) -> Value:
        """Apply RMSNorm over `width` elements in 32 bits, and scale by weights of `size` bytes per element."""
        elements, rows = value.elements, value.elements // width
        upcast, inverse = self.cast(value, 4), Value(rows, 4, value.grad)
        if value.grad:
            self.save_value(upcast)
        squares = self.new_value(elements, 4, upcast, workspace=2 * elements * 4)
        if value.grad:
            self.save_value(inverse)
        mean = self.new_value(rows, 4, squares)
        if value.grad:
            self.save_value(upcast)
            self.save_value(inverse)
        # The gradient of the inverse root mean square is summed over a row after it was computed for each element.
        normed = self.new_value(elements, 4, upcast, mean, workspace=elements * 4)
        self.note_alive(value, upcast, normed, squares)
        if gemma:
            if trains:
                self.save_value(normed)
            if normed.grad:
                self.save_value(Value(width, 4, False))
            scaled = self.new_value(elements, 4, normed, grad=trains, workspace=elements * 4 if trains else 0)
            return self.cast(scaled, value.bytes)
        narrow = self.cast(normed, value.bytes)
        if trains:
            self.save_value(narrow)
        size = max(value.bytes, size)
        return self.new_value(elements, size, narrow, grad=trains, workspace=elements * size if trains else 0)

    def liger_rms_norm(self, value: Value, *, trains: bool, width: int, in_place: bool) -> Value:
        """Apply RMSNorm over `width` elements as liger-kernel does, in the type of its input.

        `in_place`: the gradient of the input takes the place of that of the result.
        """
        if value.grad or trains:
            self.save_value(value)
            self.save_value(Value(value.elements // width, 4, False))
        result = self.new_value(value.elements, value.bytes, value, grad=trains, passes=in_place)
        self.note_alive(value, result)
        return result

    def layer_norm(self, value: Value, *, trains: bool, size: int, width: int) -> Value:
        """Apply LayerNorm over `width` elements."""
        if self.autocast and self.device == "cuda":
            value = self.cast(value, 4)
        if value.grad or trains:
            self.save_value(value)
            self.save_value(Value(value.elements // width, 4, False))
            self.save_value(Value(value.elements // width, 4, False))
        return self.new_value(value.elements, value.bytes, value, grad=trains)

    def activation(self, value: Value, name: str) -> Value:
        """Apply an activation function to each element."""
        if value.grad:
            self.save_value(value)
            if name in ("gelu_new", "gelu_fast"):
                for _ in range(3):  # implemented as several operations, each of which keeps its input
                    self.save_value(self.new_value(value.elements, value.bytes, value))
        return self.new_value(value.elements, value.bytes, value)

    def times(self, value: Value, other: Value) -> Value:
        """Multiply element-wise; each factor is kept if the other requires a gradient."""
        if other.grad:
            self.save_value(value)
        if value.grad:
            self.save_value(other)
        result = self.new_value(max(value.elements, other.elements), max(value.bytes, other.bytes), value, other)
        self.note_alive(value, other, result)
        return result

    def liger_gated(self, gate: Value, up: Value) -> Value:
        """Multiply an activated gate with a value as liger-kernel does; the gradients take the place of both."""
        for value in (gate, up):
            if gate.grad or up.grad:
                self.save_value(value)
        overwritten = sum(value.elements * value.bytes for value in (gate, up) if value.grad)
        result = self.new_value(up.elements, up.bytes, gate, up, workspace=-overwritten)
        self.note_alive(gate, up, result)
        return result

    def plus(self, *values: Value) -> Value:
        """Add the values without keeping anything."""
        elements, size = max(one.elements for one in values), max(one.bytes for one in values)
        passes = all((one.elements, one.bytes) == (elements, size) for one in values)
        return self.new_value(elements, size, *values, passes=passes)


class BackwardPass:
    """Bytes that are alive during the backward pass of some operations, beyond those alive at its start.

    The start is after the forward pass: the gradient of the result exists. Negative once tensors that the operations
    saved have been freed.
    """

    def __init__(
        self, operations: Sequence[Operation], saved: Mapping[int, int], result: Value, *, keeps_gradients: bool
    ) -> None:
        """Run the operations in reverse order.

        Args:
            operations: operations in forward order.
            saved: bytes of the storages that only these operations keep.
            result: output of the last operation.
            keeps_gradients: True if gradients of weights are new tensors, not added to existing ones.
        """
        self.peak = self._current = result.elements * result.bytes
        self._uses = Counter(storage for operation in operations for storage in operation.saved)
        self._saved = saved
        self._buffers: list[list[int]] = []
        """Bytes and number of holders of each gradient."""
        self._gradients: dict[int, int] = {id(result): self._new_buffer(self._current)}
        self._keeps_gradients = keeps_gradients
        for operation in reversed(operations):
            self._run_operation(operation)

    def _run_operation(self, operation: Operation) -> None:
        gradient = self._gradients.pop(id(operation.output), None)
        if gradient is None:
            return
        self._buffers[gradient][1] -= 1
        added = []
        for value in operation.inputs:
            if operation.passes:
                self._buffers[gradient][1] += 1
                added.append(gradient)
            else:
                self._current += value.elements * value.bytes
                added.append(self._new_buffer(value.elements * value.bytes))
        workspace = operation.workspace + (0 if self._keeps_gradients else operation.weights)
        self._current += operation.weights if self._keeps_gradients else 0
        self.peak = max(self.peak, self._current + workspace)
        if self._buffers[gradient][1] == 0:
            self._current -= self._buffers[gradient][0]
        for value, buffer in zip(operation.inputs, added, strict=True):
            self._add_gradient(value, buffer)
        for storage in operation.saved:
            self._uses[storage] -= 1
            if self._uses[storage] == 0:
                self._current -= self._saved.get(storage, 0)

    def _new_buffer(self, size: int) -> int:
        self._buffers.append([size, 1])
        return len(self._buffers) - 1

    def _add_gradient(self, value: Value, buffer: int) -> None:
        """Add a gradient to the one that the value already has, in place if nothing else holds that one."""
        before = self._gradients.get(id(value))
        if before is None:
            self._gradients[id(value)] = buffer
            return
        if self._buffers[before][1] > 1:
            size = self._buffers[before][0]
            self._current += size
            self.peak = max(self.peak, self._current)
            self._buffers[before][1] -= 1
            self._gradients[id(value)] = self._new_buffer(size)
        self._buffers[buffer][1] -= 1
        if self._buffers[buffer][1] == 0:
            self._current -= self._buffers[buffer][0]
