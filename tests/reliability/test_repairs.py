"""A run that fails for a reason that can be mended goes on by itself, says what it changed, and explains itself."""

import json
import signal
from itertools import pairwise
from typing import Any

import pytest

from anneal.contracts.attempt.failure_report import FailureReport
from app.runs.reading.postmortem.causes import RunHistory, probable_cause
from tests.stack import Stack
from tests.waiting import eventually
from worker.attempts import auto_repair


def reported_repairs(stack: Stack, run_id: str) -> list[dict[str, Any]]:
    return [event for event in stack.events(run_id) if event["type"] == "repair"]


def postmortem(stack: Stack, run_id: str) -> dict[str, Any]:
    answer = stack.client.get(f"/v1/runs/{run_id}/postmortem")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def first_steps(stack: Stack, run_id: str) -> list[dict[str, Any]]:
    """The first line of a step of each attempt."""
    steps = [line for line in stack.journal(run_id) if line["event"] in ("step", "skip_step")]
    return [next(line for line in steps if line["attempt"] == n) for n in sorted({line["attempt"] for line in steps})]


class TestOutOfMemory:
    @pytest.mark.usefixtures("worker")
    def test_the_run_goes_on_with_smaller_micro_batches_of_the_same_rows(self, stack: Stack) -> None:
        calm = stack.create({"steps": 12, "step_seconds": 0.0}, {"batch_size": 4, "gradient_accumulation_steps": 1})
        scarce = stack.create(
            {"steps": 12, "step_seconds": 0.0, "out_of_memory_above": 1},
            {"batch_size": 4, "gradient_accumulation_steps": 1},
        )
        for run_id in (calm, scarce):
            assert stack.until(run_id, "completed", "failed")["status"] == "completed"
        reported = reported_repairs(stack, scarce)
        assert [(one["changes"]["batch_size"], one["changes"]["gradient_accumulation_steps"]) for one in reported] == [
            (2, 2), (1, 4),
        ]  # fmt: skip
        shown = stack.run(scarce)
        assert (shown["config"]["batch_size"], shown["effective_config"]["batch_size"]) == (4, 1)
        assert shown["attempt"] == 3
        rows = [
            {line["step"]: line["samples"] for line in stack.journal(run_id) if line["event"] == "step"}
            for run_id in (calm, scarce)
        ]
        assert rows[0] == rows[1]
        ends = [one["outcome"] for one in postmortem(stack, scarce)["attempts"]]
        assert ends == ["repaired", "repaired", "completed"]

    @pytest.mark.usefixtures("worker")
    def test_out_of_memory_without_a_smaller_setting_fails_with_advice(self, stack: Stack) -> None:
        run_id = stack.create(
            {"steps": 9, "crash_at_step": 3, "crash": "memory"},
            {"batch_size": 2, "method": "full", "gradient_checkpointing": False, "logging_steps": 1},
        )
        shown = stack.until(run_id, "completed", "failed")
        assert (shown["status"], shown["error_code"], shown["attempt"]) == ("failed", "out_of_memory", 3)
        assert [*reported_repairs(stack, run_id)[-1]["changes"]] == ["gradient_checkpointing"]
        report = postmortem(stack, run_id)
        assert report["phase"] == "training" and report["step"] == 2 and report["memory"]
        assert "ran out of memory while training" in report["probable_cause"]
        assert any("step 2 loss" in line for line in report["last_lines"])
        assert report["correction"]["changes"] == {"method": "lora"}
        request = report["correction"]["request"]
        assert stack.client.post(f"{request['path']}/validate", json=request["body"]).json()["valid"]

    @pytest.mark.full
    @pytest.mark.usefixtures("worker")
    def test_a_run_that_is_to_end_instead_does(self, stack: Stack) -> None:
        sets = {"code": stack.dataset_id}
        evaluated = {"eval_split": 0.5, "eval_steps": "epoch"}
        run_id = stack.create(
            {"out_of_memory_above": 1}, {"on_out_of_memory": "stop", **evaluated}, extra_eval_datasets=sets
        )
        shown = stack.until(run_id, "completed", "failed")
        assert (shown["error_code"], shown["attempt"]) == ("out_of_memory", 1)
        correction = postmortem(stack, run_id)["correction"]
        assert correction["changes"] == {"on_out_of_memory": "repair"}
        again = stack.client.post(correction["request"]["path"], json=correction["request"]["body"])
        assert again.status_code == 202, again.text
        assert stack.until(again.json()["id"], "completed", "failed")["status"] == "completed"
        assert again.json()["extra_eval_datasets"] == sets
        evaluations = [event["metrics"] for event in stack.events(again.json()["id"]) if event["type"] == "eval"]
        assert evaluations and all(one["eval_code_loss"] == one["eval_loss"] for one in evaluations)


