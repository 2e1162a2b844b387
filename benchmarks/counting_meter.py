"""A meter of passes that needs no GPU: it counts the bytes of live tensors, and operations instead of seconds.

It works with real tensors and, for models of any size, with those of `FakeTensorMode`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from worker.training.planning.pass_meter import Reading

_ATEN = torch.ops.aten
_COUNTS = flop_registry | {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
OPERATIONS_PER_SECOND = 1e12
"""Operations that the meter reports as a second."""


class CountingMeter:
    """Meter of a device with `usable` bytes for tensors, of which `allocated` are taken before a pass.

    Each pass takes `fixed_seconds` beside those of its operations.
    """

    def __init__(self, usable: int, allocated: int = 0, fixed_seconds: float = 0.0) -> None:
        self._usable = usable
        self._allocated = allocated
        self._fixed_seconds = fixed_seconds

    def usable_bytes(self) -> int:
        return self._usable

    def allocated_bytes(self) -> int:
        return self._allocated

    def measure(self, run_pass: Callable[[], None]) -> Reading:
        with PassCounter(self._usable - self._allocated) as counter:
            run_pass()
        seconds = self._fixed_seconds + counter.operations / OPERATIONS_PER_SECOND
        return Reading(self._allocated + counter.peak, seconds)

    def release(self) -> None:
        """Do nothing: nothing is kept."""


class PassCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations of products, and the bytes of tensors that operations create, until they are freed.

    `FlopCounterMode` counts operations too, but keeps the tensors of recomputed layers alive.

    Raises:
        torch.OutOfMemoryError: within an operation whose result exceeds the limit.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._seen = WeakIdKeyDictionary()
        self._now = self.peak = 0
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if (count := _COUNTS.get(function._overloadpacket)) is not None:
            self.operations += count(*arguments, **options, out_val=result)
        for tensor in tree_leaves((arguments, options)):
            if isinstance(tensor, torch.Tensor):  # what exists already, and may be a view of it in the result
                self._seen.setdefault(tensor.untyped_storage(), True)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        if self._now > self._limit:
            raise torch.OutOfMemoryError(f"out of memory: {self._now} bytes of {self._limit}")
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self._now += storage.nbytes()
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self._now -= size
