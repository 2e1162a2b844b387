"""C11: stall of the training loop during a 512 MB checkpoint, Anneal against `save_steps` of the Trainer.

Both train the same Llama of 42.6 million random weights with AdamW on the same tokens, in separate processes that
alternate, and write model and optimizer (512 MB) to the same disk at a fixed interval of steps. The stall is the time
that the loop spends in its save. Afterwards a process is killed while it writes a checkpoint, and another resumes.
"""

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.ratios import Ratio
from tests.worker.training.tiny import make_job, make_tiny_model, parse_records, write_rows
from worker.checkpoint_files.manifest import verify
from worker.wire.journal import read_journal

ROUNDS, STEPS, EVERY = 3, 20, 9
HIDDEN, LAYERS, LENGTH, RATE = 1024, 4, 32, 1e-3
SMALLEST = 500_000_000


def main(scale: float = 1.0) -> bool:
    """Print medians and ratio; return True if Anneal's stall is at least 15 times shorter and the kill test passes."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as place:
        folder = Path(place)
        model = make_tiny_model(folder / "model", hidden=HIDDEN, layers=LAYERS)
        text = " ".join(str(number) for number in range(100))
        rows = write_rows(folder / "rows.jsonl", ({"text": f"{row} {text}"} for row in range(64)))
        timings: dict[str, list[dict[str, list[float]]]] = {"Anneal": [], "Trainer": []}
        for round_ in range(max(round(ROUNDS * scale), 1)):
            for name, rounds in timings.items():
                rounds.append(
                    json.loads(_python(name, folder / f"{name}-{round_}", model, rows).stdout.splitlines()[-1])
                )
        for name, rounds in timings.items():
            for what in ("stalls", "steps", "steps after a save"):
                values = [1e3 * one for times in rounds for one in times[what]]
                print(f"C11 {name:8s} {what:18s} median {statistics.median(values):8.1f} ms  "
                      f"min {min(values):8.1f}  max {max(values):8.1f}  of {len(values)}", flush=True)  # fmt: skip
        pairs = zip(timings["Trainer"], timings["Anneal"], strict=True)
        ratio = Ratio([statistics.median(one["stalls"]) / statistics.median(other["stalls"]) for one, other in pairs])
        print(f"C11 Trainer / Anneal, stall of a save: {ratio}")
        recovers = _recovers(folder, model, rows)
    return ratio.median >= 15 and recovers


def _recovers(folder: Path, model: Path, rows: Path) -> bool:
    """Check that a run whose process is killed during its second checkpoint resumes exactly from the first."""
    killed = _python("killed", folder / "killed", model, rows, code=-signal.SIGKILL)
    reported = [record for record in parse_records(killed.stdout) if record["type"] == "checkpoint"]
    attempt = folder / "killed" / "a1"
    half = [path.name for path in attempt.glob(".checkpoint-*.tmp")]
    (first,) = reported
    wrong = verify(attempt / first["name"], first["manifest_sha256"])
    _python("resumed", folder / "killed", model, rows)
    steps: dict[int, list[str]] = {}
    for line in read_journal(folder / "killed" / "journal.jsonl"):
        if line["event"] == "step":
            steps.setdefault(line["step"], []).append(line["loss_hex"])
    again = [losses for losses in steps.values() if len(losses) == 2]
    exact = bool(again) and all(one == other for one, other in again) and max(steps) == STEPS
    print(f"C11 killed in mid-write: left {half}, step {first['step']} whole: {not wrong}; the next process went on "
          f"from there, {len(again)} steps done twice, the same to the bit: {exact}")  # fmt: skip
    return bool(half) and not wrong and exact


def _python(kind: str, folder: Path, model: Path, rows: Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.c11_checkpoint", kind, str(folder), str(model), str(rows)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode != code:
        raise RuntimeError(done.stderr[-3000:])
    if kind in ("Anneal", "Trainer"):
        shutil.rmtree(folder)
    return done


class _Clock:
    """Measures the time of every save and step of a trainer class."""

    def __init__(self, kind: Any) -> None:
        self.stalls: list[float] = []
        self.steps: list[float] = []
        self.after: list[float] = []
        self._since_save = 99
        save, step = kind._save_checkpoint, kind.training_step

        def timed_save(trainer: Any, *arguments: Any) -> Any:
            began = time.perf_counter()
            save(trainer, *arguments)
            if trainer.state.global_step < trainer.state.max_steps:  # the last save is written before the end
                self.stalls.append(time.perf_counter() - began)
                self._since_save = 0

        def timed_step(trainer: Any, *arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = step(trainer, *arguments, **options)
            took = time.perf_counter() - began
            (self.after if self._since_save < 3 else self.steps).append(took)
            self._since_save += 1
            return result

        kind._save_checkpoint, kind.training_step = timed_save, timed_step

    def reported(self) -> str:
        """Return the seconds as one line of JSON."""
        return json.dumps({"stalls": self.stalls, "steps": self.steps, "steps after a save": self.after})


def _job(folder: Path, model: Path, rows: Path, **more: Any) -> Path:
    job = make_job(
        folder, model, rows, data_format="text", method="full", max_steps=STEPS, batch_size=1, save_steps=EVERY,
        gradient_accumulation_steps=1, learning_rate=RATE, optim="adamw_torch", max_seq_length=LENGTH,
        logging_steps=1, save_total_limit=None, gradient_checkpointing=False, **more,
    )  # fmt: skip
    path = Path(job["attempt_dir"]) / "job.json"
    path.write_text(json.dumps(job))
    return path


def _ours(folder: Path, model: Path, rows: Path) -> None:
    from worker.training.__main__ import main as train
    from worker.training.loop.trainer import ServiceTrainerMixin

    clock = _Clock(ServiceTrainerMixin)
    path = _job(folder, model, rows)
    train([str(path)])
    size = sum(one.stat().st_size for one in (path.parent / f"checkpoint-{EVERY}").iterdir())
    assert size > SMALLEST, size
    print(clock.reported())


def _killed(folder: Path, model: Path, rows: Path) -> None:
    """Trainer that is killed 0.2 s after it starts to write its second optimizer state."""
    import torch

    from worker.training.__main__ import main as train

    save, saves = torch.save, 0

    def dying_save(*arguments: Any, **options: Any) -> None:
        nonlocal saves
        if threading.current_thread().name == "checkpoint":
            saves += 1
            if saves == 2:
                threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()
        save(*arguments, **options)

    torch.save = dying_save
    train([str(_job(folder, model, rows))])


def _resumed(folder: Path, model: Path, rows: Path) -> None:
    from worker.training.__main__ import main as train

    saved = folder / "a1" / f"checkpoint-{EVERY}"
    digest = hashlib.sha256((saved / "manifest.json").read_bytes()).hexdigest()
    resume = {"path": str(saved), "step": EVERY, "manifest_sha256": digest}
    train([str(_job(folder, model, rows, attempt=2, resume_from=resume))])


def _theirs(folder: Path, model: Path, rows: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    clock = _Clock(SFTTrainer)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=1, learning_rate=RATE,
            optim="adamw_torch", max_length=LENGTH, logging_steps=1, save_strategy="steps", save_steps=EVERY,
            report_to="none", use_cpu=True, bf16=False, activation_checkpointing=False, disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"][:LENGTH] for text in texts]}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    size = sum(one.stat().st_size for one in (folder / f"checkpoint-{EVERY}").iterdir())
    assert size > SMALLEST, size
    print(clock.reported())


if __name__ == "__main__":
    lanes = {"Anneal": _ours, "Trainer": _theirs, "killed": _killed, "resumed": _resumed}
    lanes[sys.argv[1]](*map(Path, sys.argv[2:5]))
