"""Time from the launch of a training process to its first step: forked from the zygote, and cold."""

import statistics
import time
from pathlib import Path

from app.config import Settings
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.models import small_model
from tests.worker.training.tiny import make_chat_dataset, make_job, parse_records, write_job
from worker.process.launcher import Launcher
from worker.wire.journal import read_journal

_READY_SECONDS = 120.0
_RUN_SECONDS = 90.0
_MOST_TEXT = 300
"""Characters of the output of a run that failed."""


def run(check: Check) -> None:
    model, data = small_model(check), make_chat_dataset(check.work / "chats.jsonl", 64)
    warm = Launcher(Settings(home=check.folder("warm"), launch="auto"))
    cold = Launcher(Settings(home=check.folder("cold"), launch="cold"))
    try:
        began = time.monotonic()
        warm.start()
        cold.start()
        warm.wait_ready(_READY_SECONDS)
        seconds = round(time.monotonic() - began, 2)
        if warm.mode == "cold":
            check.record("zygote", "failed", warm.reason, seconds=seconds)
            return
        check.record("zygote", "failed" if warm.broken else "ok", str(warm.broken or ""), seconds=seconds)
        times: dict[str, list[float]] = {"warm": [], "cold": []}
        for number, (name, launcher) in enumerate((("warm", warm), ("cold", cold), ("warm", warm))):
            first_step, phases = _first_step(check, launcher, check.folder(f"{name}-{number}"), model, data)
            times[name].append(first_step)
            check.record(f"{name} launch {number + 1}", phases=phases, first_step=round(first_step, 2))
        medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
        ratio = round(medians["cold"] / medians["warm"], 1)
        check.record("first step", warm_seconds=medians["warm"], cold_seconds=medians["cold"], cold_by_warm=ratio)
    finally:
        warm.stop()
        cold.stop()


def _first_step(
    check: Check, launcher: Launcher, folder: Path, model: Path, data: Path
) -> tuple[float, dict[str, float]]:
    """Return the seconds from a launch to the first step of the run, and to each of its phases, after it has ended."""
    job = make_job(
        folder, model, data, method="lora", max_steps=1, batch_size=2, gradient_accumulation_steps=1,
        max_seq_length=128, save_steps=1000,
    )  # fmt: skip
    job["device"] = check.job_device
    path, began, began_at = write_job(job), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    process = launcher.launch("worker.training.__main__:main", path, [check.device.for_job()])
    deadline = time.monotonic() + _RUN_SECONDS
    output: list[tuple[str, bytes]] = []
    try:
        while process.poll() is None and time.monotonic() < deadline:
            process.wait(0.2)
            output += process.channel.receive(0)
        process.kill()
        output += process.channel.drain()
    finally:
        end = process.close()
    steps = [line["t"] for line in read_journal(job["journal"]) if line["event"] == "step"]
    if not steps:
        text = b"".join(piece for _, piece in output).decode(errors="replace")
        raise RuntimeError(f"a {process.launched} start made no step and ended with {end}: {text[-_MOST_TEXT:]}")
    reported = b"\n".join(piece for source, piece in output if source == "report")
    records = parse_records(reported.decode(errors="replace"))
    phases = [record for record in records if record["type"] in ("phase", "config")]
    return float(steps[0] - began), {
        f"{number} {phase.get('name', phase['type'])}": round(phase["ts"] - began_at, 2)
        for number, phase in enumerate(phases)
    }
