"""Early ends of training: a failure with a stable code, or a stop outside the training loop."""

import errno
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from anneal.contracts.attempt.messages import AnomalyDetails, RepairProposal

OUT_OF_MEMORY = "out_of_memory"
DEVICE_ERROR = "device_error"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = (
    "no space left on device", "os error 28", "disk quota exceeded", "file too large", "os error 27",
    # The only text that torch's writer gives when the disk is full.
    "iostream error", ". unexpected pos ",
)  # fmt: skip
_DEVICE_WORDS = (
    "uncorrectable ecc error", "illegal memory access", "unspecified launch failure", "hardware stack error",
    "illegal instruction was encountered", "launch timed out", "no cuda-capable device is detected",
    "device(s) is/are busy or unavailable", "cuda driver initialization failed", "cuda unknown error",
    "no cuda gpus are available", "torch not compiled with cuda enabled",
)  # fmt: skip
_MEMORY_WORDS = (
    "out of memory", "can't allocate memory", "cannot allocate memory",
    # CUDA libraries that cannot allocate their workspace, and torch's allocator that cannot even query the device.
    "cublas_status_alloc_failed", "cublas_status_not_initialized", "cudnn_status_alloc_failed", "nvml_success == r",
)  # fmt: skip

_LONGEST_LINE = 300


class TrainingFailure(Exception):
    """A failure with a stable code and a sentence that says what to do next."""

    def __init__(
        self, code: str, message: str, repair: RepairProposal | None = None, details: AnomalyDetails | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.repair = repair
        """Changes for the next attempt, if the configuration asks for a repair: kind, step and rows."""
        self.details = details
        """Facts for the post-mortem."""
        self.rank: int | None = None
        """Rank on which it happened, if it is not this one."""


class Stopped(Exception):
    """A stop was requested where no checkpoint can be saved: while loading, tokenizing or evaluating."""


def one_line(error: BaseException) -> str:
    """Return an exception's text as one line of at most 300 characters; many give the reason after the first line."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"


def device_failure(error: BaseException) -> TrainingFailure:
    """Return the failure of the device itself, which another device may not have."""
    return TrainingFailure(
        DEVICE_ERROR,
        f"The GPU of this run failed ({one_line(error)}): check it with `nvidia-smi`, and the kernel's log for Xid "
        "errors.",
    )


def classify_error(error: BaseException) -> TrainingFailure:
    """Return the failure that an exception means; anything unforeseen is `internal`."""
    for cause in chain_of(error):
        text = str(cause).lower()
        if isinstance(cause, TrainingFailure):
            return cause
        if (isinstance(cause, OSError) and cause.errno in _FULL) or any(word in text for word in _FULL_WORDS):
            return TrainingFailure("disk_full", f"The disk is full: {cause}. Free some space and resume the run.")
        # torch.OutOfMemoryError is a RuntimeError, and so is what the CPU allocator raises.
        if isinstance(cause, MemoryError) or (
            isinstance(cause, RuntimeError) and any(word in text for word in _MEMORY_WORDS)
        ):
            return TrainingFailure(
                OUT_OF_MEMORY,
                f"Out of memory: {str(cause)[:500]}. Lower `batch_size` (and raise "
                "`gradient_accumulation_steps`) or `max_seq_length`. Method `rlhf` generates all completions of a step "
                "at once: lower both `batch_size` and `gradient_accumulation_steps`, or `rlhf.max_completion_length`.",
            )
        if any(word in text for word in _DEVICE_WORDS):
            return device_failure(cause)
        if "cuda driver error" in text:
            return TrainingFailure(
                DEVICE_ERROR,
                f"The driver of this GPU refused a call ({one_line(cause)}): if it cannot map memory, start the worker "
                "with `PYTORCH_ALLOC_CONF=expandable_segments:False`.",
            )
        if (remedy := _build_remedy(cause)) is not None:
            return TrainingFailure(DEVICE_ERROR, f"This host cannot compile GPU kernels: {remedy}.")
    return TrainingFailure("internal", f"{type(error).__name__}: {str(error)[:2000]}")


def _build_remedy(error: BaseException) -> str | None:
    """Return what lets Triton compile the launchers of its kernels, whose build failed; None for other errors."""
    if "failed to find c compiler" in str(error).lower():
        return "install a C compiler (Debian and Ubuntu: `gcc` and `libc6-dev`)"
    if not isinstance(error, subprocess.CalledProcessError) or "-shared" not in error.cmd:
        return None
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"install the headers of Python (Debian and Ubuntu: `{package}`)"
    return f"`{error.cmd[0]}` failed, with a message in the log; it needs `libc6-dev` on Debian and Ubuntu"


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
