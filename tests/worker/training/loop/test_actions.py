"""Actions of a real training process: when each takes effect, and that a run which lost its trainer trains the same."""

import json
import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl

from anneal.contracts.attempt.messages import ActionRequest, ControlMessage
from anneal.contracts.stop import StopRequest
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.jobs import make_spec
from tests.worker.training.tiny import Forks, Outcome, make_job
from worker.training.context import TrainingContext
from worker.training.loop.actions import Actions
from worker.wire.control import Control

QUICK: dict[str, Any] = {
    "method": "lora", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 2, "lora_dropout": 0.1,
    "logging_steps": 1, "save_steps": 2, "max_steps": 12, "eval_split": 0.2, "eval_steps": 100, "seed": 7,
}  # fmt: skip
SAMPLE = {"prompts": ["what is row 3", "say"], "max_new_tokens": 8, "temperature": 0.9}
ASKED = [
    ("set_learning_rate", 3, {"learning_rate": 1e-3}),
    ("sample", 4, SAMPLE),
    ("evaluate", 5, {}),
    ("checkpoint", 5, {"pin": True}),
    ("extend", 7, {"max_steps": 16}),
]


def action_requests(*names: str, behind: int = 0) -> list[dict[str, Any]]:
    """What an earlier attempt did, as the job of the next one tells it."""
    return [
        {"id": f"act_{name}", "action": name, "parameters": parameters, "step": step}
        for name, step, parameters in ASKED
        if step > behind and (not names or name in names)
    ]


