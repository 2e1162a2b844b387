"""`gguf`: the output as one file for llama.cpp, written by its own converter, a program that the operator installs.

The converter runs in a process group of its own within the session of the training process, so it ends with that.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from anneal.contracts.run_task import RunTask
from anneal.contracts.training_config.rules import INSTALL_GGUF_CONVERTER
from app.infra.process.children import last_lines
from worker.checkpoint_files.disk_space import DiskSpace
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure

FILE = "model.gguf"
_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Bytes per weight."""
_STALLED_SECONDS = 600.0
"""The converter is ended if it writes nothing, neither weights nor messages, for this long."""
_POLL_SECONDS = 0.1
_IMPORT_ERROR = re.compile(r"^(ModuleNotFound|Import)Error: ", re.MULTILINE)
_SUPPORTED = re.compile(r"^\s*- (\w+)$", re.MULTILINE)
"""Names of classes in the list that the converter prints."""
_MOST_CHARACTERS = 1000
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Nothing of the training process, whose environment may have secrets. The converter does not reach the hub, because it
executes the code of tokenizers that name some there."""


def check_converter(run: TrainingContext) -> None:
    """Check before training that the converter is there.

    A run that has already trained is not failed here: it reports at its end why the file is missing.

    Raises:
        TrainingFailure: `config_error`.
    """
    if run.config.gguf is not None and (run.resume_from is None or run.job.task is RunTask.export):
        _require_converter(run)


def check_architecture(run: TrainingContext, model_config: Mapping[str, Any]) -> None:
    """Check before training that the converter starts, and knows the architecture that a config.json names.

    Only a converter of Python is asked; a program of the operator may not have the option.

    Raises:
        TrainingFailure: `config_error`.
        Stopped: a stop was requested.
    """
    if run.config.gguf is None or run.resume_from is not None or _require_converter(run).suffix != ".py":
        return
    converter, log = _require_converter(run), run.folder / ".gguf.log"
    try:
        with _started_process([sys.executable, str(converter), "--print-supported-models"], log) as process:
            _wait_with_heartbeats(run, process, log)
        text = log.read_text(errors="replace")
    finally:
        log.unlink(missing_ok=True)
    if _IMPORT_ERROR.search(text):
        raise TrainingFailure(
            "config_error",
            f"`gguf` needs the converter of llama.cpp, which cannot start on this worker ({text.splitlines()[-1]}): "
            f"{INSTALL_GGUF_CONVERTER}.",
        )
    known = set(_SUPPORTED.findall(text))
    classes = (model_config.get("text_config") or {}).get("architectures") or model_config.get("architectures")
    name = next(iter(classes or ()), None)
    if known and name is not None and name not in known:
        raise TrainingFailure(
            "config_error",
            f"`gguf` cannot be used: the converter of llama.cpp on this worker does not know the class {name}: "
            "leave it out, or install a newer converter.",
        )


def add_gguf(run: TrainingContext, folder: Path) -> None:
    """Add `model.gguf` to a folder with a whole model and its tokenizer, if the run asks for it.

    An export fails without the file. A run that has trained keeps the rest of its output, and reports the reason.

    Raises:
        TrainingFailure: an export cannot write the file.
        Stopped: an export is to stop, or the worker drains: the run's next attempt writes the output.
    """
    if run.config.gguf is None:
        return
    is_export = run.job.task is RunTask.export
    try:
        _convert_model(run, folder, run.config.gguf)
    except Stopped:
        request = run.stop_requested
        if is_export or (request is not None and request.why == "drain"):
            raise
        why = "A stop was requested."
    except TrainingFailure as error:
        if is_export:
            raise
        why = error.message
    else:
        size = (folder / FILE).stat().st_size
        run.report.message(f"Wrote `{FILE}` ({run.config.gguf}, {size:,} bytes).")
        return
    (folder / FILE).unlink(missing_ok=True)
    run.report.message(
        f"The output has no `{FILE}`; its other files are complete. To try again, export the last checkpoint of the "
        f"run with `gguf`. {why}",
        level="error",
    )


def _require_converter(run: TrainingContext) -> Path:
    converter = run.job.gguf_converter
    if converter is None or not converter.is_file():
        message = f"`gguf` needs the converter of llama.cpp, which this worker lacks: {INSTALL_GGUF_CONVERTER}."
        raise TrainingFailure("config_error", message)
    return converter


def _convert_model(run: TrainingContext, folder: Path, data_type: str) -> None:
    converter, file, log, about = (
        _require_converter(run),
        folder / FILE,
        run.folder / ".gguf.log",
        run.folder / ".gguf.json",
    )
    lacking = DiskSpace(run.folder, run.job.disk_reserve_bytes).shortage_reason(
        int(_count_weights(folder) * _BYTES[data_type])
    )
    if lacking is not None:
        raise TrainingFailure("disk_full", f"`{FILE}` does not fit on the disk: {lacking}.")
    # A program that is no Python module is a wrapper of the operator, with packages of its own.
    interpreter = [sys.executable] if converter.suffix == ".py" else []
    command = [
        *interpreter, str(converter), str(folder), "--outfile", str(file), "--outtype", data_type,
        "--metadata", str(about),
    ]  # fmt: skip
    # Without these, the converter takes them from the name of the folder.
    name = run.job.base_model.portable_name.rsplit("/", 1)[-1]
    try:
        about.write_text(json.dumps({"general.name": name, "general.finetune": run.job.run_id}))
        with _started_process(command, log) as process:
            _wait_with_heartbeats(run, process, file, log)
        problem = None if process.returncode == 0 and file.is_file() else _describe_end(process.returncode, log)
    except OSError as error:
        problem = f"it cannot be started: {error}"
    finally:
        log.unlink(missing_ok=True)
        about.unlink(missing_ok=True)
    if problem is not None:
        message = f"The converter of llama.cpp ({converter.name}) could not write `{FILE}`: {problem}"
        raise TrainingFailure("config_error", message)


def _count_weights(folder: Path) -> int:
    """Return the number of weights in the model of a folder."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


@contextmanager
def _started_process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it and its descendants at the end of the block.

    Both output streams go to `log`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_ENVIRONMENT,
            process_group=0,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so the id is still that of its group
        process.wait()


def _wait_with_heartbeats(run: TrainingContext, process: subprocess.Popen[bytes], *written: Path) -> None:
    """Wait for the end of a process, with heartbeats.

    Raises:
        TrainingFailure: it writes nothing for long.
        Stopped: a stop was requested.
    """
    before, grown_at = -1, time.monotonic()
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        run.raise_if_stopped()
        run.report.alive()
        size, now = sum(path.stat().st_size for path in written if path.exists()), time.monotonic()
        if size != before:
            before, grown_at = size, now
        elif now - grown_at > _STALLED_SECONDS:
            message = f"The converter of llama.cpp wrote nothing for {_STALLED_SECONDS:,.0f} seconds, and was ended."
            raise TrainingFailure("config_error", message)
        time.sleep(_POLL_SECONDS)


def _describe_end(status: int, log: Path) -> str:
    """Return how the converter ended, with its last lines."""
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    lines = last_lines(log)[-_MOST_CHARACTERS:]
    return f"{ended}, and its last lines are:\n{lines}" if lines else f"{ended}, without a message."
