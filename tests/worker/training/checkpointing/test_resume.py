"""A resumed run goes on exactly: losses, rows and weights are those of a run that was never interrupted."""

import functools
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.jobs import make_spec
from tests.worker.training.output.outputs import figures, weights
from tests.worker.training.tiny import Forks, Outcome, make_chat_dataset, make_job, make_tiny_model
from worker.checkpoint_files import resume_fidelity
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.loop.callbacks import StepCallback
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.run_state import RunState

STEPS = 7
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "lora_dropout": 0.1, "lora_r": 4},
    "qlora": {"method": "qlora", "lora_dropout": 0.1, "lora_r": 4},
    "sft": {"method": "sft", "lora_dropout": 0.1, "lora_r": 4, "load_in_8bit": True, "neftune_noise_alpha": 5.0},
}
COMMON: dict[str, Any] = {
    "packing": True,
    "max_seq_length": 128,
    "batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-2,
    "max_steps": STEPS,
    "save_steps": 1,
    "save_total_limit": None,
    "logging_steps": 3,
    "eval_split": 0.2,
    "eval_steps": 3,
}


@pytest.fixture(scope="module")
def undisturbed_run(
    tmp_path_factory: pytest.TempPathFactory, forks: Forks, tiny_model: Path, chats: Path
) -> Callable[[str], Outcome]:
    """Trains a method once without interruption, with a checkpoint after every step."""

    @functools.cache
    def train(method: str) -> Outcome:
        config = METHODS[method] | COMMON
        outcome = forks.run(make_job(tmp_path_factory.mktemp(method), tiny_model, chats, **config))
        assert outcome.result["outcome"] == "completed", outcome.result
        assert len(outcome.steps) == STEPS
        (facts,) = (record["facts"] for record in outcome.of("config"))
        batches = math.ceil(facts["sequences"] / 2)
        assert facts["sequences"] < facts["rows"], "rows are packed"
        assert 6 < batches < 9, "an epoch has three steps, and the last of them a remainder of one or two batches"
        return outcome

    return train


@pytest.fixture(params=METHODS)
def undisturbed(request: pytest.FixtureRequest, undisturbed_run: Callable[[str], Outcome]) -> Outcome:
    """An uninterrupted run of each method."""
    return undisturbed_run(request.param)


def resumed(
    forks: Forks,
    original: Outcome,
    checkpoint: int | dict[str, Any],
    tmp_path: Path,
    run_id: str = "run_test",
    **changes: Any,
) -> Outcome:
    """Run the job of `original` on from a checkpoint, or from that of a step."""
    job = original.job
    resume_from = original.checkpoint(checkpoint) if isinstance(checkpoint, int) else checkpoint
    config = {name: job["config"][name] for name in job["user_set_fields"] if name != "base_model"} | changes
    again = make_job(
        tmp_path, job["base_model"]["path"], job["dataset"]["path"], attempt=2,
        resume_from=resume_from, run_id=run_id, **config,
        extra_eval={name: one["path"] for name, one in job["extra_eval_datasets"].items()},
    )  # fmt: skip
    return forks.run(again)


