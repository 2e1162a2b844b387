"""Simulated actions of the `fake` trainer, done between two steps as in a real trainer."""

import hashlib
import math
from collections import deque
from typing import Any, Protocol, Unpack

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import ActionDetails, ActionRequest, ActionStatus, AnsweredSaves
from anneal.contracts.training_config.fields import TrainingConfig
from worker.wire.control import Control
from worker.wire.reporter import Reporter

_WORDS = ("it", "learns", "what", "the", "rows", "say", "and", "writes", "some", "of", "this", "again")


class ActionTarget(Protocol):
    """The part of the fake trainer that its actions use."""

    job: JobSpec
    config: TrainingConfig
    control: Control
    report: Reporter
    state: Any
    total: int
    rows: int
    per_step: int

    def apply_change(self, **changes: Any) -> None:
        """Change fields of the configuration."""

    def epoch(self) -> float:
        """Return the position in epochs."""
        ...

    def evaluate(self, loss: float, *, is_due: bool = True) -> dict[str, float]:
        """Report an evaluation and return its metrics."""
        ...

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        ...

    def report_config(self) -> None:
        """Report the configuration in force."""


class Actions:
    """Handler of requested actions and their results, like `worker.training.loop.actions` of a real trainer."""

    def __init__(self, training: ActionTarget) -> None:
        self._training = training
        self._replayed = deque(training.job.replayed_actions)
        self._saves: list[ActionRequest] = []

    def repeat_due(self) -> None:
        """Repeat the actions of an earlier attempt that followed the finished step, even if training stops after it."""
        step = self._training.state.step
        while self._replayed and (self._replayed[0].step or 0) <= step:
            self._apply_action(self._replayed.popleft())

    def apply_new_actions(self) -> None:
        """Do newly requested actions; called only where training continues."""
        requests = self._training.control
        while not self._replayed and (request := requests.next_action) is not None:
            if self._saves and request.action != "checkpoint":
                break  # it would take effect before the checkpoint, which follows the actions of a step
            self._apply_action(requests.take_action())

    @property
    def wants_checkpoint(self) -> bool:
        """True if a checkpoint was requested and is not saved yet."""
        return bool(self._saves)

    def take_answered_saves(self) -> AnsweredSaves:
        """Return the fields of a checkpoint's record that answer the actions which requested it."""
        answered, self._saves = self._saves, []
        return {
            "actions": [{"id": one.id, "action": one.action} for one in answered],
            "pinned": any(one.parameters.get("pin") for one in answered),
        }

    def _apply_action(self, request: ActionRequest) -> None:
        training, parameters = self._training, request.parameters
        match request.action:
            case "checkpoint":
                self._saves.append(request)
            case "evaluate":
                loss = (training.state.loss or 0.0) + 0.1
                self._report_result(request, "done", result={"metrics": training.evaluate(loss, is_due=False)})
            case "sample":
                self._report_samples(
                    request, parameters["prompts"], parameters["max_new_tokens"], parameters["temperature"]
                )
            case "set_learning_rate":
                before, rate = training.config.learning_rate, parameters["learning_rate"]
                training.apply_change(learning_rate=rate)
                self._report_result(
                    request, "done", result={"before": before, "learning_rate": rate, "next": training.learning_rate()}
                )
                training.report_config()
            case "extend":
                self._extend_run(request, parameters.get("max_steps"), parameters.get("epochs"))

    def _extend_run(self, request: ActionRequest, max_steps: int | None = None, epochs: float | None = None) -> None:
        training = self._training
        before = training.total
        total = max_steps or max(1, math.ceil((epochs or 0) * training.rows / training.per_step))
        if total <= before:
            message = f"The run already has {before} planned steps and this would be {total}; request more."
            return self._report_result(request, "refused", message=message)
        training.apply_change(max_steps=total)
        result = {"before": before, "total_steps": total, "next_learning_rate": training.learning_rate()}
        self._report_result(request, "done", result=result, total_steps=total)
        training.report_config()

    def _report_samples(
        self, request: ActionRequest, prompts: list[str], max_new_tokens: int, temperature: float
    ) -> None:
        training = self._training
        texts = [self._generate_text(prompt, max_new_tokens, temperature) for prompt in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            step, action_id = training.state.step, request.id
            training.report.send(
                {"type": "sample", "step": step, "prompt": prompt, "completion": text, "action_id": action_id}
            )
        pairs = zip(prompts, texts, strict=True)
        samples = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
        self._report_result(request, "done", result={"samples": samples})

    def _generate_text(self, prompt: str, most: int, temperature: float) -> str:
        digest = hashlib.sha256(f"{self._training.state.chain} {prompt} {temperature}".encode()).digest()
        return " ".join(_WORDS[byte % len(_WORDS)] for byte in digest[: min(most, 8)])

    def _report_result(self, request: ActionRequest, status: ActionStatus, **details: Unpack[ActionDetails]) -> None:
        training = self._training
        training.report.send(
            {
                "type": "action",
                "id": request.id,
                "action": request.action,
                "step": training.state.step,
                "epoch": training.epoch(),
                "status": status,
                **details,
            }
        )
