"""Products of LoRA layers with an input of which dropout keeps some values, on a GPU by kernels that write no mask.

The kernels compute the hashes of `mask` as fast as they read the input. A forward pass draws a seed on the device, and
a backward pass that has it needs neither the mask nor the generator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from worker.training.failures import OUT_OF_MEMORY, classify_error, one_line
from worker.training.model.dropout.mask import HALF, kept_values, scale_of, threshold_of

_ROWS = 64
_WARPS = 8
_PROGRAMS = 256
_GRADIENT_PROGRAMS = 384
"""Programs among which the rows, or for a few rows the columns too, are divided: two or three for each processor of the
largest GPUs."""
_LEAST_TILES = 4
"""Tiles that a program sums up at least, so that there are few partial sums."""
_SMALLEST_RANK = 16
_LARGEST_RANK = 128
_DTYPES = (torch.bfloat16, torch.float16)
_CHECKED_SHAPE = (600, 1168)
_NARROW = 400
"""Rows and columns: several programs that sum up several tiles, and tiles that are not full. Of so few columns, one
program sums up all, and writes a result of 16 bits."""
_CHECKED_RATE = 0.25
_CHECKED_TOLERANCE = 1e-2
"""Largest relative difference of results that rounding to 16 bits explains."""


class Products(Protocol):
    """Products of a LoRA layer with its input, of which dropout keeps some values, divided by `1 - rate`.

    Shapes: `x` and `x_grad` (rows, columns), `down` (rank, columns), `hidden_grad` (rows, rank), `seed` (1,), int64.
    `x` is rounded to the data type of the other factor, and sums have 32 bits.
    """

    def project(self, x: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float) -> torch.Tensor:
        """Return `dropout(x) @ down.T` in the data type of `down`; shape (rows, rank)."""

    def project_gradient(
        self, x: torch.Tensor, hidden_grad: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> torch.Tensor:
        """Return the gradient of `down` in 32 bits; shape (rank, columns)."""

    def add_input_gradient(
        self, x_grad: torch.Tensor, hidden_grad: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> None:
        """Add the gradient of `x` to `x_grad` (contiguous), in place."""


class TorchProducts:
    """The products computed by torch, with a mask."""

    def project(self, x: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float) -> torch.Tensor:
        product = _zero_dropped(_to_float32(x.to(down.dtype)), seed, rate) @ _to_float32(down).t()
        return (product * scale_of(rate)).to(down.dtype)

    def project_gradient(
        self, x: torch.Tensor, hidden_grad: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> torch.Tensor:
        return (
            _to_float32(hidden_grad).t()
            @ _zero_dropped(_to_float32(x.to(hidden_grad.dtype)), seed, rate)
            * scale_of(rate)
        )

    def add_input_gradient(
        self, x_grad: torch.Tensor, hidden_grad: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> None:
        change = _zero_dropped(_to_float32(hidden_grad) @ _to_float32(down), seed, rate) * scale_of(rate)
        x_grad.copy_(_to_float32(x_grad) + change)


@dataclass(frozen=True)
class TritonProducts:
    """The products computed by the kernels of the module `triton_kernels`, in the same order whenever they run."""

    kernels: Any

    def project(self, x: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float) -> torch.Tensor:
        x, down = _with_whole_rows(x), down.contiguous()
        (rows, columns), rank = x.shape, down.shape[0]
        blocks = _ceil_divide(rows, _ROWS)
        tiles_each, shares = _divide_tiles(_ceil_divide(columns, 2 * HALF), _PROGRAMS // max(blocks, 1))
        result = x.new_empty((shares, rows, rank), dtype=down.dtype if shares == 1 else torch.float32)
        self.kernels.project[blocks, shares](
            x, down, result, seed, rows, columns, rank, x.stride(0), tiles_each, threshold_of(rate), scale_of(rate),
            **_kernel_options(rank),
        )  # fmt: skip
        return result[0] if shares == 1 else result.sum(0).to(down.dtype)

    def project_gradient(
        self, x: torch.Tensor, hidden_grad: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> torch.Tensor:
        x, hidden_grad = _with_whole_rows(x), hidden_grad.contiguous()
        (rows, columns), rank = x.shape, hidden_grad.shape[1]
        tiles = _ceil_divide(columns, 2 * HALF)
        blocks_each, shares = _divide_tiles(_ceil_divide(rows, _ROWS), _GRADIENT_PROGRAMS // tiles)
        result = x.new_empty((shares, rank, columns), dtype=torch.float32)
        self.kernels.project_gradient[tiles * shares,](
            x, hidden_grad, result, seed, rows, columns, rank, x.stride(0), blocks_each, threshold_of(rate),
            scale_of(rate), **_kernel_options(rank),
        )  # fmt: skip
        return result[0] if shares == 1 else result.sum(0)

    def add_input_gradient(
        self, x_grad: torch.Tensor, hidden_grad: torch.Tensor, down: torch.Tensor, seed: torch.Tensor, rate: float
    ) -> None:
        (rows, columns), rank = x_grad.shape, down.shape[0]
        self.kernels.add_input_gradient[_ceil_divide(rows, _ROWS) * _ceil_divide(columns, 2 * HALF),](
            x_grad.view(-1), hidden_grad.contiguous(), down.contiguous(), seed, rows, columns, rank, threshold_of(rate),
            scale_of(rate), **_kernel_options(rank),
        )  # fmt: skip


def _to_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _zero_dropped(values: torch.Tensor, seed: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.where(kept_values(seed, values.shape[0], values.shape[1], rate), values, 0.0)


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _ceil_divide(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _divide_tiles(number: int, most_shares: int) -> tuple[int, int]:
    """Divide tiles among at most so many programs; return how many each has, and how many programs there are."""
    each = max(_ceil_divide(number, max(most_shares, 1)), _LEAST_TILES)
    return each, max(_ceil_divide(number, each), 1)


def _padded_rank(rank: int) -> int:
    return max(1 << (rank - 1).bit_length(), _SMALLEST_RANK)


def _kernel_options(rank: int) -> dict[str, int]:
    """Return the sizes of a kernel, the same for all shapes: trying several would delay the start of each run."""
    padded = _padded_rank(rank)
    # With three tiles ahead, wider ones would not fit into the shared memory of small GPUs.
    return {"ROWS": _ROWS, "RANK": padded, "num_warps": _WARPS, "num_stages": 3 if padded <= 32 else 2}


def triton_products(x: torch.Tensor, dtype: torch.dtype, rank: int) -> Products | None:
    """Return the kernels for an adapter that is computed in a data type; None where they cannot be used."""
    is_on_gpu = x.is_cuda and torch.cuda.is_initialized()  # a simulated GPU has none
    return _load_kernels() if is_on_gpu and kernel_failure(x.device, rank, dtype, x.dtype) is None else None


@cache
def _load_kernels() -> Products:
    from worker.training.model.dropout import triton_kernels

    return TritonProducts(triton_kernels)


@cache
def kernel_failure(
    device: torch.device, rank: int, dtype: torch.dtype, x_dtype: torch.dtype, products: Products | None = None
) -> str | None:
    """Return why the kernels cannot be used on a device: an error, or other results than those of torch.

    They are compiled and computed for small matrices once per process, without random numbers of the run.

    Args:
        device: device of the matrices.
        rank: rank of the adapter.
        dtype: data type in which the adapter is computed.
        x_dtype: data type of its input.
        products: what is checked instead of the kernels.

    Returns:
        The reason in one line; None if they can be used.
    """
    if dtype not in _DTYPES or x_dtype not in (*_DTYPES, torch.float32):
        return f"{str(dtype).removeprefix('torch.')} is not supported"
    if rank > _LARGEST_RANK:
        return f"ranks above {_LARGEST_RANK} are not supported"
    try:
        checked = products or _load_kernels()
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            largest = max(_relative_differences(checked, device, rank, dtype, x_dtype))
    except Exception as error:  # missing packages and compilers, and whatever a compiler does not support
        if classify_error(error).code == OUT_OF_MEMORY:
            raise
        return f"they fail: {one_line(error)}"
    return None if largest <= _CHECKED_TOLERANCE else f"their results differ by {largest:.1g} from those of torch"


def _relative_differences(
    checked: Products, device: torch.device, rank: int, dtype: torch.dtype, x_dtype: torch.dtype
) -> Iterator[float]:
    """Compute each product, and yield its relative difference from that of torch."""
    rows, columns = _CHECKED_SHAPE
    generator = torch.Generator(device).manual_seed(0)

    def random_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, x_grad = random_tensor(rows, columns, dtype=x_dtype), random_tensor(rows, columns, dtype=dtype)
    down, hidden_grad = random_tensor(rank, columns, dtype=dtype), random_tensor(rows, rank, dtype=dtype)
    seed = torch.tensor([0x0123456789ABCDEF], device=device)
    reference = TorchProducts()
    draw = seed, _CHECKED_RATE
    yield _relative_difference(checked.project(x, down, *draw), reference.project(x, down, *draw))
    narrow = x[:, :_NARROW], down[:, :_NARROW]
    yield _relative_difference(checked.project(*narrow, *draw), reference.project(*narrow, *draw))
    yield _relative_difference(
        checked.project_gradient(x, hidden_grad, *draw), reference.project_gradient(x, hidden_grad, *draw)
    )
    sums = x_grad.clone(), x_grad.clone()
    checked.add_input_gradient(sums[0], hidden_grad, down, *draw)
    reference.add_input_gradient(sums[1], hidden_grad, down, *draw)
    yield _relative_difference(*sums)
    dropped = torch.zeros_like(x_grad)
    checked.add_input_gradient(dropped, torch.ones_like(hidden_grad), torch.ones_like(down), *draw)
    yield float(((dropped != 0) != kept_values(seed, rows, columns, _CHECKED_RATE)).any())


def _relative_difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    return float((tensor.float() - expected.float()).norm() / expected.float().norm())
