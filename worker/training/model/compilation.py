"""Compilation of a model's layers (`torch_compile`)."""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from transformers.modeling_layers import GradientCheckpointingLayer

from worker.training.failures import TrainingFailure, one_line

_MOST_VARIANTS = 32
"""Compiled variants of a layer, above which further ones are computed without compilation."""


def compile_layers(model: Any) -> None:
    """Let each layer of the model be compiled when it first computes; layers that are alike share the result.

    Raises:
        TrainingFailure: `config_error`, if the layers of the model are not known.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingFailure(
            "config_error", "`torch_compile` is set, but the layers of this model are not known; leave it out."
        )
    # Layers with and without padding, a gradient of their input, training: each needs a variant of its own.
    torch.compiler.config.recompile_limit = _MOST_VARIANTS
    for layer in layers:
        layer.compile(dynamic=True)  # lengths differ between batches


@contextmanager
def reported_compiler_errors() -> Iterator[None]:
    """Raise `config_error` with advice for an error of the compiler in the block."""
    try:
        yield
    except (InductorError, TorchDynamoException) as error:
        advice = (
            "This model cannot be compiled by this version of torch: leave `torch_compile` out."
            if _has_compiler()
            else "It needs a C++ compiler and the header files of Python on the worker (Debian: `apt install g++ "
            "python3-dev`)."
        )
        raise TrainingFailure(
            "config_error", f"`torch_compile` failed on this worker ({one_line(error)}). {advice}"
        ) from error


def _has_compiler() -> bool:
    """Return True if the worker has what compiled code is built with: a C++ compiler, and the header of Python."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return any(map(shutil.which, ("c++", "g++", "clang++"))) and header.exists()
