"""C10: overhead of an optimizer step: Anneal, TRL and a bare loop, each logging every step.

All three train the same 2-layer Llama with random weights on the same tokens with the same optimizer, in separate
processes that alternate. A step is measured from the end of one step to the end of the next, including logging; the
median of a process is one block. Anneal writes its journal and reports each metric as a run on a worker does.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ratios import Ratio
from tests.worker.training.tiny import make_job, make_tiny_model, write_rows
from worker.wire.journal import read_journal

ROUNDS, STEPS, WARM_UP = 7, 150, 20
BATCH, LENGTH, HIDDEN, RATE = 4, 128, 128, 1e-3


def main(scale: float = 1.0) -> bool:
    """Print medians and ratios; return True if Anneal takes at most 1.1 times as long as TRL."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as place:
        folder = Path(place)
        model = make_tiny_model(folder / "model", hidden=HIDDEN)
        # Long enough that each row fills its sequence, so there is no padding.
        text = " ".join(str(number) for number in range(400))
        rows = write_rows(folder / "rows.jsonl", ({"text": f"{row} {text}"} for row in range(BATCH * 32)))
        lanes = {"Anneal": _ours, "TRL": _theirs, "bare loop": _theirs}
        times: dict[str, list[float]] = {name: [] for name in lanes}
        for round_ in range(max(round(ROUNDS * scale), 1)):
            for name, lane in lanes.items():
                times[name].append(lane(folder / f"{name}-{round_}".replace(" ", "-"), model, rows))
    for name, seconds in times.items():
        ms = sorted(1e3 * one for one in seconds)
        print(f"C10 {name:10s} median {statistics.median(ms):6.2f} ms  min {ms[0]:6.2f}  max {ms[-1]:6.2f}")
    ratios = {
        f"{one} / {other}": Ratio([a / b for a, b in zip(times[one], times[other], strict=True)])
        for one, other in (("Anneal", "TRL"), ("TRL", "bare loop"), ("Anneal", "bare loop"))
    }
    for name, ratio in ratios.items():
        print(f"C10 {name:20s} {ratio}")
    return ratios["Anneal / TRL"].median <= 1.1


def _ours(folder: Path, model: Path, rows: Path) -> float:
    job = make_job(
        folder, model, rows, data_format="text", method="full", max_steps=STEPS, batch_size=BATCH,
        gradient_accumulation_steps=1, learning_rate=RATE, optim="adamw_torch", max_seq_length=LENGTH, logging_steps=1,
        save_steps=10_000,
    )  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    _python("-m", "worker.training", str(folder / "job.json"))
    return _between([line["t"] for line in read_journal(job["journal"]) if line["event"] == "step"])


def _theirs(folder: Path, model: Path, rows: Path) -> float:
    folder.mkdir()
    kind = "bare" if folder.name.startswith("bare") else "trl"
    return _between(json.loads(_python("-m", "benchmarks.c10_step", kind, str(folder), str(model), str(rows))))


def _python(*arguments: str) -> str:
    """Run a separate process and return its last line of output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout.splitlines()[-1]


def _between(ends: list[float]) -> float:
    """Return the median seconds between two step ends, without the first ones."""
    ends = ends[WARM_UP:]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _tokens(model: Path, rows: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    return [tokenizer(text)["input_ids"][:LENGTH] for text in texts]


def _trl(folder: Path, model: Path, rows: Path) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=SFTConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE,
            optim="adamw_torch", max_length=LENGTH, logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, activation_checkpointing=False, disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_dict({"input_ids": _tokens(model, rows)}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return ends


def _bare(folder: Path, model: Path, rows: Path) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    network = AutoModelForCausalLM.from_pretrained(model).train()
    tokens = torch.tensor(_tokens(model, rows))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, STEPS)
    ends: list[float] = []
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(STEPS):
            first = step * BATCH % len(tokens)
            batch = tokens[first : first + BATCH]
            loss = network(input_ids=batch, labels=batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            point = {"step": step, "loss": loss.item(), "grad_norm": norm.item(), "lr": schedule.get_last_lr()[0]}
            file.write(json.dumps(point) + "\n")
            file.flush()
            ends.append(time.monotonic())
    return ends


if __name__ == "__main__":
    print(json.dumps({"trl": _trl, "bare": _bare}[sys.argv[1]](*map(Path, sys.argv[2:5]))))