@pytest.fixture(scope="module")
def whole(forks: Forks, tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that is never interrupted, with an action of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    return forks.run(make_job(folder, tiny_model, chats, **QUICK) | {"replayed_actions": action_requests()})


def losses(outcome: Outcome) -> dict[int, str]:
    return {step: loss for step, (loss, _) in outcome.steps.items()}


class TestEachTakesEffectBehindItsStep:
    def test_each_action_is_answered_once(self, whole: Outcome) -> None:
        answered = [(one["action"], one["step"], one["status"]) for one in whole.of("action")]
        # That of a checkpoint is part of the checkpoint's own record: both are stored, or neither.
        assert answered == [(name, step, "done") for name, step, _ in ASKED if name != "checkpoint"]
        (saved,) = [one for one in whole.of("checkpoint") if one["actions"]]
        assert (saved["step"], saved["pinned"]) == (5, True)
        assert saved["actions"] == [{"id": "act_checkpoint", "action": "checkpoint"}]
        assert all(one["seconds"] > 0 for one in whole.of("checkpoint"))

    def test_a_learning_rate_is_the_highest_of_the_schedule_from_the_next_step_on(self, whole: Outcome) -> None:
        rates = {one["step"]: one["learning_rate"] for one in whole.of("metric")}
        (answer,) = [one for one in whole.of("action") if one["action"] == "set_learning_rate"]
        assert rates[4] == answer["result"]["next"]
        assert rates[4] / 1e-3 < 1 < rates[4] / rates[3]

    def test_an_extended_run_has_the_schedule_of_a_longer_one_and_trains_to_its_end(self, whole: Outcome) -> None:
        assert whole.result["outcome"] == "completed" and whole.result["step"] == 16
        metrics = whole.of("metric")
        assert [one["total_steps"] for one in metrics] == [12] * 6 + [16] * 10
        rates = {one["step"]: one["learning_rate"] for one in metrics}
        assert rates[8] > rates[7] and rates[16] < rates[12] < rates[8]

    def test_the_configuration_in_force_is_reported_again(self, whole: Outcome) -> None:
        reported = [(one["effective"]["learning_rate"], one["effective"]["max_steps"]) for one in whole.of("config")]
        assert reported == [(2e-4, 12), (1e-3, 12), (1e-3, 16)]

    def test_each_checkpoint_has_the_configuration_in_force_at_its_step(self, whole: Outcome) -> None:
        before, faster, longer = (one["effective"] for one in whole.of("config"))
        for step, effective in ((2, before), (4, faster), (5, faster), (8, longer), (16, longer)):
            stored = json.loads((whole.folder / f"checkpoint-{step}" / "training_config.json").read_text())
            assert stored == effective, step

    def test_an_evaluation_is_made_and_reported(self, whole: Outcome) -> None:
        metrics_of_steps = {one["step"]: one["metrics"] for one in whole.of("eval")}
        assert set(metrics_of_steps) == {5, 16}
        (answer,) = [one for one in whole.of("action") if one["action"] == "evaluate"]
        assert answer["result"] == {"metrics": metrics_of_steps[5]}

    def test_samples_are_reported_one_by_one(self, whole: Outcome) -> None:
        reported = [(one["step"], one["prompt"], one["action_id"]) for one in whole.of("sample")]
        assert reported == [(4, prompt, "act_sample") for prompt in SAMPLE["prompts"]]
        (answer,) = [one for one in whole.of("action") if one["action"] == "sample"]
        assert all(one["completion"] for one in answer["result"]["samples"])


class TestOrder:
    """Requests that wait while a run is pending: all of them reach it before its first step."""

    def test_requests_take_effect_in_their_order(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        requests: list[tuple[str, dict[str, Any]]] = [
            ("sample", SAMPLE), ("evaluate", {}), ("checkpoint", {"pin": True}),
            ("set_learning_rate", {"learning_rate": 1e-3}), ("extend", {"max_steps": 5}), ("evaluate", {}),
            ("sample", SAMPLE), ("checkpoint", {}), ("evaluate", {}),
        ]  # fmt: skip
        config = QUICK | {"max_steps": 4, "save_steps": 100}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(tmp_path / "control"))
            listening.listen()
            forks.start(make_job(tmp_path, tiny_model, chats, **config), control=tmp_path / "control")
            control, _ = listening.accept()
        with control:
            for number, (name, parameters) in enumerate(requests):
                control.send(ControlMessage(action=ActionRequest(f"act_{number}", name, parameters)).to_json())
            done = forks.wait()
        answers = {record["id"]: (record["step"], record["status"]) for record in done.of("action")}
        for saved in done.of("checkpoint"):
            answers |= {one["id"]: (saved["step"], "done") for one in saved["actions"]}
        assert [answers[f"act_{number}"] for number in range(len(requests))] == [
            (step, "done") for step in (1, 1, 1, 2, 2, 2, 3, 3, 4)
        ]
        order = [record["id"] for record in done.of("action")]
        assert order == [f"act_{number}" for number in (0, 1, 3, 4, 5, 6, 8)]
        state = json.loads((done.folder / "checkpoint-1" / "anneal_state.json").read_text())
        assert state["changed"] == {}, "it is saved before the learning rate changes"
        assert done.result["step"] == 5


class TestExactness:
    @pytest.mark.parametrize(
        "step", [2, pytest.param(5, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full), 10]
    )
    def test_an_attempt_from_a_checkpoint_trains_the_same(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, whole: Outcome, step: int
    ) -> None:
        """From before all of it, from the very step of an action, between two, and from behind all."""
        resume = whole.checkpoint(step)
        job = make_job(tmp_path, tiny_model, chats, attempt=2, resume_from=resume, **QUICK)
        again = forks.run(job | {"replayed_actions": action_requests(behind=step)})
        assert losses(again) == {n: loss for n, loss in losses(whole).items() if n > step}
        assert again.result["metrics"] == whole.result["metrics"]
        done = [(one["action"], one["step"]) for one in again.of("action")]
        assert done == [(name, at) for name, at, _ in ASKED if at > step and name != "checkpoint"]
        assert again.of("config")[-1]["effective"] == whole.of("config")[-1]["effective"]
        assert again.of("sample") == [] or [one["completion"] for one in again.of("sample")] == [
            one["completion"] for one in whole.of("sample")
        ]

    def test_an_attempt_that_is_drained_at_the_very_step_of_an_action_leaves_it_done(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, whole: Outcome
    ) -> None:
        """At the step of the learning rate, then of the evaluation and the checkpoint, then of the extension."""
        behind, resume, trained = 2, whole.checkpoint(2), {}
        for attempt, step in enumerate((3, 5, 7), start=2):
            job = make_job(tmp_path, tiny_model, chats, attempt=attempt, resume_from=resume, **QUICK)
            drained = forks.run(job | {"replayed_actions": action_requests(behind=behind)}, course={"drain_at": step})
            assert (drained.result["why"], drained.result["step"]) == ("drain", step)
            behind, resume = step, drained.checkpoint(step)
            trained |= losses(drained)
        job = make_job(tmp_path, tiny_model, chats, attempt=5, resume_from=resume, **QUICK)
        ended = forks.run(job | {"replayed_actions": action_requests(behind=behind)})
        assert ended.result["step"] == 16
        assert trained | losses(ended) == {n: loss for n, loss in losses(whole).items() if n > 2}
        assert ended.result["metrics"] == whole.result["metrics"]

    def test_samples_and_an_evaluation_that_was_asked_for_leave_no_trace_in_the_training(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, whole: Outcome
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, **QUICK)
        without = forks.run(job | {"replayed_actions": action_requests("set_learning_rate", "extend")})
        assert losses(without) == losses(whole)

    def test_a_run_that_resumes_it_starts_with_what_was_changed(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, whole: Outcome
    ) -> None:
        """The service puts it into the configuration of the new run."""
        config = QUICK | {"learning_rate": 1e-3, "max_steps": 16}
        resume = whole.checkpoint(10)
        child = forks.run(
            make_job(tmp_path, tiny_model, chats, run_id="run_child", resume_from=resume, **config)
            | {"replayed_actions": []}
        )
        assert losses(child) == {n: loss for n, loss in losses(whole).items() if n > 10}


def test_what_cannot_be_done_is_refused_and_training_goes_on(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = QUICK | {"max_steps": 3, "eval_split": 0.0, "eval_steps": None}
    requests = [("evaluate", {}), ("extend", {"epochs": 0.01})]
    actions = [{"id": f"act_{n}", "action": n, "parameters": parameters, "step": 1} for n, parameters in requests]
    done = forks.run(make_job(tmp_path, tiny_model, chats, **config) | {"replayed_actions": actions})
    assert [(one["action"], one["status"], one["step"]) for one in done.of("action")] == [
        ("evaluate", "refused", 1), ("extend", "refused", 1),
    ]  # fmt: skip
    assert "3 steps already" in done.of("action")[1]["message"]
    assert done.result["outcome"] == "completed" and done.result["step"] == 3


@pytest.mark.parametrize(("first", "stop", "refused"), [(0, 15, True), (0, 20, False), (15, 15, False)])
def test_more_steps_than_until_its_stop_are_refused(tmp_path: Path, first: int, stop: int, refused: bool) -> None:
    reported: list[dict[str, Any]] = []
    waiting = [ActionRequest("a", "extend", {"epochs": 2})]
    report: Any = SimpleNamespace(send=reported.append)
    control = Control()
    control._actions.extend(waiting)
    nothing: Any = None
    config = TrainingConfig(base_model="tiny", stop_at_step=stop)
    run = TrainingContext(
        make_spec(tmp_path), config, set(), DeviceCapabilities(), report, control, nothing, steps_per_epoch=10
    )
    run.state.first_step = first
    state = SimpleNamespace(global_step=first + 1, epoch=0.1, max_steps=10)
    trainer: Any = SimpleNamespace(run=run, state=state)
    Actions(trainer).apply_new_actions(TrainerControl())
    # One that is not refused comes further, to what this trainer does not have.
    assert reported[0]["status"] == ("refused" if refused else "failed")
    assert ("ends at step 15, which is its `stop_at_step`" in reported[0]["message"]) is refused


def test_evaluations_that_were_only_asked_for_neither_end_a_run_nor_save_its_best(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    """One that breaks, one that finds no number, and others that get worse and worse."""
    config = QUICK | {"max_steps": 6, "save_steps": 100, "eval_steps": 6, "early_stopping_patience": 1}
    actions = [{"id": f"act_{n}", "action": "evaluate", "parameters": {}, "step": n} for n in range(1, 6)]
    job = make_job(tmp_path, tiny_model, chats, **config) | {"replayed_actions": actions}
    done = forks.run(job, course={"evaluations": ["raises", "nan", 1.0, 2.0, 3.0]})
    assert (done.result["outcome"], done.result.get("why"), done.result["step"]) == ("completed", None, 6), done.result
    assert [(one["kind"], one["step"]) for one in done.of("checkpoint")] == [("final", 6)]
    answers = {one["step"]: one for one in done.of("action")}
    assert [one["status"] for one in answers.values()] == ["failed", *["done"] * 4]
    assert "no evaluation today" in answers[1]["message"]
    assert math.isnan(answers[2]["result"]["metrics"]["eval_loss"])  # null, where it is stored
    losses = [answers[step]["result"]["metrics"]["eval_loss"] for step in (3, 4, 5)]
    assert losses == [1.0, 2.0, 3.0]
    lines = [json.loads(line) for line in (done.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval_loss"] for line in lines if "eval_loss" in line and line["step"] == 2] == [None]


def test_a_drain_at_the_last_step_of_the_epoch_that_the_run_is_to_end_with_ends_it(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, whole: Outcome
) -> None:
    last = next(one["step"] for one in whole.of("metric") if float(one["epoch"]).is_integer())
    job = make_job(tmp_path, tiny_model, chats, **QUICK)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        forks.start(job, control=tmp_path / "control", course={"drain_at": last})
        control, _ = listening.accept()
    with control:
        control.send(ControlMessage(stop=StopRequest("epoch_end")).to_json())
        ended = forks.wait()
    assert (ended.result["outcome"], ended.result["why"], ended.result["step"]) == ("stopped", "epoch_end", last)
    # Whoever resumes from it in this run's name, for it was lost before it was heard, ends at once too.
    resume = ended.checkpoint(last)
    again = forks.run(make_job(tmp_path, tiny_model, chats, attempt=2, resume_from=resume, **QUICK))
    assert (again.result["why"], again.result["step"], again.steps) == ("epoch_end", last, {})


class TestAChangeThatBreaksOff:
    """Halfway, by what nobody foresaw: it is told, and nothing of it is in force."""

    @pytest.mark.parametrize("where", ["the schedule is not made", "the schedule has no such step"])
    @pytest.mark.parametrize(
        ("action", "parameters"), [("set_learning_rate", {"learning_rate": 0.5}), ("extend", {"epochs": 9})]
    )
    def test_is_answered_as_failed_and_changes_nothing(
        self, tmp_path: Path, where: str, action: str, parameters: dict[str, Any]
    ) -> None:
        def fail(*_: Any) -> float:
            raise LookupError(where)

        def create_scheduler(_steps: int, own: torch.optim.Optimizer) -> Any:
            return fail() if where == "the schedule is not made" else SimpleNamespace(lr_lambdas=[fail])

        reported: list[dict[str, Any]] = []
        report: Any = SimpleNamespace(send=reported.append)
        config = TrainingConfig(base_model="tiny", learning_rate=0.1)
        request = ActionRequest("a", action, parameters, step=1)
        job = make_spec(tmp_path, replayed_actions=[request])
        nothing: Any = None
        run = TrainingContext(job, config, set(), DeviceCapabilities(), report, Control(), nothing, steps_per_epoch=10)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        course = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer: Any = SimpleNamespace(
            run=run, args=SimpleNamespace(learning_rate=0.1, max_steps=10), facts={"total_steps": 10},
            state=SimpleNamespace(global_step=1, epoch=0.1, max_steps=10), optimizer=optimizer, lr_scheduler=course,
            replaced=[], create_scheduler=create_scheduler,
        )  # fmt: skip

        def everything() -> Any:
            rates = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
            parts = (course.lr_lambdas, course.base_lrs, course.get_last_lr(), vars(trainer.args), vars(trainer.state))
            changed = (run.state.changed, run.state.total_steps)
            return rates, *map(str, parts), *changed, dict(trainer.facts), run.config, trainer.lr_scheduler

        before = everything()
        Actions(trainer).repeat_due(TrainerControl())
        ((answer),) = reported
        assert answer["status"] == "failed" and f"LookupError: {where}" in answer["message"]
        assert everything() == before
