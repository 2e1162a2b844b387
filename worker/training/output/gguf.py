"""`gguf`: the output as one file for llama.cpp, written by its own converter and, for most types, its quantizer."""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from anneal.contracts.field_types import needs_quantizer
from anneal.contracts.run_task import RunTask
from anneal.contracts.training_config.rules import INSTALL_GGUF_CONVERTER, INSTALL_GGUF_QUANTIZER
from worker.checkpoint_files.disk_space import DiskSpace
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure, classify_error
from worker.training.output.modelfile import MODELFILE, modelfile
from worker.training.output.program import EndedProgram, Progress, run_program

FILE = "model.gguf"
_UNQUANTIZED = ".unquantized.gguf"
_CONVERTER, _QUANTIZER = "The converter of llama.cpp", "The quantizer of llama.cpp"
_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 34 / 32}
"""Bytes per weight. No quantized type needs more than `Q8_0`."""
_MOST_THREADS = 8
_IMPORT_ERROR = re.compile(r"^(ModuleNotFound|Import)Error: .*", re.MULTILINE)
_LISTED_TYPE = re.compile(r"^ *\d+ +or +(\w+) *:", re.MULTILINE)
"""Name in the list that the quantizer prints."""
_TENSOR_OF = re.compile(r"^\[ *(\d+)/ *(\d+)\]", re.MULTILINE)
"""Number of a tensor that the quantizer writes, and how many there are."""


def check_programs(run: TrainingContext) -> None:
    """Check before training that the programs are there, and that the quantizer starts and knows the type.

    A run that has already trained is not failed here: it reports at its end why the file is missing.

    Raises:
        TrainingFailure: `config_error`.
        Stopped: a stop was requested.
    """
    gguf_type = run.config.gguf
    if gguf_type is None or (run.resume_from is not None and run.job.task is not RunTask.export):
        return
    _require_converter(run)
    if not needs_quantizer(gguf_type):
        return
    ended = run_program(run, _QUANTIZER, [str(_require_quantizer(run)), "--help"])
    known = _LISTED_TYPE.findall(ended.output)
    if not known:
        raise TrainingFailure(
            "config_error",
            f"`gguf` is `{gguf_type}`, which needs the quantizer of llama.cpp, and that does not start on this worker: "
            f"{ended.reason}\nAsk the operator to {INSTALL_GGUF_QUANTIZER}.",
        )
    if gguf_type not in known:
        raise TrainingFailure(
            "config_error",
            f"`gguf` is `{gguf_type}`, which the quantizer of llama.cpp on this worker does not know: use one of "
            f"{', '.join(known)}, or install a newer llama.cpp.",
        )


def check_conversion(run: TrainingContext, folder: Path) -> None:
    """Check before training that the converter can convert a model, from its files other than the weights.

    Only a converter of Python is started; a program of the operator may not have the option.

    Raises:
        TrainingFailure: `config_error`.
        Stopped: a stop was requested.
    """
    if run.config.gguf is None or run.resume_from is not None or _require_converter(run).suffix != ".py":
        return
    trial = run.folder / ".gguf.trial"
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)  # it names weights that are not there
    try:
        # With a type, because the default is that of the weights.
        command = [*_conversion_command(run, folder, trial, "F16"), "--vocab-only"]
        ended = run_program(run, _CONVERTER, command, trial)
    finally:
        trial.unlink(missing_ok=True)
    if error := _IMPORT_ERROR.search(ended.output):
        raise TrainingFailure(
            "config_error",
            f"`gguf` needs the converter of llama.cpp, which cannot start on this worker ({error[0]}): "
            f"{INSTALL_GGUF_CONVERTER}.",
        )
    if ended.status != 0:
        raise TrainingFailure(
            "config_error",
            "`gguf` cannot be used: the converter of llama.cpp on this worker does not convert this model. Leave it "
            f"out, or install a newer llama.cpp. It ended with {ended.reason}",
        )


def needed_bytes(gguf_type: str, weights: int, stored_type: str) -> int:
    """Return the disk space for the file of a model, with the unquantized one beside it if that is quantized."""
    if needs_quantizer(gguf_type):
        return int(weights * (_BYTES[_converted_type(gguf_type, stored_type)] + _BYTES["Q8_0"]))
    return int(weights * _BYTES[gguf_type])


