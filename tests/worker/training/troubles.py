"""A disk that makes the thread behind a training loop wait, or kills its process at one of the calls it makes."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

_NEVER = threading.Event()
_PLACES = ((safetensors.torch, "save_file"), (torch, "save"), (Path, "write_bytes"), (os, "fsync"), (os, "rename"))


def begin(asked: dict[str, Any]) -> None:
    """From now on in this process: `slow` seconds before each file of weights, death at call number `kill_at`."""
    calls = 0

    def instead_of(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def troubled(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name == "checkpoint":
                calls += 1
                if calls == asked.get("kill_at"):
                    _leave_half(name, arguments)
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "save_file":
                    _NEVER.wait(asked.get("slow", 0))
            return call(*arguments, **options)

        setattr(owner, name, troubled)

    for owner, name in _PLACES:
        instead_of(owner, name)


def _leave_half(name: str, arguments: tuple[Any, ...]) -> None:
    """A write that was cut off leaves a part; the other calls have happened or not."""
    if name in ("save_file", "save"):
        Path(arguments[1]).write_text("half")
    elif name == "write_bytes":
        Path(arguments[0]).write_text("half")
