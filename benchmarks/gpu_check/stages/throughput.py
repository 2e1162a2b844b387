"""Tokens per second and peak memory of Qwen3-8B's shape: Anneal, TRL with its defaults, and TRL with flash attention.

Each participant trains the same rows in a process of its own, one after another, so that the card's temperature and
clock affect all alike. What the goals need comes first: the stage stops when the time of another run is not left.
"""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, estimated_peak_mb, run_job
from benchmarks.gpu_check.models import Shaped, shaped_model
from benchmarks.gpu_check.processes import Call
from tests.worker.training.tiny import make_job
from worker.attempts import auto_repair

WARM_UP = 2
"""Steps before the measured ones: the first ones choose kernels and allocate memory."""
LEAST_BYTES = 22e9
"""Memory for 8.2 billion weights in 16 bits, and a training step."""
_RUN_SECONDS = 75.0
ANNEAL, TRL, TRL_PACKED, TRL_FLASH = "Anneal", "TRL", "TRL, packed", "TRL, flash"


@dataclass(frozen=True)
class Cell:
    """Configuration that every participant measures."""

    method: str
    data: str
    """`short` or `long`: full sequences of 2,048 or 4,096 tokens; `mix`: texts of all lengths up to 2,048."""
    dropout: float

    @property
    def name(self) -> str:
        shape = {"short": "4×2048", "long": "4×4096", "mix": "4×2048 mix"}[self.data]
        return f"{self.method} {shape}, dropout {self.dropout:g}"

    @property
    def participants(self) -> tuple[str, ...]:
        """Texts of one length need no packing."""
        return (ANNEAL, TRL, TRL_PACKED, TRL_FLASH) if self.data == "mix" else (ANNEAL, TRL, TRL_FLASH)


CELLS = (
    Cell("qlora", "long", 0.05),
    Cell("qlora", "mix", 0.05),
    Cell("lora", "long", 0.0),
    Cell("qlora", "long", 0.0),
    *(
        Cell(method, data, dropout)
        for method, data, dropout in itertools.product(("qlora", "lora"), ("short", "mix", "long"), (0.05, 0.0))
        if (method, data, dropout)
        not in {("qlora", "long", 0.05), ("qlora", "mix", 0.05), ("lora", "long", 0.0), ("qlora", "long", 0.0)}
    ),
)
"""All cells, the most important first."""
_GOAL_CELLS, _COMPARED_CELLS = 4, 2
"""Number of cells, from the first, with a goal for the speed, and with one for the speed as a multiple of TRL's."""
TINY_CELLS = (Cell("qlora", "long", 0.05), Cell("qlora", "mix", 0.05), Cell("lora", "short", 0.0))


def row_name(cell: Cell, participant: str) -> str:
    """Return the name of a result."""
    return f"{cell.name}: {participant}"


def run(check: Check) -> None:
    if check.on_gpu and not check.tiny and check.device.memory_bytes < LEAST_BYTES:
        check.record("weights", "skipped", f"needs a GPU with {LEAST_BYTES / 1e9:.0f} GB")
        return
    began = time.monotonic()
    shaped = shaped_model(check)
    check.record("weights", seconds=round(time.monotonic() - began, 1), folder=str(shaped.folder))
    longest = 0.0
    for cell, participant in runs_in_order(TINY_CELLS if check.tiny else CELLS):
        if check.seconds_left < max(longest * 1.2, 10):
            check.record(row_name(cell, participant), "skipped", "no time left: raise `--seconds`")
            continue
        began = time.monotonic()
        if participant == ANNEAL:
            _measure_anneal(check, shaped, cell)
        else:
            _measure_trl(check, shaped, cell, participant)
        longest = max(longest, time.monotonic() - began)


