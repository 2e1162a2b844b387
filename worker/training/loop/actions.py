"""Live actions on a run: done between two optimizer steps, and repeated when an attempt goes back."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from transformers import TrainerControl

from anneal.contracts.attempt.messages import ActionDetails, ActionRequest, ActionStatus, AnsweredSaves
from worker.training.checkpointing import saver
from worker.training.failures import Stopped, one_line
from worker.training.loop import sampling
from worker.training.plugins import hooks
from worker.training.run_state import RunState
from worker.training.trainer_protocol import ServiceTrainer


class ActionRefused(Exception):
    """The action cannot be done with this run; the text says why."""


class Actions:
    """Does the requested actions and reports their results; `trainer` is built already, but may not have started.

    An action that an earlier attempt did after a step is repeated when this attempt reaches that step again, so that
    both train the same way. New requests wait until the earlier ones are repeated.

    New requests take effect in their order. A step ends with its evaluation and then its checkpoint, so a request that
    would overtake one of these waits for the next step.
    """

    def __init__(self, trainer: ServiceTrainer) -> None:
        self._trainer = trainer
        self._run = trainer.run
        self._to_repeat: deque[ActionRequest] = deque(self._run.job.replayed_actions)
        self._saves: list[ActionRequest] = []
        self._last_saves: list[ActionRequest] = []
        """Requests that the last started checkpoint answers."""
        self._evaluations: list[ActionRequest] = []
        self._do: dict[str, Callable[[ActionRequest, TrainerControl], None]] = {
            "checkpoint": self._save_checkpoint,
            "evaluate": self._schedule_evaluation,
            "sample": self._report_samples,
            "set_learning_rate": self._set_learning_rate,
            "extend": self._extend_run,
        }

    def repeat_due(self, control: TrainerControl) -> None:
        """Repeat what an earlier attempt did after the step that just ended; `control` evaluates and saves.

        Call this however the step ends, and before that is decided: a checkpoint of this step must include it, since
        an attempt that resumes from there repeats only later actions.
        """
        step = self._trainer.state.global_step
        while self._to_repeat and (self._to_repeat[0].step or 0) <= step:
            self._apply_action(self._to_repeat.popleft(), control)

    def apply_new_actions(self, control: TrainerControl) -> None:
        """Do newly requested actions, if training continues; `control` evaluates and saves."""
        requests = self._run.control
        if self._saves:  # the checkpoint that they requested could not be written; others wait behind it
            self._save_now(control)
        while (
            not self._to_repeat and (request := requests.next_action) is not None and not self._would_overtake(request)
        ):
            self._apply_action(requests.take_action(), control)

    def _would_overtake(self, request: ActionRequest) -> bool:
        """Return True if the action, done now, would take effect before one that was requested earlier."""
        if request.action == "checkpoint":
            return False
        return bool(self._saves) or (bool(self._evaluations) and request.action != "evaluate")

    def epoch_is_over(self) -> str | None:
        """Return `epoch_end` if the run is to end with an epoch that is now over."""
        over = self._run.control.stop_at_epoch_end and float(self._trainer.state.epoch or 0.5).is_integer()
        return "epoch_end" if over else None

    def _apply_action(self, request: ActionRequest, control: TrainerControl) -> None:
        try:
            self._do[request.action](request, control)
        except ActionRefused as refusal:
            self._report_result(request, "refused", message=str(refusal))
        except Exception as error:  # an action must never fail the run, for any cause
            self._report_result(
                request, "failed", message=f"The action failed: {_describe_error(error)}. Training continues unchanged."
            )

    def _report_result(self, request: ActionRequest, status: ActionStatus, **details: Unpack[ActionDetails]) -> None:
        state = self._trainer.state
        self._run.report.send(
            {
                "type": "action",
                "id": request.id,
                "action": request.action,
                "step": state.global_step,
                "epoch": state.epoch,
                "status": status,
                **details,
            }
        )

    # Evaluating and saving, which follow the step in this order

    def _save_checkpoint(self, request: ActionRequest, control: TrainerControl) -> None:
        self._save_now(control)
        self._saves.append(request)

    def _save_now(self, control: TrainerControl) -> None:
        if not control.should_save:
            control.should_save = True
            self._run.save_kind = "periodic"

    def take_answered_saves(self) -> AnsweredSaves:
        """Return the requests that a reported checkpoint answers, as fields of its record."""
        answered, self._saves = self._saves, []
        self._last_saves = answered
        return {
            "actions": [{"id": one.id, "action": one.action} for one in answered],
            "pinned": any(one.parameters.get("pin") for one in answered),
        }

    def requeue_saves(self) -> None:
        """Let the next checkpoint answer the requests of the last one, which was never written."""
        self._saves, self._last_saves = [*self._last_saves, *self._saves], []

    def fail_saves(self, why: str) -> None:
        """Report that the requested checkpoints are not written."""
        requests, self._saves = self._saves, []
        for request in requests:
            self._report_result(request, "failed", message=why)

    def _schedule_evaluation(self, request: ActionRequest, control: TrainerControl) -> None:
        if self._trainer.eval_dataset is None:
            raise ActionRefused("The run has no evaluation data.")
        control.should_evaluate = True
        self._evaluations.append(request)

    def answer_evaluations(self, metrics: dict[str, float]) -> None:
        """Report that the requested evaluations are done."""
        for request in self._evaluations:
            self._report_result(request, "done", result={"metrics": metrics})
        self._evaluations.clear()

    def evaluation_failed(self, error: Exception) -> None:
        """Report that a requested evaluation failed; training continues."""
        message = f"The evaluation failed: {_describe_error(error)}. Training continues."
        requests, self._evaluations = self._evaluations, []
        for request in requests:
            self._report_result(request, "failed", message=message)
        if not requests:  # requested from an earlier attempt, which was stopped before it
            self._run.report.message(message, level="warning")

    def drop_evaluation(self) -> bool:
        """Handle an interrupted evaluation; return True if it is still due after this same step.

        An evaluation that was only requested stays pending, and is done after a later step.
        """
        requests, self._evaluations = self._evaluations, []
        return not requests or self._trainer.evaluation_is_due() or any(one.step is not None for one in requests)

    # Changes of the schedule

    def _set_learning_rate(self, request: ActionRequest, _control: TrainerControl) -> None:
        self._refuse_if_a_plugin_sets_rates()
        before, rate = self._trainer.args.learning_rate, request.parameters["learning_rate"]
        next_rate = self._apply_change(learning_rate=rate)
        self._report_result(request, "done", result={"before": before, "learning_rate": rate, "next": next_rate})
        self._report_config()

    def _extend_run(self, request: ActionRequest, _control: TrainerControl) -> None:
        self._refuse_if_a_plugin_sets_rates()
        trainer, run, parameters = self._trainer, self._run, request.parameters
        before, epochs = trainer.state.max_steps, parameters.get("epochs")
        total = parameters.get("max_steps") or math.ceil((epochs or 0) * run.steps_per_epoch)
        total = max(total, run.config.min_steps or 0)
        if total <= before:
            raise ActionRefused(f"The run trains {before} steps already, and this would be {total}; request more.")
        stop = run.config.stop_at_step
        # An action of an earlier attempt is repeated in any case, or this one would have a different schedule.
        if request.step is None and stop is not None and run.state.first_step < stop < total:
            raise ActionRefused(f"The run ends at step {stop}, which is its `stop_at_step`, and not at step {total}.")
        changed = {"max_steps": total} if epochs is None else {"max_steps": None, "epochs": epochs}
        next_rate = self._apply_change(total_steps=total, **changed)
        trainer.state.max_steps = total
        result = {"before": before, "total_steps": total, "next_learning_rate": next_rate}
        self._report_result(request, "done", result=result, total_steps=total)
        self._report_config()

    def _refuse_if_a_plugin_sets_rates(self) -> None:
        if hooks.controls_learning_rate(self._run.config):
            raise ActionRefused(
                "The run's optimizer or scheduler is a plugin, and the effect of a different learning rate or of more "
                "steps on it during training is unknown. Stop the run, and resume it with the changes."
            )

    def _apply_change(self, *, total_steps: int | None = None, **changed: Any) -> float:
        """Apply a change and store it in every checkpoint from now on: completely, or not at all.

        Returns the learning rate of the next step.
        """
        state: RunState = self._run.state
        trainer = self._trainer
        with self._rollback_on_error():
            state.changed = state.changed | changed
            state.total_steps = total_steps or state.total_steps
            self.apply_changes()
            trainer.lr_scheduler.lr_lambdas = [self._schedule_factor()] * len(trainer.lr_scheduler.lr_lambdas)
            saver.reapply_rates(trainer, [group["weight_decay"] for group in trainer.optimizer.param_groups])
            return float(trainer.lr_scheduler.get_last_lr()[0])

    @contextmanager
    def _rollback_on_error(self) -> Iterator[None]:
        """Restore everything that a change touches if the block raises."""
        trainer, run = self._trainer, self._run
        owners = (run, run.state, trainer.args, trainer.lr_scheduler)
        before = [(vars(owner), dict(vars(owner))) for owner in owners]
        # Neither weights nor moments: a change of learning rates touches none of them.
        groups = [(group, dict(group)) for group in trainer.optimizer.param_groups]
        facts = (trainer.facts, dict(trainer.facts))
        try:
            yield
        except BaseException:
            for now, then in (*before, *groups, facts):
                now.update(then)  # never clears first: the thread that writes a checkpoint reads these dictionaries
                for new in now.keys() - then.keys():
                    del now[new]
            raise

    def follow_changes(self, changed: dict[str, Any], total_steps: int | None) -> None:
        """Apply the changes that rank 0 has made, as another rank."""
        if total_steps is not None:
            self._trainer.state.max_steps = total_steps
        self._run.state.changed = {}
        self._apply_change(total_steps=total_steps, **changed)

    def apply_changes(self) -> None:
        """Apply the stored changes: now, or before a trainer that resumes from a checkpoint starts."""
        trainer, run = self._trainer, self._run
        if run.state.changed:
            run.config = run.config.model_copy(update=run.state.changed)
            trainer.args.learning_rate = run.config.learning_rate
        if run.state.total_steps is not None:
            trainer.args.max_steps = run.state.total_steps
            trainer.facts["total_steps"] = run.state.total_steps

    def _schedule_factor(self) -> Callable[[int], float]:
        """Return the schedule of a run that has had the current number of steps from the start."""
        trainer = self._trainer
        in_force, trainer.lr_scheduler = trainer.lr_scheduler, None
        try:
            # With a separate optimizer: a scheduler sets the learning rates of its optimizer when it is created.
            own = torch.optim.SGD([torch.zeros(1)], lr=trainer.args.learning_rate)
            factor: Callable[[int], float] = trainer.create_scheduler(trainer.args.max_steps, own).lr_lambdas[0]
        finally:
            trainer.lr_scheduler = in_force
        return factor

    def _report_config(self) -> None:
        self._run.report_config(self._trainer.replaced, self._trainer.facts)

    # Sampling

    def _report_samples(self, request: ActionRequest, _control: TrainerControl) -> None:
        if self._run.is_sharded:
            raise ActionRefused("The run is sharded, so all of its devices generate together: use `sample_steps`.")
        step, prompts = self._trainer.state.global_step, request.parameters["prompts"]
        try:
            texts = sampling.generate_texts(
                self._trainer, prompts, request.parameters["max_new_tokens"], request.parameters["temperature"]
            )
        except Stopped:
            return  # handled after the next step; the request stays pending for the next attempt
        except Exception as error:  # training continues after any failure
            reason = _describe_error(error)
            return self._report_result(request, "failed", message=f"Sampling failed: {reason}. Training continues.")
        pairs = list(zip(prompts, texts, strict=True))
        for prompt, text in pairs:
            self._run.report.send(
                {"type": "sample", "step": step, "prompt": prompt, "completion": text, "action_id": request.id}
            )
        samples = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
        self._report_result(request, "done", result={"samples": samples})


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}".rstrip(".")
