"""`make methods`: table of every method with every adapter on a small model trained on local texts.

A model of 1.4 million parameters is trained from scratch on code with docstrings. Each method then has to improve a
metric on held-out data: a lower loss, a preference accuracy above chance, or a higher reward. The exit code is 1 if one
does not. `make methods ARGS=dpo` makes the rows of these methods only.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.base_models.tiny_model import train_tokenizer, write_model
from app.cli.demo.docstrings import Documented, Split, encode_jsonl, read_split

MAX_TOKENS = 256

BASE: dict[str, Any] = {
    "method": "full", "max_steps": 400, "batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 4e-3,
    "packing": True, "max_seq_length": MAX_TOKENS, "optim": "adamw_torch",
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {"full": {"lora_r": None}, "lora": {"load_in_4bit": False}, "qlora": {}}
SEEDS = (1, 2, 3)
STANDARD_ERRORS = 3.0
"""Standard errors by which a metric has to improve to rule out chance."""

_PAIRS, _HELD_OUT_PAIRS = 1200, 200
_PROMPTS, _HELD_OUT_PROMPTS = 320, 32
_SUPERVISED: dict[str, Any] = {
    "max_steps": 100, "batch_size": 8, "gradient_accumulation_steps": 1, "loss_on": "assistant", "eval_steps": 100,
}  # fmt: skip
_RATES = {"full": 5e-4, "lora": 3e-3, "qlora": 3e-3}
_PREFERENCE: dict[str, Any] = {
    "max_steps": 120, "batch_size": 8, "gradient_accumulation_steps": 1, "eval_steps": 120, "learning_rate": 1e-3,
}  # fmt: skip
_RLHF: dict[str, Any] = {
    "max_steps": 30, "batch_size": 16, "gradient_accumulation_steps": 1, "eval_steps": 30, "learning_rate": 2e-3,
}  # fmt: skip
_TASK = {"type": "length", "min": 1, "max": 12, "unit": "tokens", "slack": 24}
"""Verifiable reward; the base model does not satisfy it, because it generates longer texts."""


@dataclass(frozen=True)
class Row:
    """Result of a method with an adapter."""

    method: str
    adapter: str
    measure: str
    start: float
    end: float
    better_by: float
    """Improvement in standard errors; infinite if the metric has none."""
    steps_per_second: float
    loads: bool

    @property
    def holds(self) -> bool:
        """True if the metric improved and the output loads."""
        return self.better_by > STANDARD_ERRORS and self.loads


def main() -> int:
    chosen = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = read_split()
        began = time.monotonic()
        base = _pretrained(folder, rows)
        print(f"A base of 1.4 million parameters in {time.monotonic() - began:.0f} s.\n", flush=True)
        print("| method | adapter | held out | start | end | better by | steps/s | loads |")
        print("|---|---|---|---|---|---|---|---|")
        wrong = 0
        for row in _table(folder, base, rows, chosen):
            wrong += not row.holds
            by = "-" if math.isinf(row.better_by) else f"{row.better_by:.1f} s.e."
            print(
                f"| {row.method} | {row.adapter} | {row.measure} | {row.start:.3f} | {row.end:.3f} | {by} | "
                f"{row.steps_per_second:.1f} | {'yes' if row.loads else 'NO'} |",
                flush=True,
            )
    print(f"\n{wrong} rows did not improve or do not load." if wrong else "\nAll rows improved.")
    return 1 if wrong else 0


def _table(folder: Path, base: Path, rows: Split, chosen: set[str]) -> Iterator[Row]:
    """Yield the rows of the table, or only those of the `chosen` methods; runs one per core at the same time."""
    calls = [call for name, call in _calls(folder, base, rows) if not chosen or name in chosen]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda call: call(), calls)


def _calls(folder: Path, base: Path, rows: Split) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield each method, and the call that makes a row for it."""
    chats = _write(folder / "chats.jsonl", (one.chat for one in rows.training))
    held_out = _write(folder / "held-out.jsonl", (one.chat for one in rows.held_out))
    for method in ("full", "lora", "qlora"):
        yield method, partial(_supervised, folder, base, method, chats, held_out)
    pairs = _write(folder / "pairs.jsonl", _pairs(rows.training[:_PAIRS]))
    held_pairs = _write(folder / "held-out-pairs.jsonl", _pairs(rows.held_out[:_HELD_OUT_PAIRS]))
    for method in ("dpo", "orpo", "simpo", "reward"):
        for adapter in ADAPTERS:
            yield method, partial(_preference, folder, base, method, adapter, pairs, held_pairs)
    rated = _write(folder / "rated.jsonl", _rated(rows.training[:_PAIRS]))
    held_rated = _write(folder / "held-out-rated.jsonl", _rated(rows.held_out[:_HELD_OUT_PAIRS]))
    for adapter in ADAPTERS:
        yield "kto", partial(_desirable, folder, base, adapter, rated, held_rated)
    for adapter in ADAPTERS:
        yield "gkd", partial(_distilled, folder, base, adapter, chats, held_out)
    prompts = _write(folder / "prompts.jsonl", ({"prompt": one.prompt} for one in rows.training[:_PROMPTS]))
    held_prompts = _write(
        folder / "held-out-prompts.jsonl", ({"prompt": one.prompt} for one in rows.held_out[:_HELD_OUT_PROMPTS])
    )
    for algorithm in ("grpo", "rloo"):
        for adapter in ADAPTERS:
            yield "rlhf", partial(_rewarded, folder, base, algorithm, adapter, prompts, held_prompts)


