"""Processes of a stage: forks with everything imported, which are what a worker's training processes are."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from worker import devices
from worker.process import zygote

PRELOADED = (
    "worker.training.__main__", "benchmarks.gpu_check.plain_trl", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "transformers.integrations.bitsandbytes", "peft.tuners.lora.bnb",
)  # fmt: skip

_context: Any = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Call:
    """Function to call in a new process, whose output is written to `folder`."""

    function: Callable[..., int | None]
    """Defined in a module, since a new interpreter must find it; returns the exit code, None for 0."""
    folder: Path
    arguments: tuple[Any, ...] = ()
    seconds: float = 120.0


@dataclass
class Ended:
    """Exit code of a call; None if it took too long and was killed."""

    code: int | None
    seconds: float


@dataclass
class _Running:
    call: Call
    process: BaseProcess
    began: float = field(default_factory=time.monotonic)

    def ended(self) -> Ended | None:
        seconds = time.monotonic() - self.began
        if self.process.exitcode is not None:
            return Ended(self.process.exitcode, seconds)
        if seconds < self.call.seconds:
            return None
        self.process.kill()
        self.process.join()
        return Ended(None, seconds)


def run(call: Call) -> Ended:
    """Call a function in a new process and wait for its end."""
    return run_all([call], 1)[0]


def run_all(calls: Sequence[Call], at_once: int) -> list[Ended]:
    """Call functions in new processes, at most `at_once` at the same time; return how each ended, in order."""
    waiting, running, ends = list(enumerate(calls)), dict[int, _Running](), dict[int, Ended]()
    while waiting or running:
        while waiting and len(running) < at_once:
            number, call = waiting.pop(0)
            process = _context.Process(target=_enter, args=(call.function, call.arguments, str(call.folder)))
            process.start()
            running[number] = _Running(call, process)
        connection.wait([item.process.sentinel for item in running.values()], timeout=0.2)
        for number, item in list(running.items()):
            if (end := item.ended()) is not None:
                ends[number] = end
                del running[number]
    return [ends[number] for number in range(len(calls))]


def prepare(modules: Sequence[str] = PRELOADED) -> None:
    """Import modules, so that forks have them; choose new interpreters where a fork cannot use the device."""
    global _context
    try:
        zygote.preload_modules(modules)
        if devices.has_gpu() and modules:
            probe = _context.Process(target=_touch_device)
            probe.start()
            probe.join(60)
            if probe.exitcode != 0:
                probe.kill()
                raise RuntimeError("a fork cannot use the GPU")
    except Exception as problem:
        sys.stderr.write(f"each run starts a new interpreter: {problem}\n")
        _context = multiprocessing.get_context("spawn")


def _touch_device() -> None:
    import torch

    torch.zeros(1, device="cuda").item()


def _enter(function: Callable[..., int | None], arguments: tuple[Any, ...], folder: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
    if devices.has_gpu():
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.list_gpus()[0].id
    os.chdir(folder)
    sys.exit(function(*arguments) or 0)