class TestRewind:
    @pytest.mark.usefixtures("worker")
    def test_rewind_returns_to_the_last_checkpoint_and_skips_the_step(self, stack: Stack) -> None:
        run_id = stack.create(
            {"steps": 12, "step_seconds": 0.0, "non_finite_at_step": 7}, {"on_non_finite": "rewind", "save_steps": 5}
        )
        assert stack.until(run_id, "completed", "failed")["status"] == "completed"
        (reported,) = reported_repairs(stack, run_id)
        assert (reported["kind"], reported["step"]) == ("non_finite", 7) and reported["rows"]
        lines = [line for line in stack.journal(run_id) if line["attempt"] == 2]
        assert [line["step"] for line in lines if line["event"] == "step"] == [6, 8, 9, 10, 11, 12]
        assert [line["step"] for line in lines if line["event"] == "skip_step"] == [7]

    @pytest.mark.usefixtures("worker")
    def test_stop_wins_over_a_repair(self, stack: Stack) -> None:
        """The trainer does not heed the stop, and fails a moment later for a reason that could be mended."""
        run_id = stack.create(
            {"steps": 200, "step_seconds": 0.2, "non_finite_at_step": 40, "ignore_stop": True},
            {"on_non_finite": "rewind", "logging_steps": 1},
        )
        stack.until_step(run_id, 5)
        stack.stop(run_id)
        assert stack.until(run_id, "completed", "failed", "cancelled")["status"] == "cancelled"
        assert [one["kind"] for one in reported_repairs(stack, run_id)] == ["non_finite"]

    def test_trouble_again_behind_one_checkpoint_leads_further_back_whatever_came_between(self, stack: Stack) -> None:
        """Three steps in a row fail behind the checkpoint of step 10, no row stands out; the worker is lost between."""
        worker = stack.add_worker()
        run_id = stack.create(
            {"steps": 40, "step_seconds": 0.05, "non_finite_at_step": 12, "non_finite_steps": 3},
            {"on_non_finite": "rewind", "save_steps": 5, "save_total_limit": 2, "logging_steps": 1},
        )
        eventually(lambda: reported_repairs(stack, run_id), timeout=60)
        worker.kill()
        stack.add_worker()
        assert stack.until(run_id, "completed", "failed")["status"] == "completed"
        assert [one["step"] for one in reported_repairs(stack, run_id)] == [12, 13, 14]
        starts = [line["step"] for line in first_steps(stack, run_id)]
        assert 11 in starts and 6 in starts and 1 not in starts[1:], "from the checkpoint, then from the one before it"
        reported = [one["reason"] for one in reported_repairs(stack, run_id)]
        assert (
            "back to the checkpoint of step 10, " in reported[0] and "back to the checkpoint of step 5 " in reported[1]
        )
        saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        assert max(one["step"] for one in saved if one["bad_reason"] is None) == 40


