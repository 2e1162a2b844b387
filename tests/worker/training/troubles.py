"""A disk slow or deadly to the thread behind a training loop, a drain at a step, evaluations that go wrong."""

import errno
import itertools
import math
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch

from worker.training.loop.trainer import ServiceTrainerMixin
from worker.wire.journal import Journal

_NEVER = threading.Event()
_PLACES = ((safetensors.torch, "save_file"), (torch, "save"), (Path, "write_bytes"), (os, "fsync"), (os, "rename"))


def begin(troubles: dict[str, Any]) -> None:
    """From now on in this process: `slow` seconds before each file of weights, death at call number `kill_at`, and no
    memory at call number `no_memory_at`; a file named `unreadable` cannot be read."""
    calls = 0
    opened = Path.open

    def open_unless_unreadable(path: Path, mode: str = "r", *options: Any, **more: Any) -> Any:
        if path.name == troubles.get("unreadable") and mode == "rb":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, mode, *options, **more)

    Path.open = open_unless_unreadable  # type: ignore[method-assign,assignment]

    def instead_of(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def troubled(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name == "checkpoint":
                calls += 1
                if calls == troubles.get("kill_at"):
                    _leave_half(name, arguments)
                    os.kill(os.getpid(), signal.SIGKILL)
                if calls == troubles.get("no_memory_at"):
                    raise MemoryError
                if name == "save_file":
                    _NEVER.wait(troubles.get("slow", 0))
            return call(*arguments, **options)

        setattr(owner, name, troubled)

    for owner, name in _PLACES:
        instead_of(owner, name)


def follow(course: Any) -> None:
    """From now on here: SIGTERM within step `drain_at`, or before the evaluation of set number `drain_at_evaluation`;
    `evaluations` in turn raise, or find NaN or a given loss."""
    reported, evaluate = Journal.record_step, ServiceTrainerMixin.evaluation_loop
    left = list(course.get("evaluations", ()))
    sets = itertools.count(1)

    def step(journal: Journal, n: int, *about: Any) -> None:
        reported(journal, n, *about)
        if n == course.get("drain_at"):
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluation_loop(trainer: Any, *arguments: Any, **options: Any) -> Any:
        if next(sets) == course.get("drain_at_evaluation"):
            os.kill(os.getpid(), signal.SIGTERM)
        outcome = left.pop(0) if left else None
        with ExitStack() as changes:
            if outcome == "raises":
                changes.enter_context(patch.object(ServiceTrainerMixin, "prediction_step", fail))
            output = evaluate(trainer, *arguments, **options)
        match outcome:
            case "nan":
                output.metrics["eval_loss"] = math.nan
            case float(loss):
                output.metrics["eval_loss"] = loss
        return output

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no evaluation today")

    Journal.record_step = step  # type: ignore[method-assign]
    ServiceTrainerMixin.evaluation_loop = evaluation_loop


def _leave_half(name: str, arguments: tuple[Any, ...]) -> None:
    """A write that was cut off leaves a part; the other calls have happened or not."""
    if name in ("save_file", "save") and isinstance(arguments[1], str | Path):
        Path(arguments[1]).write_text("half")
    elif name == "save":  # to an open file, as torch.distributed.checkpoint does
        arguments[1].write(b"half")
        arguments[1].flush()
    elif name == "write_bytes":
        Path(arguments[0]).write_text("half")