def runs_in_order(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """Return all runs: first those that the goals need, then cell by cell."""
    first = [*((cell, ANNEAL) for cell in cells[:_GOAL_CELLS]), *((cell, TRL) for cell in cells[:_COMPARED_CELLS])]
    every = ((cell, participant) for cell in cells for participant in cell.participants)
    return list(dict.fromkeys([*first, *every]))


def steps_of(cell: Cell, packed: bool) -> int:
    """Return the number of steps: more of the short ones, whose lengths vary."""
    return WARM_UP + (12 if cell.data == "mix" and not packed else 4)


def job_of(check: Check, shaped: Shaped, cell: Cell, stage_steps: int | None = None) -> dict[str, Any]:
    """Return the job of a cell: a step has four rows, and the trainer divides them into micro-batches."""
    packed = {"packing": True} if cell.data == "mix" else {}
    length = shaped.long if cell.data == "long" else shaped.short
    job = make_job(
        check.folder(cell.name.replace("×", "x")), shaped.folder, shaped.texts(cell.data), data_format="text",
        method=cell.method, max_steps=stage_steps or steps_of(cell, bool(packed)), batch_size=4,
        gradient_accumulation_steps=1, max_seq_length=length, lora_dropout=cell.dropout, logging_steps=1,
        save_steps=1000, **packed,
    )  # fmt: skip
    job["user_set_fields"] = sorted({*job["user_set_fields"]} - {"batch_size", "gradient_accumulation_steps"})
    return job


def _measure_anneal(check: Check, shaped: Shaped, cell: Cell) -> None:
    finished = run_job(check, Job(cell.name, job_of(check, shaped, cell), seconds=_seconds(check)))
    name = row_name(cell, ANNEAL)
    if not finished.completed:
        is_too_large = finished.error_code == auto_repair.OUT_OF_MEMORY
        check.record(name, "skipped" if is_too_large else "failed", finished.problem[:400])
        return
    length = shaped.long if cell.data == "long" else shaped.short
    estimate, peak = estimated_peak_mb(finished, length), finished.peak_mb
    check.record(
        name, **finished.speed(WARM_UP), peak_mb=peak, estimate_mb=estimate,
        estimate_by_peak=round(estimate / peak, 3) if peak and check.on_gpu else None, in_effect=finished.in_effect,
        replaced=finished.replaced, seconds=round(finished.ended.seconds, 1), plan=_plan(finished.facts),
    )  # fmt: skip


def _plan(facts: dict[str, Any]) -> dict[str, str]:
    """Return the seconds and the peak of each pass that the plan was chosen from, by rows and recomputed layers."""
    passes = facts.get("step_plan", {}).get("passes", ())
    return {
        f"{each['rows']} × {each['recomputed']}": f"{each['seconds']:.3f} s, {(each['peak_bytes'] or 0) >> 20} MiB"
        for each in passes
    }


def _measure_trl(check: Check, shaped: Shaped, cell: Cell, participant: str) -> None:
    name, flash = row_name(cell, participant), participant == TRL_FLASH
    missing = _missing_flash_attention(check)
    if flash and missing:
        check.record(name, "skipped", f"{missing}, and TRL has no other attention of variable length")
        return
    folder = check.folder(name.replace("×", "x").replace(":", ""))
    packed = participant != TRL and cell.data == "mix"
    options = {
        "four_bit": cell.method == "qlora", "dropout": cell.dropout, "steps": steps_of(cell, packed),
        "warm_up": WARM_UP, "batch_size": 4, "packing": packed, "flash": flash,
        "length": shaped.long if cell.data == "long" else shaped.short,
    }  # fmt: skip
    arguments = (str(shaped.folder), str(shaped.texts(cell.data)), str(folder), options)
    end = processes.run(Call(_plain_speed, folder, arguments, _seconds(check)))
    if end.code != 0:
        problem = "no end in time" if end.code is None else (folder / "stderr").read_text()[-400:]
        check.record(name, "skipped" if "out of memory" in problem.lower() else "failed", problem)
        return
    measured = json.loads((folder / "result.json").read_text())
    check.record(name, **measured, seconds=round(end.seconds, 1))


def _seconds(check: Check) -> float:
    """Return the time limit of a run, which ends before that of the stage."""
    return max(min(_RUN_SECONDS if check.on_gpu else 4 * _RUN_SECONDS, check.seconds_left - 2), 1)


def _plain_speed(*arguments: Any) -> None:
    from benchmarks.gpu_check import plain_trl  # imports torch, which this process must not

    plain_trl.speed(*arguments)


def _missing_flash_attention(check: Check) -> str | None:
    """Return the reason why TRL cannot use flash attention here; None if it can."""
    if not check.on_gpu:
        return "needs a GPU"
    return None if find_spec("flash_attn") else "flash-attn is not installed"