def _pretrained(folder: Path, rows: Split) -> Path:
    """Train a base model on code with docstrings, without any instructions."""
    model = folder / "architecture"
    write_model(model, train_tokenizer(row.text["text"] for row in rows.training), MAX_TOKENS)
    path = _write(folder / "texts.jsonl", (one.text for one in rows.training))
    return _run(folder / "base", model, path, "text", **BASE).output


def _supervised(folder: Path, base: Path, method: str, chats: Path, held_out: Path) -> Row:
    done = _run(
        folder / method, base, chats, "chat", held_out, method=method, learning_rate=_RATES[method], **_SUPERVISED
    )
    start, end = (one["eval_loss"] for one in done.evaluations)
    return Row(method, method, "loss", start, end, math.inf if end < start else 0.0, done.speed, done.loads())


def _preference(folder: Path, base: Path, method: str, adapter: str, pairs: Path, held_out: Path) -> Row:
    config = _PREFERENCE | ADAPTERS[adapter] | {"method": method}
    done = _run(folder / f"{method}-{adapter}", base, pairs, "preference", held_out, **config)
    start, end = done.evaluations[0], done.evaluations[-1]
    accuracy = end["eval_preference_accuracy"]
    # Compared with chance, an accuracy of 0.5.
    better_by = (accuracy - 0.5) / math.sqrt(0.25 / _HELD_OUT_PAIRS)
    first = start["eval_preference_accuracy"] if method == "reward" else 0.5
    return Row(method, adapter, "accuracy", first, accuracy, better_by, done.speed, done.loads())


def _desirable(folder: Path, base: Path, adapter: str, rated: Path, held_out: Path) -> Row:
    config = _PREFERENCE | ADAPTERS[adapter] | {"method": "kto"}
    done = _run(folder / f"kto-{adapter}", base, rated, "rated", held_out, **config)
    start, end = (one["eval_loss"] for one in done.evaluations)
    return Row("kto", adapter, "loss", start, end, math.inf if end < start else 0.0, done.speed, done.loads())


def _distilled(folder: Path, base: Path, adapter: str, chats: Path, held_out: Path) -> Row:
    """Let the base learn from a model that was fine-tuned, of which it sees no answers but its own."""
    place = folder / f"gkd-{adapter}"
    teacher = _run(
        place / "teacher", base, chats, "chat", held_out, method="full", learning_rate=_RATES["full"], **_SUPERVISED
    )
    gkd = {"teacher": "teacher", "lmbda": 1.0, "max_completion_length": 40}
    config = _PREFERENCE | ADAPTERS[adapter] | {"method": "gkd", "gkd": gkd}
    done = _run(place / "student", base, chats, "chat", held_out, teacher=teacher.output, **config)
    start, end = done.evaluations[0]["eval_loss"], done.evaluations[-1]["eval_loss"]
    return Row("gkd", adapter, "loss", start, end, math.inf if end < start else 0.0, done.speed, done.loads())


