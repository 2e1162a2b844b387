"""C8: time from POST /v1/runs to the first optimizer step of a tiny model: warm worker, cold start and `trl sft`.

All three train the same LoRA of the same random 2-layer Llama on the same rows. Anneal is timed from before the request
until the trainer writes its first step to the journal (both on CLOCK_BOOTTIME); TRL from before its process starts to
the first logged step. The three alternate, so that drift of the machine affects them equally.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.stack import Stack
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model
from worker.wire.journal import read_journal

ROUNDS = 7
CONFIG: dict[str, Any] = {
    "base_model": "tiny", "method": "lora", "lora_r": 4, "max_steps": 1, "batch_size": 2,
    "gradient_accumulation_steps": 1, "max_seq_length": 128, "optim": "adamw_torch", "save_steps": 1000,
}  # fmt: skip

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def main(scale: float = 1.0) -> bool:
    """Print medians and ratios; return True if warm is at least five times faster than cold."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        home = Path(folder)
        warm, cold = _Lane(home / "warm", "zygote"), _Lane(home / "cold", "cold")
        try:
            warm.first_step()  # the zygote is ready when its first run has ended
            times: dict[str, list[float]] = {"warm": [], "cold": [], "trl": []}
            for _ in range(max(round(ROUNDS * scale), 1)):
                times["warm"].append(warm.first_step())
                times["cold"].append(cold.first_step())
                times["trl"].append(_trl(warm.model, warm.data))
        finally:
            warm.close()
            cold.close()
    return _print(times)


class _Lane:
    """Service whose worker uses one launch mode."""

    def __init__(self, home: Path, launch: str) -> None:
        self._stack = Stack(home, launch=launch, lease_seconds=60)
        folder = self._stack.settings.models_folder / "tiny"
        self.model = make_tiny_model(folder, hidden=64, chat_template=CHAT_TEMPLATE)
        self.data = make_chat_dataset(home / "data" / "train.jsonl", 64)
        self._dataset = self._stack.upload(self.data.read_bytes(), "train.jsonl")
        self._stack.add_worker()

    def first_step(self) -> float:
        """Return the seconds from the request to the first step of a new run, after the run has ended."""
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        run_id = self._stack.create(config=CONFIG, backend="celery", dataset_id=self._dataset)
        path = self._stack.settings.storage_root / "runs" / run_id / "journal.jsonl"
        eventually(path.exists, timeout=120)
        self._stack.until(run_id, "completed", timeout=120)
        return next(line["t"] for line in read_journal(path) if line["event"] == "step") - began

    def close(self) -> None:
        self._stack.close()


def _trl(model: Path, data: Path) -> float:
    """Return the seconds from the start of TRL's command to its first logged step."""
    command = [
        str(Path(sys.executable).with_name("trl")), "sft", "--model_name_or_path", str(model),
        "--dataset_name", str(data.parent), "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear",
        "--max_steps", "1", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1",
        "--max_length", "128", "--logging_steps", "1", "--use_cpu", "--bf16", "false", "--optim", "adamw_torch",
        "--save_strategy", "no", "--report_to", "none", "--output_dir", str(data.parent.parent / "trl"),
    ]  # fmt: skip
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "'loss'" in line or '"loss"' in line:
                took = time.monotonic() - began
                # Kill the group: `accelerate launch` starts a second Python, which would continue into the next round.
                os.killpg(process.pid, signal.SIGKILL)
                return took
    raise RuntimeError("trl sft did not reach a step:\n" + "".join(said[-20:]))


def _print(times: dict[str, list[float]]) -> bool:
    for name, label in (("warm", "POST, warm worker"), ("cold", "POST, cold start"), ("trl", "trl sft, cold")):
        took = sorted(times[name])
        print(f"C8 {label:18s} median {statistics.median(took):6.2f} s  min {took[0]:6.2f}  max {took[-1]:6.2f}")
    ratios = {
        name: statistics.median(slow / quick for slow, quick in zip(times[name], times["warm"], strict=True))
        for name in ("cold", "trl")
    }
    print(f"C8 warm is {ratios['cold']:.1f} times faster than cold, {ratios['trl']:.1f} times faster than trl sft")
    return ratios["cold"] >= 5
