"""Autocast on a CPU as libraries see it on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """During the block, `torch.is_autocast_enabled()` without a device is about the CPU.

    It is about CUDA otherwise. peft asks it in each layer on a quantized base, and takes other ways with autocast.
    """
    original = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device_type="cpu": original(device_type)
    try:
        yield
    finally:
        torch.is_autocast_enabled = original