def _rewarded(folder: Path, base: Path, algorithm: str, adapter: str, prompts: Path, held_out: Path) -> Row:
    rlhf = {"algorithm": algorithm, "num_generations": 8, "max_completion_length": 40, "rewards": [_TASK]}
    config = _RLHF | ADAPTERS[adapter] | {"method": "rlhf", "rlhf": rlhf}
    rows = [
        _run(folder / f"{algorithm}-{adapter}-{seed}", base, prompts, "prompt", held_out, seed=seed, **config)
        for seed in SEEDS
    ]
    starts, ends = ([done.evaluations[at]["eval_reward"] for done in rows] for at in (0, -1))
    gains = [end - start for start, end in zip(starts, ends, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return Row(
        f"rlhf ({algorithm})", adapter, "reward", statistics.mean(starts), statistics.mean(ends),
        statistics.mean(gains) / error, statistics.mean(done.speed for done in rows), rows[-1].loads(),
    )  # fmt: skip


@dataclass(frozen=True)
class Done:
    """Completed run."""

    output: Path
    evaluations: list[dict[str, float]]
    speed: float
    """Steps per second."""

    def loads(self) -> bool:
        """Return True if transformers or peft loads the output and returns finite logits, without our code."""
        program = (self.output / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
        asks = "\nout = model(**tokenizer('def f():', return_tensors='pt')).logits\nassert out.isfinite().all()\n"
        done = subprocess.run(
            [sys.executable, "-I", "-c", program + asks], capture_output=True, cwd=self.output, check=False
        )
        return done.returncode == 0


def _run(
    folder: Path,
    model: Path,
    path: Path,
    form: str,
    held_out: Path | None = None,
    teacher: Path | None = None,
    **config: Any,
) -> Done:
    """Train from a job file, as a worker does."""
    output = folder / "a1"
    output.mkdir(parents=True)
    common: dict[str, Any] = {"base_model": "base", "logging_steps": 10, "save_steps": 1000, "optim": "adamw_torch"}
    config = common | {"max_seq_length": MAX_TOKENS} | config
    if held_out is not None:
        config["extra"] = {"eval_on_start": True, "eval_batch_size": 16}
    job = {
        "run_id": "run_table", "attempt": 1, "backend": "celery", "config": config, "user_set_fields": list(config),
        "dataset": {"id": "ds", "path": str(path), "format": form, "rows": None, "sha256": None},
        "eval_dataset": held_out and {"id": "ds", "path": str(held_out), "format": form, "rows": None, "sha256": None},
        "base_model": {"name": "base", "path": str(model), "hub": None, "revision": None}, "reward_models": [],
        "teacher": teacher and {"name": "teacher", "path": str(teacher), "hub": None, "revision": None},
        "attempt_dir": str(output), "resume_from": None, "journal": str(folder / "journal.jsonl"),
        "device": {"kind": "cpu", "index": 0, "id": "cpu"}, "trust_remote_code": False, "hub_allowed": False,
        "worker": {"id": "wrk_table", "host": "here"},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "worker.training", str(folder / "job.json")],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"type"')]
    if done.returncode != 0:
        raise SystemExit(f"{folder.name}: {records[-1].get('error')}\n{done.stderr[-3000:]}")
    metrics = [record for record in records if record["type"] == "metric"]
    seconds = sum(record["extra"]["step_seconds"] for record in metrics)
    evaluations = [record["metrics"] for record in records if record["type"] == "eval"]
    return Done(output / records[-1]["output"], evaluations, config["max_steps"] / seconds)


def _pairs(rows: list[Documented]) -> Iterator[dict[str, Any]]:
    """Build preferences: the code's own docstring is chosen, the truncated one of other code is rejected."""
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        answers = {"chosen": row.docstring, "rejected": other.docstring[: len(other.docstring) // 2]}
        yield {
            "prompt": row.prompt,
            **{name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()},
        }


def _rated(rows: list[Documented]) -> Iterator[dict[str, Any]]:
    """Build rated answers: of every second pair the chosen answer, of the others the rejected one."""
    for at, pair in enumerate(_pairs(rows)):
        label = at % 2 == 0
        yield {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_bytes(encode_jsonl(rows))
    return path


if __name__ == "__main__":
    sys.exit(main())
