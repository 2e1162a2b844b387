"""A step that goes wrong changes no weight, names its rows, and the next attempt passes over it if that is wanted."""

import json
import math
import random
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.tiny import Forks, Outcome, make_job, make_tiny_model, write_rows
from worker.checkpoint_files.manifest import verify
from worker.training.loop.anomalies import Anomaly, AnomalyGuard
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.run_state import RunState

POISON = "§§§§"
ROW = 21
LATE = 59
"""A row that comes after more than thirty of forty steps, with the seed that is used here."""
STEPS = 24
CONFIG: dict[str, Any] = {
    "method": "full", "max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2, "max_seq_length": 64,
    "logging_steps": 1, "save_steps": 4, "optim": "adamw_torch", "learning_rate": 3e-3, "save_total_limit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short texts, of which one holds signs that no other one has."""
    texts = [f"row {row} is like every other row" for row in range(40)]
    texts[ROW] += POISON
    return write_rows(tmp_path_factory.mktemp("poison") / "rows.jsonl", ({"text": text} for text in texts))


@pytest.fixture(scope="module")
def leaping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that are soon learnt, and one like none of them."""
    texts = [f"row {row} is like every other row" for row in range(160)]
    texts[LATE] = "".join(random.Random(3).choices(string.ascii_letters + string.digits, k=70))
    return write_rows(tmp_path_factory.mktemp("leap") / "rows.jsonl", ({"text": text} for text in texts))


@pytest.fixture(scope="module")
def tainted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers those signs with gradients that are no numbers, though its weights are: they overflow."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tainted")
    ids = AutoTokenizer.from_pretrained(folder)(POISON, add_special_tokens=False)["input_ids"]
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ids] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def found_at(done: Outcome, row: int = ROW) -> int:
    """The step that failed: the one that holds the row."""
    assert done.result["outcome"] == "failed", done.result
    repair = done.result["repair"]
    assert row in repair["rows"], repair
    return int(repair["step"])


def again(job: dict[str, Any], done: Outcome, *, resume: bool = True) -> dict[str, Any]:
    """The job of the next attempt, as the supervisor makes it."""
    steps = [record["step"] for record in done.of("checkpoint")]
    folder = Path(job["attempt_dir"]).parent / f"a{job['attempt'] + 1}"
    folder.mkdir()
    repair = {**done.result["repair"], "reason": "a bad step"}
    return {
        **job, "attempt": job["attempt"] + 1, "attempt_dir": str(folder),
        "resume_from": done.checkpoint(max(steps)) if resume and steps else None,
        "auto_repairs": [*job.get("auto_repairs", ()), repair],
    }  # fmt: skip


class TestRewind:
    @pytest.mark.parametrize("adapter", ["full", pytest.param("lora", marks=pytest.mark.full)])
    def test_goes_past_a_step_without_numbers_and_names_its_row(
        self, forks: Forks, tmp_path: Path, tainted_model: Path, poisoned: Path, adapter: str
    ) -> None:
        config = CONFIG | {"method": adapter, "on_non_finite": "rewind"}
        job = make_job(tmp_path, tainted_model, poisoned, data_format="text", **config)
        first = forks.run(job)
        step = found_at(first)
        assert first.result["error"]["code"] == "non_finite_loss"
        assert first.result["repair"]["singled_out"] == [ROW]
        assert f"row {ROW} of the dataset" in first.result["error"]["message"]
        assert first.result["error"]["details"]["singled_out"] == [ROW]

        job = again(job, first)
        second = forks.run(job)
        assert second.result["outcome"] == "completed", second.result
        # Ten steps make up a pass, so the row comes in later ones too, at steps that nobody had to fall at first.
        taught = {number: rows for number, (_, rows) in second.steps.items()}
        assert step not in taught and all(ROW not in rows for rows in taught.values())
        lines = [json.loads(line) for line in Path(job["journal"]).read_text().splitlines()]
        passed = [line for line in lines if line["event"] == "skip_step"]
        assert passed[0]["step"] == step and len(passed) >= 2
        assert all(ROW in line["samples"] for line in passed)
        assert {*taught, *(line["step"] for line in passed)} == set(range(min(taught), STEPS + 1))
        assert all(math.isfinite(float.fromhex(loss)) for loss, _ in second.steps.values())

        # And it is the same whether the attempt begins at a checkpoint or at the start.
        job = again(job | {"attempt": 2, "auto_repairs": []}, first, resume=False) | {
            "journal": str(tmp_path / "other.jsonl")
        }
        whole = forks.run(job)
        assert {number: whole.steps[number] for number in second.steps} == second.steps

    def test_a_checkpoint_that_is_being_written_then_gets_whole_and_is_gone_back_to(
        self, forks: Forks, tmp_path: Path, tainted_model: Path, poisoned: Path
    ) -> None:
        config = CONFIG | {"on_non_finite": "rewind", "save_steps": 1}
        first = forks.run(
            make_job(tmp_path, tainted_model, poisoned, data_format="text", **config), disk=json.dumps({"slow": 0.3})
        )
        saved = [record["step"] for record in first.of("checkpoint")]
        assert saved[-1] == found_at(first) - 1
        folder = first.folder / f"checkpoint-{saved[-1]}"
        assert verify(folder, first.of("checkpoint")[-1]["manifest_sha256"]) == []

    def test_run_resumed_from_its_checkpoint_skips_the_row_too(
        self, forks: Forks, tmp_path: Path, tainted_model: Path, poisoned: Path
    ) -> None:
        config = CONFIG | {"on_non_finite": "rewind", "max_steps": 12}
        job = make_job(tmp_path, tainted_model, poisoned, data_format="text", **config)
        first = forks.run(job)
        second = forks.run(again(job, first))
        child = make_job(
            tmp_path / "child", tainted_model, poisoned, data_format="text", run_id="run_child",
            resume_from=second.checkpoint(12), **{**config, "max_steps": STEPS},
        )  # fmt: skip
        done = forks.run(child)
        assert done.result["outcome"] == "completed", done.result
        assert done.steps and all(ROW not in rows for _, rows in done.steps.values())

    def test_goes_past_a_spike_of_the_loss_and_names_its_row(
        self, forks: Forks, tmp_path: Path, tiny_model: Path, leaping: Path
    ) -> None:
        config = CONFIG | {"on_spike": "rewind", "seed": 5, "max_steps": 40}
        job = make_job(tmp_path, tiny_model, leaping, data_format="text", **config)
        job["auto_repairs"] = []
        first = forks.run(job)
        step = found_at(first, LATE)
        assert first.result["error"]["code"] == "loss_spike" and step > 16
        assert first.result["repair"]["singled_out"] == [LATE]
        second = forks.run(again(job, first))
        assert second.result["outcome"] == "completed", second.result
        assert all(LATE not in rows for _, rows in second.steps.values())

    @pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.full)])
    def test_a_round_that_is_skipped_is_neither_written_nor_learned_and_a_resume_is_exact(
        self, forks: Forks, tmp_path: Path, tiny_model: Path, algorithm: str
    ) -> None:
        rows = [{"prompt": f"what is row {row}\n"} for row in range(12)]
        data = write_rows(tmp_path / "prompts.jsonl", rows)
        reward = {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30}
        config = {
            **CONFIG, "method": "rlhf", "lora_r": None, "max_steps": 8, "save_steps": 4, "batch_size": 4,
            "rlhf": {"algorithm": algorithm, "num_generations": 4, "max_completion_length": 8, "rewards": [reward]},
        }  # fmt: skip
        bad = {"kind": "non_finite", "reason": "a bad step", "step": 3, "rows": [], "singled_out": [5], "changes": {}}
        job = make_job(tmp_path, tiny_model, data, data_format="prompt", **config) | {"auto_repairs": [bad]}
        whole = forks.run(job)
        assert whole.result["outcome"] == "completed", (whole.result, whole.stderr[-2000:])
        assert 3 not in whole.steps and all(5 not in held for _, held in whole.steps.values())
        assert {sample["step"] for sample in whole.of("sample")} == {*whole.steps}
        folder = tmp_path / "a2"
        folder.mkdir()
        later = forks.run(job | {"attempt": 2, "attempt_dir": str(folder), "resume_from": whole.checkpoint(4)})
        assert later.steps == {step: reported for step, reported in whole.steps.items() if step > 4}

    def test_no_more_often_than_allowed(
        self, forks: Forks, tmp_path: Path, tainted_model: Path, poisoned: Path
    ) -> None:
        config = CONFIG | {"on_non_finite": "rewind", "extra": {"max_rewinds": 1}}
        job = make_job(tmp_path, tainted_model, poisoned, data_format="text", **config)
        job["auto_repairs"] = [
            {"kind": "non_finite", "reason": "a bad step", "step": 1000, "rows": [], "singled_out": [], "changes": {}}
        ]
        done = forks.run(job)
        assert done.result["repair"] is None
        assert "extra.max_rewinds" in done.result["error"]["message"]


def test_smaller_micro_batches_train_on_the_same_rows_and_say_that_sums_are_taken_otherwise(
    forks: Forks, tmp_path: Path, tiny_model: Path, leaping: Path
) -> None:
    """What a run does that goes on after it ran out of memory; 160 rows leave a remainder in a pass of sixes."""
    config = CONFIG | {"max_steps": 30, "batch_size": 6, "gradient_accumulation_steps": 1, "save_steps": 10}
    whole = forks.run(make_job(tmp_path / "whole", tiny_model, leaping, data_format="text", **config))
    smaller = config | {"batch_size": 3, "gradient_accumulation_steps": 2}
    resumed = make_job(
        tmp_path / "smaller", tiny_model, leaping, data_format="text", attempt=2,
        resume_from=whole.checkpoint(10), **smaller,
    )  # fmt: skip
    done = forks.run(resumed)
    assert done.result["outcome"] == "completed", done.result
    for step, (loss, rows) in done.steps.items():
        expected, its_rows = whole.steps[step]
        assert rows == its_rows
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected), rel=1e-3)
    assert [*done.steps] == [*range(11, 31)]
    facts = done.of("config")[0]["facts"]
    assert facts["fidelity"] == "approximate"
    assert "The number of rows in a micro-batch was 6 at the checkpoint and is 3 now." in facts["fidelity_reasons"]


@pytest.mark.parametrize(("norm", "losses"), [(math.inf, []), (math.nan, []), (0.5, [2.0])])
def test_a_step_of_float16_that_the_gradient_scaler_skips_is_not_among_those_trained_on(
    norm: float, losses: list[float]
) -> None:
    run = SimpleNamespace(state=RunState(), ranks=SimpleNamespace(gather_values=lambda own: [own]))
    trainer: Any = SimpleNamespace(
        run=run, args=SimpleNamespace(fp16=True), step_rows=[], _micro_losses=[torch.tensor(2.0)],
        guard=AnomalyGuard(TrainingConfig(base_model="tiny", method="lora"), []),
    )  # fmt: skip
    ServiceTrainerMixin.close_step(trainer, torch.tensor(norm))
    assert run.state.recent_losses == losses


class TestJudge:
    """What counts as a leap, on made-up losses."""

    def guard(self, **config: Any) -> AnomalyGuard:
        return AnomalyGuard(TrainingConfig(base_model="m", **config), [])

    def test_noise_is_none(self) -> None:
        guard, recent = self.guard(on_spike="stop"), [2 + 0.1 * math.sin(place) for place in range(64)]
        assert guard.judge_step(2.3, 1.0, recent) is None
        assert guard.judge_step(3.5, 1.0, recent).kind == "loss_spike"  # type: ignore[union-attr]

    @pytest.mark.parametrize(("kept_step", "says"), [
        (0, "Created again with `on_non_finite` set to \"rewind\", a run goes back to its start"),
        (40, "Resumed with `on_non_finite` set to \"rewind\", a run goes back to the checkpoint of step 40"),
    ])  # fmt: skip
    def test_a_run_that_ends_reports_what_another_goes_back_to(self, kept_step: int, says: str) -> None:
        trainer: Any = SimpleNamespace(
            state=SimpleNamespace(global_step=41), step_rows=[], sequences_of=lambda _: [],
            saving=SimpleNamespace(kept_step=kept_step),
        )  # fmt: skip
        failure = self.guard().build_failure(trainer, Anomaly("non_finite", "the loss became nan"))
        assert failure.repair is None and says in failure.message

    def test_no_loss_spike_is_reported_at_the_start_or_unless_configured(self) -> None:
        assert self.guard(on_spike="stop").judge_step(9.0, 1.0, [2.0] * 15) is None
        assert self.guard().judge_step(9.0, 1.0, [2.0] * 64) is None

    @pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.inf), (2.0, math.nan)])
    def test_no_number_is_always_one_too_many(self, loss: float, norm: float) -> None:
        assert self.guard().judge_step(loss, norm, []).kind == "non_finite"  # type: ignore[union-attr]