class TestPostmortem:
    @pytest.mark.usefixtures("worker")
    def test_a_hang_and_a_crash_are_distinguished(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 9, "crash_at_step": 3, "crash": "segv"})
        stack.until(run_id, "failed")
        report = postmortem(stack, run_id)
        assert (report["exit_signal"], report["code"]) == ("SIGSEGV", "trainer_crashed")
        assert "crashed (SIGSEGV) in the training process during training" in report["probable_cause"]
        assert report["correction"] is None
        assert (
            "hung during evaluating"
            in probable_cause("worker_lost", "", FailureReport(killed_for="hang", phase="evaluating"), {}).sentence
        )

    @pytest.mark.usefixtures("worker")
    def test_postmortem_of_a_healthy_run_is_409(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 2, "step_seconds": 0.0})
        stack.until(run_id, "completed")
        answer = stack.client.get(f"/v1/runs/{run_id}/postmortem")
        assert (answer.status_code, answer.json()["code"]) == (409, "nothing_went_wrong")

    @pytest.mark.parametrize("code", [
        "out_of_memory", "non_finite_loss", "loss_spike", "bad_data", "model_not_found", "disk_full",
        "device_error", "worker_lost", "trainer_crashed", "config_error", "internal",
    ])  # fmt: skip
    def test_every_code_has_a_sentence(self, code: str) -> None:
        config = {"batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "time_limit_seconds": 60.0}
        cause = probable_cause(code, "It said why.", None, config)
        assert cause.sentence.endswith(".") and len(cause.sentence) > 10
        json.dumps(cause.changes)

    @pytest.mark.parametrize(("details", "before", "changes"), [
        ({}, RunHistory([6.9, 4.2, 25.0], has_checkpoint=True), {"learning_rate": 1.0}),
        ({}, RunHistory(), {"learning_rate": 1.0}),
        ({"in_evaluation": True}, RunHistory(has_checkpoint=True), {"learning_rate": 1.0}),
        ({}, RunHistory([6.9, 6.8], has_checkpoint=True), {"on_non_finite": "rewind"}),
        ({"singled_out": [7]}, RunHistory([6.9, 6.8]), {"on_non_finite": "rewind"}),
        ({"singled_out": [7]}, RunHistory([6.9, 25.0]), {"learning_rate": 1.0}),
    ])  # fmt: skip
    def test_a_run_that_diverged_is_to_learn_slower_and_only_a_bad_row_to_be_skipped(
        self, details: dict[str, Any], before: RunHistory, changes: dict[str, Any]
    ) -> None:
        facts = {"in_evaluation": False, "singled_out": [], **details}
        error = {"code": "non_finite_loss", "message": "", "details": {"summary": "The loss became nan.", **facts}}
        report = FailureReport.model_validate({"error": error})
        config = {"learning_rate": 10.0, "on_non_finite": "stop"}
        cause = probable_cause("non_finite_loss", "The loss became nan. Look at it.", report, config, None, before)
        assert cause.sentence.startswith("The loss became nan.") and "Look" not in cause.sentence
        assert cause.changes == changes and cause.is_for_new_run == before.was_diverging
        assert ("checkpoint and" in (cause.advice or "")) == ("on_non_finite" in changes and before.has_checkpoint)

    def test_memory_is_made_smaller_until_nothing_is_left(self) -> None:
        config: dict[str, Any] = {
            "batch_size": 12, "gradient_accumulation_steps": 2, "on_out_of_memory": "repair",
            "gradient_checkpointing": False,
        }  # fmt: skip
        seen = []
        while repair := auto_repair.propose_repair(config, "training", "out_of_memory", None):
            config, _ = auto_repair.apply_repairs(config, [repair])
            seen.append(config["batch_size"])
            assert config["batch_size"] * config["gradient_accumulation_steps"] == 24
        assert all(later <= before for before, later in pairwise(seen)) and seen[-2:] == [1, 1]
        assert config["gradient_checkpointing"] is True
        assert auto_repair.propose_repair(config, "loading", "out_of_memory", None) is None

    def test_a_method_that_compares_rows_keeps_two_in_a_micro_batch(self) -> None:
        config: dict[str, Any] = {
            "method": "kto", "batch_size": 6, "gradient_accumulation_steps": 2, "on_out_of_memory": "repair",
            "gradient_checkpointing": False, "max_seq_length": 512,
        }  # fmt: skip
        cause = probable_cause("out_of_memory", None, FailureReport(phase="training"), config)
        assert cause.changes == {"batch_size": 2, "gradient_accumulation_steps": 6}
        assert cause.advice is not None and "2 at a time" in cause.advice
        seen = []
        while repair := auto_repair.propose_repair(config, "training", "out_of_memory", None):
            config, _ = auto_repair.apply_repairs(config, [repair])
            seen.append((config["batch_size"], config["gradient_checkpointing"]))
        assert seen == [(3, False), (3, True)]
        short = probable_cause("out_of_memory", None, FailureReport(phase="training"), {**config, "batch_size": 2})
        assert short.changes == {"max_seq_length": 256}

    @pytest.mark.parametrize(("message", "says"), [
        ("worker lost: its lease ran out (4 times …)", "The worker was lost"),
        ("the file of dataset ds_1 is not in this worker's storage (1 times …)", "The file of dataset ds_1"),
    ])  # fmt: skip
    def test_a_run_that_was_given_up_too_often_names_the_reason(self, message: str, says: str) -> None:
        assert probable_cause("worker_lost", message, None, {}, "failed").sentence.startswith(says)

    @pytest.mark.parametrize(("report", "says"), [
        ({"exit_signal": signal.SIGKILL, "killed_for": "lease"}, "The database was unreachable for too long"),
        ({"exit_signal": signal.SIGALRM}, "The training process ended itself"),
        (
            {"exit_signal": signal.SIGTERM},
            "An external signal (SIGTERM), not from the service, ended the training process",
        ),
        (
            {"exit_signal": signal.SIGHUP},
            "An external signal (SIGHUP), not from the service, ended the training process",
        ),
        ({}, "The process from which training processes are forked was lost"),
    ])  # fmt: skip
    def test_an_attempt_that_another_follows_is_blamed_on_no_one_else_and_leaves_nothing_to_resume(
        self, report: dict[str, Any], says: str
    ) -> None:
        report = {"phase": "training", **report}
        cause = probable_cause(None, None, FailureReport(**report), {}, "retried")
        assert cause.sentence.startswith(says) and "another attempt resumes" in cause.sentence
        assert cause.advice is None
        for number in (signal.SIGSEGV, signal.SIGKILL):  # its end got lost with its worker
            assert "esume" not in (
                probable_cause(None, None, FailureReport(**{**report, "exit_signal": number}), {}, "lost").advice or ""
            )
        assert "esume" not in (probable_cause(None, None, None, {}, "lost").advice or "")

    @pytest.mark.parametrize(("report", "says"), [
        ({"killed_for": "lease"}, "The database was unreachable"),
        ({"exit_signal": signal.SIGALRM}, "The training process ended itself"),
    ])  # fmt: skip
    def test_a_run_that_was_cut_off_too_often_can_be_resumed(self, report: dict[str, Any], says: str) -> None:
        message = "the database was unreachable for 40 s; the run continues from its last checkpoint (4 times …)"
        cause = probable_cause("worker_lost", message, FailureReport(**{**report, "phase": "training"}), {}, "failed")
        assert cause.sentence.startswith(says) and "another attempt" not in cause.sentence
        assert cause.advice is not None and "resume" in cause.advice

    @pytest.mark.parametrize("code", ["out_of_memory", "non_finite_loss", "loss_spike", "disk_full"])
    def test_a_probe_is_not_changed_but_the_run_that_it_measures(self, code: str) -> None:
        config: dict[str, Any] = {
            "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "time_limit_seconds": 60.0,
            "method": "lora", "max_seq_length": 2048, "on_out_of_memory": "stop", "extra": {"probe": True},
        }  # fmt: skip
        cause = probable_cause(code, "It said why.", FailureReport(phase="training"), config)
        assert cause.changes == {} and cause.advice is not None and "probe" in cause.advice
        if code == "out_of_memory":
            assert "`batch_size` 1" in cause.advice
            short = probable_cause(
                code, None, FailureReport(phase="training"), {**config, "batch_size": 1, "method": "qlora"}
            )
            assert short.changes == {} and short.advice is not None and "`max_seq_length` 1024" in short.advice
