"""Triton kernels for products with a matrix of which dropout keeps some values; no mask and no copy of it is written.

A hash of the seed, the row and the column decides whether a value stays. Each kernel computes it for itself; in torch,
it is `worker.training.model.dropout.mask.kept_values`. Importing this module needs the package triton.

All matrices have the layout (rows, columns) and contiguous rows, except that the rows of `x` may be apart.
Each program reads tiles of `TILE` columns: two halves next to each other, to which it gives the two halves of the same
32-bit hashes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl

from worker.training.model.dropout import mask

HALF = tl.constexpr(mask.HALF)
TILE = tl.constexpr(2 * mask.HALF)


@triton.jit
def _mix(value):
    # Two rounds of multiplication and shifts in which every bit of the input changes each bit of the result with a
    # probability of one half ("lowbias32").
    value ^= value >> 16
    value *= 0x7FEB352D
    value ^= value >> 15
    value *= 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _row_keys(seed, row):
    """Return the two 32-bit keys of each row: factor (odd) and summand of the positions in the row."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    low = _mix(low ^ _mix(high ^ 0x9E3779B9))
    high = _mix(high ^ low)
    factor = _mix(row.to(tl.uint32) ^ low)
    return factor | 1, _mix(factor + high)


@triton.jit
def _hashes(factor, summand, tile):
    """Return a 32-bit hash for each pair of values in a tile: the lower half is that of the left one."""
    pair = (tl.arange(0, HALF) + tile * HALF).to(tl.uint32)
    return _mix(factor[:, None] * pair[None, :] + summand[:, None])


@triton.jit(do_not_specialize=["rows", "tiles_each", "threshold"])
def project(
    x, down, result, seed, rows, columns, rank, x_stride, tiles_each, threshold, scale,
    ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Write `scale * dropout(x) @ down.T`, summed over the tiles of this program.

    Shapes: x (rows, columns), down (rank, columns), result (shares, rows, rank).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, RANK)
    half = tl.arange(0, HALF)
    is_row, is_place = row[:, None] < rows, place[None, :] < rank
    factor, summand = _row_keys(tl.load(seed), row)
    limit = threshold.to(tl.uint32)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    down_row = down + place[None, :] * columns
    total = tl.zeros((ROWS, RANK), dtype=tl.float32)
    first = tl.program_id(1) * tiles_each
    for tile in range(first, tl.minimum(first + tiles_each, tl.cdiv(columns, TILE))):
        hashes = _hashes(factor, summand, tile)
        left = half + tile * TILE
        right = left + HALF
        values = tl.load(x_row + left[None, :], is_row & (left < columns)[None, :], 0.0).to(down.dtype.element_ty)
        weights = tl.load(down_row + left[:, None], is_place & (left < columns)[:, None], 0.0)
        total = tl.dot(tl.where((hashes & 0xFFFF) >= limit, values, 0.0), weights, total)
        values = tl.load(x_row + right[None, :], is_row & (right < columns)[None, :], 0.0).to(down.dtype.element_ty)
        weights = tl.load(down_row + right[:, None], is_place & (right < columns)[:, None], 0.0)
        total = tl.dot(tl.where((hashes >> 16) >= limit, values, 0.0), weights, total)
    share = result + tl.program_id(1).to(tl.int64) * rows * rank
    tl.store(share + row.to(tl.int64)[:, None] * rank + place[None, :], total * scale, is_row & is_place)


@triton.jit(do_not_specialize=["rows", "blocks_each", "threshold"])
def project_gradient(
    x, hidden_grad, result, seed, rows, columns, rank, x_stride, blocks_each, threshold, scale,
    ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Write `scale * hidden_grad.T @ dropout(x)`, summed over the blocks of rows of this program.

    Shapes: x (rows, columns), hidden_grad (rows, rank), result (shares, rank, columns).
    """
    tiles = tl.cdiv(columns, TILE)
    tile, share = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    place = tl.arange(0, RANK)
    left = tile * TILE + tl.arange(0, HALF)
    right = left + HALF
    is_place = place < rank
    key, limit = tl.load(seed), threshold.to(tl.uint32)
    left_total = tl.zeros((RANK, HALF), dtype=tl.float32)
    right_total = tl.zeros((RANK, HALF), dtype=tl.float32)
    first = share * blocks_each
    for block in range(first, tl.minimum(first + blocks_each, tl.cdiv(rows, ROWS))):
        row = block * ROWS + tl.arange(0, ROWS)
        is_row = row[:, None] < rows
        factor, summand = _row_keys(key, row)
        hashes = _hashes(factor, summand, tile)
        x_row = x + row.to(tl.int64)[:, None] * x_stride
        gradient = tl.load(
            hidden_grad + row.to(tl.int64)[:, None] * rank + place[None, :], is_row & is_place[None, :], 0.0
        )
        gradient = tl.trans(gradient)
        values = tl.load(x_row + left[None, :], is_row & (left < columns)[None, :], 0.0)
        values = values.to(hidden_grad.dtype.element_ty)
        left_total = tl.dot(gradient, tl.where((hashes & 0xFFFF) >= limit, values, 0.0), left_total)
        values = tl.load(x_row + right[None, :], is_row & (right < columns)[None, :], 0.0)
        values = values.to(hidden_grad.dtype.element_ty)
        right_total = tl.dot(gradient, tl.where((hashes >> 16) >= limit, values, 0.0), right_total)
    result_row = result + (share.to(tl.int64) * rank + place[:, None]) * columns
    tl.store(result_row + left[None, :], left_total * scale, is_place[:, None] & (left < columns)[None, :])
    tl.store(result_row + right[None, :], right_total * scale, is_place[:, None] & (right < columns)[None, :])


@triton.jit(do_not_specialize=["rows", "threshold"])
def add_input_gradient(
    x_grad, hidden_grad, down, seed, rows, columns, rank, threshold, scale,
    ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Add `scale * dropout(hidden_grad @ down)` to `x_grad`, in 32 bits.

    Shapes: x_grad (rows, columns), hidden_grad (rows, rank), down (rank, columns).
    """
    tiles = tl.cdiv(columns, TILE)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, RANK)
    left = tile * TILE + tl.arange(0, HALF)
    right = left + HALF
    is_row, is_place = row[:, None] < rows, place < rank
    is_left, is_right = (left < columns)[None, :], (right < columns)[None, :]
    x_row = x_grad + row.to(tl.int64)[:, None] * columns
    down_row = down + place[:, None] * columns
    limit = threshold.to(tl.uint32)
    left_before = tl.load(x_row + left[None, :], is_row & is_left, 0.0).to(tl.float32)
    right_before = tl.load(x_row + right[None, :], is_row & is_right, 0.0).to(tl.float32)
    gradient = tl.load(hidden_grad + row.to(tl.int64)[:, None] * rank + place[None, :], is_row & is_place[None, :], 0.0)
    factor, summand = _row_keys(tl.load(seed), row)
    hashes = _hashes(factor, summand, tile)
    weights = tl.load(down_row + left[None, :], is_place[:, None] & is_left, 0.0)
    change = tl.where((hashes & 0xFFFF) >= limit, tl.dot(gradient, weights), 0.0)
    tl.store(x_row + left[None, :], left_before + change * scale, is_row & is_left)
    weights = tl.load(down_row + right[None, :], is_place[:, None] & is_right, 0.0)
    change = tl.where((hashes >> 16) >= limit, tl.dot(gradient, weights), 0.0)
    tl.store(x_row + right[None, :], right_before + change * scale, is_row & is_right)
