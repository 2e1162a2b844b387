"""The resume matrix: each method, with each adapter, interrupted at each kind of place, in each difficulty.

`make resume-matrix` runs all of it and prints the table, `make resume-matrix ARGS=dpo` the cells of these objectives,
`ARGS=devices` those on two devices; the suite runs a part.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anneal.contracts.methods import METHODS
from tests.worker.training.output.outputs import figures, weights
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_prompts,
    make_rated,
    make_tiny_model,
)
from tests.worker.training.two_ranks import TwoRanks

STEPS = 6
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"lora_r": None},
    "lora": {"load_in_4bit": False, "lora_r": 4},
    "qlora": {"lora_r": 4},
    "8bit": {"load_in_8bit": True, "lora_r": 4},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"method": "sft"},
    "dpo": {"method": "dpo"},
    "kto": {"method": "kto"},
    "orpo": {"method": "orpo"},
    "simpo": {"method": "simpo"},
    "reward": {"method": "reward"},
    "gkd": {"method": "gkd"},
    "grpo": {"method": "rlhf", "algorithm": "grpo", "beta": 0.05},
    "rloo": {"method": "rlhf", "algorithm": "rloo", "beta": 0.05},
}
DIFFICULTIES = ("remainder", "dropout", "packing", "evaluation", "epochs")
"""A last step of an epoch with fewer micro-batches than the others (rounds of `rlhf` are always whole, there rows are
left over); dropout in adapter and attention; several rows in a sequence (supervised methods only); an evaluation after
every second step, which for `rlhf` draws random numbers; an evaluation after every epoch, and a sample after every
step."""
PLACES = ("first step", "mid-epoch", "epoch end", "second epoch", "last step")


@dataclass(frozen=True)
class Cell:
    """A row of the matrix: what is trained, and what makes it difficult."""

    objective: str
    adapter: str
    difficulty: str
    devices: str = "one"
    """`one` device, `two`, or two that `share` the model."""

    def __str__(self) -> str:
        devices = "" if self.devices == "one" else f"-{self.devices}"
        return f"{self.objective}-{self.adapter}-{self.difficulty}{devices}"

    @property
    def can_be_shared(self) -> bool:
        """True if the model of the run can be divided."""
        is_whole = self.objective in ("gkd", "grpo", "rloo") or (self.objective == "reward" and self.adapter != "full")
        return not is_whole and self.adapter != "8bit" and (self.objective == "sft" or self.adapter != "full")


def cells() -> Iterator[Cell]:
    """All rows of the matrix."""
    for objective in OBJECTIVES:
        for adapter in ADAPTERS:
            for difficulty in DIFFICULTIES:
                if difficulty != "packing" or objective == "sft":
                    yield Cell(objective, adapter, difficulty)
    for objective in OBJECTIVES:
        for adapter in ADAPTERS:
            for difficulty in ("remainder", "dropout"):
                for devices in ("two", "share"):
                    cell = Cell(objective, adapter, difficulty, devices)
                    if devices == "two" or cell.can_be_shared:
                        yield cell


class Lab:
    """Models and data of the matrix, and a warm process to run on them."""

    def __init__(self, folder: Path, forks: Forks, two_ranks: TwoRanks | None = None) -> None:
        """Make models and data; cells on two devices need `two_ranks`."""
        self.folder, self.forks, self.two_ranks = folder, forks, two_ranks
        self._models = {rate: make_tiny_model(folder / f"model-{rate}", layers=2, dropout=rate) for rate in (0.0, 0.1)}
        self._teacher = make_tiny_model(folder / "teacher", layers=1)
        self._data = {
            "chat": make_chat_dataset(folder / "chats.jsonl", 20),
            "packed": make_chat_dataset(folder / "many.jsonl", 44),
            "preference": make_pairs(folder / "pairs.jsonl", 20),
            "rated": make_rated(folder / "rated.jsonl", 20),
            "more rated": make_rated(folder / "more.jsonl", 40),
            "prompt": make_prompts(folder / "prompts.jsonl", 9),
        }

    def undisturbed(self, cell: Cell) -> Outcome:
        """The run of a cell, with a checkpoint after every step."""
        return self._run(cell, self.folder / str(cell) / "whole", 1, None)

    def resumed(self, cell: Cell, original: Outcome, step: int) -> Outcome:
        """A fresh process that goes on from the checkpoint of `step`."""
        folder = self.folder / str(cell) / f"from-{step}"
        return self._run(cell, folder, 2, original.checkpoint(step))

    def places(self, original: Outcome) -> dict[str, int]:
        """At which steps a run is interrupted."""
        facts = original.of("config")[0]["facts"]
        end = max(step for step in range(1, STEPS) if _epoch(original, step) <= 1.0)
        assert 2 < end < STEPS - 1, (end, facts["sequences"])
        return {"first step": 1, "mid-epoch": 2, "epoch end": end, "second epoch": end + 1, "last step": STEPS}

    def differences(self, original: Outcome, again: Outcome, step: int) -> list[str]:
        """What is not exactly as in the undisturbed run, in words."""
        if again.code != 0 or again.result["outcome"] != "completed":
            return [f"did not complete: {again.result['error'] or again.stderr[-500:]}"]
        expected = {n: reported for n, reported in original.steps.items() if n > step}
        differences = []
        if [reported[0] for reported in again.steps.values()] != [reported[0] for reported in expected.values()]:
            differences.append("losses")
        if [reported[1] for reported in again.steps.values()] != [reported[1] for reported in expected.values()]:
            differences.append("sample ids")
        if weights(again) != weights(original):
            differences.append("weights")
        if figures(again) != figures(original):
            differences.append("metrics")
        facts = again.of("config")[0]["facts"]
        if facts["fidelity"] != "exact":
            differences.append(f"calls itself {facts['fidelity']}: {'; '.join(facts['fidelity_reasons'])}")
        elif (difference := facts.get("fidelity_difference")) != (0.0 if step == STEPS else None):
            differences.append(f"a pinned text differs by {difference}")
        return differences

    def _run(self, cell: Cell, folder: Path, attempt: int, resume_from: dict[str, Any] | None) -> Outcome:
        has_dropout, is_packed = cell.difficulty == "dropout", cell.difficulty == "packing"
        objective = dict(OBJECTIVES[cell.objective])
        config: dict[str, Any] = {
            "method": objective.pop("method"), "max_steps": STEPS, "save_steps": 1, "save_total_limit": None,
            "logging_steps": 2, "learning_rate": 1e-2, "optim": "adamw_torch_fused", "max_seq_length": 128,
            "batch_size": 2, "gradient_accumulation_steps": 3, "export": "last", **ADAPTERS[cell.adapter],
        }  # fmt: skip
        kind = METHODS[config["method"]].formats[0]
        if config["method"] == "rlhf":
            config |= {"batch_size": 4, "gradient_accumulation_steps": 2}
            length = {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30}
            config["rlhf"] = {**objective, "num_generations": 4, "max_completion_length": 8, "rewards": [length]}
        if config["method"] == "gkd":
            config["gkd"] = {"teacher": "teacher", "max_completion_length": 8, "seq_kd": cell.difficulty == "epochs"}
        compares_rows = cell.objective == "kto"  # so that no device can have a single one
        if cell.devices != "one" and not compares_rows:
            config["batch_size"] //= 2
        if has_dropout and cell.adapter != "full":
            config["lora_dropout"] = 0.1
        if is_packed:
            config["packing"] = True
        if cell.difficulty == "evaluation":
            config |= {"eval_split": 0.2, "eval_steps": 2}
        if cell.difficulty == "epochs":
            config |= {"eval_split": 0.2, "eval_steps": "epoch"}
            if config["method"] != "reward":
                config |= {"sample_steps": 1, "sample_prompts": ["what is row 3"], "sample_max_new_tokens": 4}
        data = self._data["packed" if is_packed else kind]
        if cell.devices != "one" and compares_rows:
            data = self._data["more rated"]
        model = self._models[0.1 if has_dropout else 0.0]
        job = make_job(folder, model, data, data_format=kind, attempt=attempt, resume_from=resume_from, **config)
        job.setdefault("reward_models", [])
        if config["method"] == "gkd":
            job["teacher"] = {"name": "teacher", "path": str(self._teacher), "hub": None, "revision": None}
        if cell.devices == "one":
            return self.forks.run(job)
        assert self.two_ranks is not None
        return self.two_ranks.run(job | {"sharded": cell.devices == "share"})


def _epoch(outcome: Outcome, step: int) -> float:
    (record,) = (record for record in outcome.of("checkpoint") if record["step"] == step)
    return float(record["epoch"])


def _row(cell: Cell) -> str:
    return f"| {cell.objective} | {cell.adapter} | {cell.difficulty} | {cell.devices} |"


def main() -> int:
    """Run the matrix and print it; the exit code is 1 where a cell is neither exact nor says why not."""
    arguments = sys.argv[1:]
    chosen = [
        cell
        for cell in cells()
        if not arguments or cell.objective in arguments or ("devices" in arguments and cell.devices != "one")
    ]
    wrong = approximate = 0
    print("| objective | adapter | difficulty | devices | " + " | ".join(PLACES) + " |")
    print("|---|---|---|---|" + "---|" * len(PLACES))
    with tempfile.TemporaryDirectory() as folder:
        forks = Forks()
        other = forks.another()
        lab = Lab(Path(folder), forks, TwoRanks(forks, other))
        for cell in chosen:
            whole = lab.undisturbed(cell)
            if whole.result["outcome"] != "completed":
                print(f"{_row(cell)} {whole.result['error']} |")
                wrong += 1
                continue
            reported = []
            for place, step in lab.places(whole).items():
                differences = lab.differences(whole, lab.resumed(cell, whole, step), step)
                assert place in PLACES
                reasons = [what for what in differences if what.startswith("calls itself")]
                wrong += bool(differences) and not reasons
                approximate += bool(reasons)
                reported.append("exact" if not differences else ", ".join(differences))
            print(f"{_row(cell)} " + " | ".join(reported) + " |", flush=True)
        other.close()
        forks.close()
    count = len(chosen) * len(PLACES)
    print(
        f"\n{count} cells: {count - wrong - approximate} exact, {approximate} approximate with a reason, {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