IN_THE_MIDDLE = {("qlora", "mid-epoch"), ("sft", "mid-epoch")}
PLACES = {"first": 1, "epoch-boundary": 3, "mid-epoch": 5, "last": STEPS}
QUICK: dict[str, Any] = {"max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1}


class TestExact:
    # `make test` interrupts three methods in the middle of an epoch, and one of them at the other places too;
    # `test_resume_cells.py` has more methods.
    @pytest.mark.parametrize(
        ("undisturbed", "step"),
        [
            pytest.param(
                method, step, id=f"{method}-{place}",
                marks=[] if method == "lora" or (method, place) in IN_THE_MIDDLE else pytest.mark.full,
            )
            for method in METHODS
            for place, step in PLACES.items()
        ],
        indirect=["undisturbed"],
    )  # fmt: skip
    def test_losses_rows_and_weights_equal_the_undisturbed_runs(
        self, undisturbed: Outcome, step: int, forks: Forks, tmp_path: Path
    ) -> None:
        again = resumed(forks, undisturbed, step, tmp_path)
        assert again.result["outcome"] == "completed", (again.result, again.stderr)
        assert again.steps == {n: reported for n, reported in undisturbed.steps.items() if n > step}
        assert weights(again) == weights(undisturbed)
        assert figures(again) == figures(undisturbed)
        training = next(record for record in again.of("phase") if record["name"] == "training")
        assert training["start_step"] == step, "also if only the output is left to be written"
        facts = again.of("config")[0]["facts"]
        assert (facts["fidelity"], facts["fidelity_reasons"]) == ("exact", [])
        # Checkpoints on the way are not held against a pinned text, for that costs a forward pass.
        assert facts.get("fidelity_difference") == (0.0 if step == STEPS else None)


class TestFidelity:
    def test_what_differs_from_the_checkpoint_is_reported_and_the_run_calls_itself_approximate(
        self, undisturbed_run: Callable[[str], Outcome], forks: Forks, chats: Path, tmp_path: Path
    ) -> None:
        last = undisturbed_run("lora").checkpoint(STEPS - 1)
        other = make_tiny_model(tmp_path / "other", dropout=0.2)
        job = make_job(tmp_path, other, chats, attempt=2, resume_from=last, **METHODS["lora"], **COMMON)
        job["dataset"]["sha256"] = "f" * 64
        again = forks.run(job)
        facts = again.of("config")[0]["facts"]
        assert again.result["outcome"] == "completed"
        assert facts["fidelity"] == "approximate"
        assert facts["fidelity_reasons"] == [
            "The base model differs from that of the checkpoint.",
            "The dataset differs from that of the checkpoint.",
        ]

    def test_weights_that_give_something_else_than_before_the_save_are_reported(
        self, undisturbed_run: Callable[[str], Outcome], forks: Forks, tmp_path: Path
    ) -> None:
        original = undisturbed_run("lora")
        checkpoint = original.checkpoint(STEPS)
        checkpoint["path"] = str(shutil.copytree(checkpoint["path"], tmp_path / "checkpoint"))
        path = Path(checkpoint["path"]) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["probe"] = (float.fromhex(manifest["probe"]) + 0.25).hex()
        path.write_text(json.dumps(manifest))
        checkpoint["manifest_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        again = resumed(forks, original, checkpoint, tmp_path)
        facts = again.of("config")[0]["facts"]
        assert facts["fidelity"] == "approximate"
        assert facts["fidelity_difference"] == pytest.approx(0.25)
        assert "The fidelity check gave" in facts["fidelity_reasons"][0]

    def test_saving_often_changes_nothing(
        self, undisturbed_run: Callable[[str], Outcome], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = METHODS["qlora"] | COMMON | {"save_steps": 100}
        rarely = forks.run(make_job(tmp_path, tiny_model, chats, **config))
        assert [record["step"] for record in rarely.of("checkpoint")] == [3, 6, STEPS], "each evaluation was the best"
        assert rarely.steps == undisturbed_run("qlora").steps

    def test_versions_devices_and_an_unknown_past_are_reasons_too(self, tmp_path: Path) -> None:
        then = {"device": "cpu", "sharded": True, "versions": {"torch": "2.13.0", "peft": "1"}}
        (tmp_path / "manifest.json").write_text(json.dumps({"fingerprint": then}))
        assert resume_fidelity.fingerprint_differences(tmp_path, then) == []
        now = {"device": "cuda", "sharded": False, "threads": 2, "versions": {"torch": "2.14.0", "peft": "1"}}
        assert resume_fidelity.fingerprint_differences(tmp_path, now) == [
            "The device was cpu at the checkpoint and is cuda now.",
            "The model was sharded at the checkpoint and is not now.",
            "The number of CPU threads was unknown at the checkpoint and is 2 now.",
            "torch was 2.13.0 at the checkpoint and is 2.14.0 now.",
        ]
        (tmp_path / "manifest.json").write_text("{}")
        assert len(resume_fidelity.fingerprint_differences(tmp_path, now)) == 1


class TestChanges:
    def test_more_steps_and_other_intervals_hold_and_the_checkpoints_do_not(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "lora", "logging_steps": 2, "save_steps": 4}
        first = forks.run(make_job(tmp_path / "1", tiny_model, chats, max_steps=4, **config))
        longer = {"max_steps": 9, "logging_steps": 1, "save_steps": 2}
        again = resumed(forks, first, 4, tmp_path / "2", **longer)
        assert [record["step"] for record in again.of("metric")] == [5, 6, 7, 8, 9]
        assert [(record["step"], record["kind"]) for record in again.of("checkpoint")] == [
            (6, "periodic"), (8, "periodic"), (9, "final"),
        ]  # fmt: skip
        assert again.of("phase")[-1] == again.of("phase")[-1] | {"name": "exporting"}
        assert again.result["step"] == 9

    def test_a_changed_learning_rate_and_weight_decay_hold(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "full", "lr_scheduler_type": "constant", "logging_steps": 1}
        first = forks.run(make_job(tmp_path / "1", tiny_model, chats, max_steps=4, save_steps=2, **config))
        again = resumed(forks, first, 2, tmp_path / "2", learning_rate=5e-3, weight_decay=0.5)
        same = resumed(forks, first, 2, tmp_path / "3")
        assert {record["learning_rate"] for record in first.of("metric")} == {2e-5}
        assert {record["learning_rate"] for record in again.of("metric")} == {5e-3}
        assert same.steps == {n: reported for n, reported in first.steps.items() if n > 2}
        assert again.steps != same.steps

    def test_a_run_stopped_where_an_evaluation_was_due_does_it_on_resume(
        self, undisturbed_run: Callable[[str], Outcome], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        whole, config = undisturbed_run("lora"), METHODS["lora"] | COMMON
        part = forks.run(make_job(tmp_path / "2", tiny_model, chats, **config, stop_at_step=6))
        assert (part.result["outcome"], part.result["why"], part.result["step"]) == ("stopped", "stop_at_step", 6)
        assert [record["step"] for record in part.of("eval")] == [3]
        again = resumed(forks, part, 6, tmp_path / "3", run_id="run_child")
        assert [record["step"] for record in again.of("eval")] == [6, STEPS]
        (caught_up,) = (record for record in again.of("checkpoint") if record["step"] == 6)
        assert caught_up["kind"] == "best"
        assert caught_up["metrics"]["eval_loss"] == again.of("eval")[0]["metrics"]["eval_loss"]
        assert figures(again) == figures(whole)
        assert weights(again) == weights(whole)

    def test_extra_evaluation_sets_leave_no_trace_in_the_training_even_if_a_stop_interrupts_one(
        self,
        undisturbed_run: Callable[[str], Outcome],
        forks: Forks,
        tiny_model: Path,
        chats: Path,
        tmp_path: Path,
    ) -> None:
        """Compared with a run without any. Each evaluation is one of the extra set, then one of the main data."""
        plain, config = undisturbed_run("lora"), METHODS["lora"] | COMMON
        few = make_chat_dataset(tmp_path / "few.jsonl", 5)
        whole = forks.run(make_job(tmp_path / "1", tiny_model, chats, extra_eval={"few": few}, **config))
        assert (whole.steps, weights(whole)) == (plain.steps, weights(plain))
        assert {"eval_few_loss", "eval_few_token_accuracy"} <= whole.of("eval")[0]["metrics"].keys()
        for number in (3, 4):
            job = make_job(tmp_path / f"{number}", tiny_model, chats, extra_eval={"few": few}, **config)
            part = forks.run(job, course={"drain_at_evaluation": number})
            assert (part.result["outcome"], part.result["why"], part.result["step"]) == ("stopped", "drain", 6)
            again = resumed(forks, part, 6, tmp_path / f"{number}-resumed")
            assert [record["step"] for record in [*part.of("eval"), *again.of("eval")]] == [3, 6, STEPS]
            assert part.steps | again.steps == plain.steps
            assert weights(again) == weights(whole) and figures(again) == figures(whole)


class TestLimits:
    CONFIG: dict[str, Any] = QUICK | {"method": "lora", "max_steps": 6, "export": "last"}

    @pytest.fixture(
        scope="class",
        params=[
            ({"stop_at_step": 3}, "stopped", "stop_at_step"),
            ({"time_limit_seconds": 1e-6}, "stopped", "time_limit"),
            (
                {"eval_split": 0.2, "eval_steps": 1, "early_stopping_patience": 2, "method": "full",
                 "learning_rate": 1.0, "warmup_ratio": 0.0, "max_steps": 50},
                "completed", "early_stopping",
            ),
        ],
        ids=["stop_at_step", "time_limit", "early_stopping"],
    )  # fmt: skip
    def limited(
        self,
        request: pytest.FixtureRequest,
        forks: Forks,
        tiny_model: Path,
        chats: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Outcome:
        """A run that a limit has ended, with the outcome and the reason of it."""
        limit, outcome, why = request.param
        ended = forks.run(make_job(tmp_path_factory.mktemp(why), tiny_model, chats, **self.CONFIG | limit))
        assert (ended.code, ended.result["outcome"], ended.result["why"]) == (0, outcome, why)
        return ended

    def test_a_limit_ends_with_a_saved_state_an_output_and_the_reason(self, limited: Outcome) -> None:
        step = limited.result["step"]
        limited.checkpoint(step)
        kinds = [record["kind"] for record in limited.of("checkpoint")]
        if limited.result["why"] == "early_stopping":
            assert step < 50 and kinds[-1] == "final" and set(kinds) == {"best", "final"}
        else:
            assert (step, kinds[-1]) == ({"stop_at_step": 3, "time_limit": 1}[limited.result["why"]], "stop")
        assert weights(limited).keys() <= {"adapter_model.safetensors", "model.safetensors"} and weights(limited)

    def test_an_attempt_lost_after_its_limit_is_not_trained_beyond_it(
        self, limited: Outcome, forks: Forks, tmp_path: Path
    ) -> None:
        ending = ("outcome", "why", "step", "metrics")
        again = resumed(forks, limited, limited.result["step"], tmp_path)
        assert [again.result[name] for name in ending] == [limited.result[name] for name in ending]
        assert again.steps == {}
        assert weights(again) == weights(limited)
        assert figures(again) == figures(limited)

    def test_a_new_run_that_takes_up_another_is_not_held_to_the_step_where_that_one_stopped(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        first = forks.run(make_job(tmp_path / "1", tiny_model, chats, stop_at_step=3, **self.CONFIG))
        config = self.CONFIG | {"stop_at_step": 3}
        child = make_job(
            tmp_path / "2", tiny_model, chats, run_id="run_child", resume_from=first.checkpoint(3), **config
        )
        result = forks.run(child).result
        assert (result["outcome"], result["step"]) == ("completed", 6)

    def test_limits_are_the_runs_own_also_where_another_reason_ended_an_attempt(self, tmp_path: Path) -> None:
        config = TrainingConfig(base_model="tiny", stop_at_step=3)
        RunState(run_id="run_a", ended_by="drain").save(tmp_path)
        assert RunState.load(tmp_path, "run_a", 3).limit_reached(config, 3) == "stop_at_step"
        assert RunState.load(tmp_path, "run_a", 2).limit_reached(config, 2) is None
        assert RunState.load(tmp_path, "run_child", 3).limit_reached(config, 9) is None


class TestBest:
    def test_a_checkpoint_carries_the_evaluation_of_its_own_step_and_no_other(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "full", "learning_rate": 1e-2, "max_steps": 7, "eval_split": 0.2}
        done = forks.run(make_job(tmp_path, tiny_model, chats, save_steps=2, eval_steps=3, logging_steps=2, **config))
        reported = {record["step"]: record["metrics"]["eval_loss"] for record in done.of("eval")}
        saved = {record["step"]: (record["kind"], record["metrics"]["eval_loss"]) for record in done.of("checkpoint")}
        assert saved == {
            2: ("periodic", None), 3: ("best", reported[3]), 4: ("periodic", None), 6: ("periodic", reported[6]),
            7: ("final", reported.get(7)),
        }  # fmt: skip
        logged = {record["step"]: record["loss"] for record in done.of("metric")}
        for record in done.of("checkpoint"):
            before = [loss for step, loss in logged.items() if step <= record["step"]]
            assert (record["metrics"]["loss"], record["metrics"]["best_loss"]) == (before[-1], min(before))

    def test_a_non_finite_evaluation_ends_the_run_and_is_never_the_best(self, tmp_path: Path) -> None:
        config = TrainingConfig(base_model="tiny")
        nothing: Any = None
        run = TrainingContext(make_spec(tmp_path), config, set(), DeviceCapabilities(), nothing, nothing, nothing)
        arguments: Any = None
        trainer = ServiceTrainerMixin.__new__(ServiceTrainerMixin)
        trainer.run, trainer.state = run, TrainerState()
        watcher = StepCallback(run, trainer)
        with pytest.raises(TrainingFailure) as ended:
            watcher.on_evaluate(arguments, TrainerState(), TrainerControl(), {"eval_loss": math.nan})
        assert ended.value.code == "non_finite_loss"
        assert run.state.best_objective is None


class TestHistory:
    def test_size_of_the_run_state_does_not_grow_with_the_steps(
        self, undisturbed_run: Callable[[str], Outcome]
    ) -> None:
        folder = undisturbed_run("lora").folder
        states = [json.loads((folder / f"checkpoint-{step}" / "anneal_state.json").read_text()) for step in (3, 6)]
        assert [len(state.pop("recent_losses")) for state in states] == [3, 6], "of which the last 64 are kept"
        assert abs(len(json.dumps(states[1])) - len(json.dumps(states[0]))) < 60
        lines = (folder / "checkpoint-6" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [3, 3, 6, 6]


class TestRefusals:
    def test_a_checkpoint_with_one_flipped_byte_is_not_resumed(
        self, undisturbed_run: Callable[[str], Outcome], forks: Forks, tmp_path: Path
    ) -> None:
        original = undisturbed_run("lora")
        checkpoint = original.checkpoint(STEPS - 1)
        checkpoint["path"] = str(shutil.copytree(checkpoint["path"], tmp_path / "checkpoint"))
        path = tmp_path / "checkpoint" / "optimizer.pt"
        flipped = bytearray(path.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        again = resumed(forks, original, checkpoint, tmp_path)
        assert again.code == 1
        assert again.result["outcome"] == "failed"
        assert "optimizer.pt" in again.result["error"]["message"]
        assert again.steps == {}
