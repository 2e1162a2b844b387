"""Masks of dropout that a hash of a seed decides about, so that a value can be dropped wherever it is read."""

import torch

HALF = 64
"""Columns of a half of a tile. A value and the one `HALF` columns further share the two halves of a hash."""
_LEVELS = 1 << 16
"""Values of half a hash: the rate is a multiple of 1 / 65536."""
_MASK = 0xFFFFFFFF


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draw a seed of dropout from the generator of the device, without waiting for the device; shape (1,), int64."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def kept_values(seed: torch.Tensor, rows: int, columns: int, rate: float) -> torch.Tensor:
    """Return which values of a matrix dropout keeps; shape (rows, columns), bool.

    The positions of a row are an arithmetic progression of 32-bit numbers, whose start and step are hashes of the seed
    and the row; a hash of each position decides about two values.
    """
    row, column = torch.arange(rows, device=seed.device), torch.arange(columns, device=seed.device)
    low, high = seed & _MASK, seed >> 32 & _MASK
    low = _mix(low ^ _mix(high ^ 0x9E3779B9))
    high = _mix(high ^ low)
    factor = _mix(row ^ low)
    summand = _mix(factor + high & _MASK)
    pair = column // (2 * HALF) * HALF + column % HALF
    hashes = _mix((factor | 1)[:, None] * pair + summand[:, None] & _MASK)
    is_left = column // HALF % 2 == 0
    return torch.where(is_left, hashes & _LEVELS - 1, hashes >> 16) >= threshold_of(rate)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """Return the hash of 32-bit numbers that are stored in 64 bits: `triton_kernels._mix`."""
    value = (value ^ value >> 16) * 0x7FEB352D & _MASK
    value = (value ^ value >> 15) * 0x846CA68B & _MASK
    return value ^ value >> 16


def threshold_of(rate: float) -> int:
    """Return the lowest half of a hash with which a value stays."""
    return min(max(round(rate * _LEVELS), 1), _LEVELS - 1)


def scale_of(rate: float) -> float:
    """Return the inverse of the share of values that stay, which keeps the expected product the same."""
    return _LEVELS / (_LEVELS - threshold_of(rate))
