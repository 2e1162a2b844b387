"""A training process that is slow on purpose, or stands still, where `slow.json` beside its job says so."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from worker.training import __main__ as training
from worker.training.methods.sft import SupervisedTrainer
from worker.training.model import loader

_NEVER = threading.Event()


def main(argv: list[str]) -> int:
    """As `worker.training`, on a slow machine: it hands every call on, only later."""
    path = Path(argv[0]).with_name("slow.json")
    slow = json.loads(path.read_text())
    if seconds := slow.get("micro_batch"):
        _slow_down(SupervisedTrainer, "training_step", seconds)
    if seconds := slow.get("eval_batch"):
        _slow_down(SupervisedTrainer, "prediction_step", seconds)
    if seconds := slow.get("fsync"):
        _slow_down(os, "fsync", seconds)
    if pieces := slow.get("download"):
        _download_slowly(pieces, Path(slow["to"]) if "to" in slow else None)
    return training.main(argv)


def _slow_down(owner: Any, name: str, seconds: float) -> None:
    call = getattr(owner, name)

    def slowly(*arguments: Any, **options: Any) -> Any:
        _NEVER.wait(seconds)
        return call(*arguments, **options)

    setattr(owner, name, slowly)


def _download_slowly(pieces: int, to: Path | None) -> None:
    """Let the weights come over a thin line, in pieces of half a second; without a place to go to, none arrives."""
    load = loader.load_model

    def slowly(*arguments: Any, **options: Any) -> Any:
        for _ in range(pieces):
            _NEVER.wait(0.5)
            if to is not None:
                with to.open("ab") as file:
                    file.write(b"x" * 5000)
        return load(*arguments, **options)

    loader.load_model = slowly