def add_gguf(run: TrainingContext, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add `model.gguf` and `Modelfile` to a folder with a whole model and its tokenizer, if the run asks for it.

    An export fails without the file. A run that has trained keeps the rest of its output, and reports the reason.

    Raises:
        TrainingFailure: an export cannot write the file.
        Stopped: an export is to stop, or the worker drains: the run's next attempt writes the output.
    """
    if run.config.gguf is None:
        return
    is_export = run.job.task is RunTask.export
    started_at = time.monotonic()
    try:
        _write_file(run, folder, run.config.gguf)
        (folder / MODELFILE).write_text(modelfile(folder, FILE, tokenizer))
    except Stopped:
        request = run.stop_requested
        if is_export or (request is not None and request.why == "drain"):
            raise
        why = "A stop was requested."
    except Exception as error:
        failure = classify_error(error)
        if is_export:
            raise failure from error
        why = failure.message
    else:
        size, seconds = (folder / FILE).stat().st_size, time.monotonic() - started_at
        run.report.message(
            f"Wrote `{FILE}` ({run.config.gguf}, {size:,} bytes, in {seconds:,.0f} s) and `{MODELFILE}`."
        )
        return
    for name in (FILE, MODELFILE):
        (folder / name).unlink(missing_ok=True)
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


def _require_quantizer(run: TrainingContext) -> Path:
    quantizer = run.job.gguf_quantizer
    if quantizer is None or not quantizer.is_file():
        message = (
            f"`gguf` is `{run.config.gguf}`, which needs the quantizer of llama.cpp, and this worker lacks it: "
            f"{INSTALL_GGUF_QUANTIZER}."
        )
        raise TrainingFailure("config_error", message)
    return quantizer


def _write_file(run: TrainingContext, folder: Path, gguf_type: str) -> None:
    """Convert the model in a folder to the type, or to that of its weights and then quantize it."""
    file, weights, quantizes = folder / FILE, _count_weights(folder), needs_quantizer(gguf_type)
    stored_type = max(weights, key=lambda name: weights[name])
    needed = needed_bytes(gguf_type, weights.total(), stored_type)
    lacking = DiskSpace(run.folder, run.job.disk_reserve_bytes).shortage_reason(needed)
    if lacking is not None:
        raise TrainingFailure("disk_full", f"`{FILE}` does not fit on the disk: {lacking}.")
    converted, converted_type = (folder / _UNQUANTIZED if quantizes else file), _converted_type(gguf_type, stored_type)
    try:
        _convert(run, folder, converted, converted_type, int(weights.total() * _BYTES[converted_type]))
        if quantizes:
            _quantize(run, converted, file, gguf_type)
    finally:
        if quantizes:
            converted.unlink(missing_ok=True)


def _converted_type(gguf_type: str, stored_type: str) -> str:
    """Return the type that the converter writes: one without loss, if the quantizer writes the final one."""
    if not needs_quantizer(gguf_type):
        return gguf_type
    return stored_type if stored_type in _BYTES else "F32"


def _convert(run: TrainingContext, folder: Path, file: Path, gguf_type: str, size: int) -> None:
    about = run.folder / ".gguf.json"
    # Without these, the converter takes them from the name of the folder.
    name = run.job.base_model.portable_name.rsplit("/", 1)[-1]
    about.write_text(json.dumps({"general.name": name, "general.finetune": run.job.run_id}))
    command = [*_conversion_command(run, folder, file, gguf_type), "--metadata", str(about)]

    def measure(_: str) -> tuple[int, int] | None:
        return (min(file.stat().st_size, size), size) if file.exists() else None

    try:
        ended = run_program(run, _CONVERTER, command, file, Progress(f"converting to {gguf_type}", measure))
    finally:
        about.unlink(missing_ok=True)
    _require_success(ended, file, _CONVERTER)


def _conversion_command(run: TrainingContext, folder: Path, file: Path, gguf_type: str) -> list[str]:
    """Return the command that converts the model in a folder."""
    converter = _require_converter(run)
    # A program that is no Python module is a wrapper of the operator, with packages of its own.
    interpreter = [sys.executable] if converter.suffix == ".py" else []
    return [*interpreter, str(converter), str(folder), "--outfile", str(file), "--outtype", gguf_type.lower()]


def _quantize(run: TrainingContext, source: Path, file: Path, gguf_type: str) -> None:
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    command = [str(_require_quantizer(run)), str(source), str(file), gguf_type, str(threads)]
    ended = run_program(run, _QUANTIZER, command, file, Progress(f"quantizing to {gguf_type}", _last_tensor))
    _require_success(ended, file, _QUANTIZER)


def _last_tensor(lines: str) -> tuple[int, int] | None:
    written = _TENSOR_OF.findall(lines)
    return (int(written[-1][0]), int(written[-1][1])) if written else None


def _require_success(ended: EndedProgram, file: Path, name: str) -> None:
    if ended.status == 0 and file.is_file():
        return
    is_full = classify_error(OSError(ended.reason)).code == "disk_full"
    message = f"{name} could not write `{FILE}`: {ended.reason}"
    raise TrainingFailure("disk_full" if is_full else "config_error", message)


def _count_weights(folder: Path) -> Counter[str]:
    """Return the number of weights in the model of a folder, by the name of their data type."""
    weights: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                weights[part.get_dtype()] += math.prod(part.get_shape())
    return weights
