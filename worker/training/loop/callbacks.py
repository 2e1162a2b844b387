"""Callback between two optimizer steps: the journal, metrics, limits and stop requests."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from anneal.contracts.attempt.messages import AnomalyDetails, StepMetrics
from app.infra.terminal_text import plain_number
from worker.training.checkpointing import rng_state
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.loop import decision, sampling
from worker.training.loop.decision import LoopTrainer


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Decides after every step what follows; the only place where training is ended early."""

    def __init__(self, run: TrainingContext, trainer: LoopTrainer) -> None:
        self.run = run
        self.trainer = trainer
        self._step_began = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.run.state.ended_by = None
        self.run.ranks.stop_reporting_waits()
        if self.run.ranks.size > 1 and self.run.resume_from is None:
            # Every rank has drawn the same numbers so far, as the weights and the order of the rows must be the same.
            rng_state.seed_generators((self.run.config.seed, 0, self.run.ranks.rank))
        self.trainer.throughput.begin(self.trainer.trained_tokens())
        self.run.report.send(
            {"type": "phase", "name": "training", "start_step": state.global_step, "total_steps": state.max_steps}
        )
        if self.run.ranks.is_first and self.run.stop_requested is not None:
            self.trainer.end_early(self.run.stop_requested.why, "discard")
        decision.share_decision(self.trainer)
        if self._samples and self.run.state.samples_pending and not control.should_training_stop:
            sampling.report_samples(self.trainer)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_began = time.monotonic()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.step_phases.enter_phase("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.step_phases.enter_phase(None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        run, step = self.run, state.global_step
        run.report.alive()
        loss, rows = self.trainer.take_step()
        took = time.monotonic() - self._step_began - self.trainer.throughput.take_wait()
        run.state.seconds += took
        if self.trainer.skips_step:
            run.journal.skip_step(step, rows)
            run.report.message(f"Step {step} is skipped: an earlier attempt found it to be bad.", level="warning")
        else:
            run.journal.record_step(step, loss.hex(), rows)
            run.state.loss = loss
            run.state.losses.append(loss)
            run.state.samples += len(rows)
            self.trainer.throughput.record_step(took, len(rows))
        if run.is_sharded:
            sampling.sample_if_due(self.trainer)
        if run.ranks.is_first:
            self._decide_after_step(state, control)
        decision.share_decision(self.trainer)

    @property
    def _samples(self) -> bool:
        """True if this rank takes part in the generation of samples."""
        return self.run.ranks.is_first or self.run.is_sharded

    def _decide_after_step(self, state: TrainerState, control: TrainerControl) -> None:
        run, step = self.run, state.global_step
        self.trainer.saving.handle_step(self.trainer)
        self.trainer.actions.repeat_due(control)
        if not run.is_sharded:
            sampling.sample_if_due(self.trainer)

        if step >= state.max_steps:  # a stop that arrives now finds the run complete
            control.should_log = control.should_save = True
            run.save_kind = "final"
            return
        # The database is unreachable: save now, in case it stays unreachable for longer than the lease allows.
        is_requested = run.control.take_checkpoint_request()
        if is_requested or step % run.save_every == 0:
            control.should_save = True
            run.save_kind = "periodic"
        limit = run.state.limit_reached(run.config, step) or self.trainer.actions.epoch_is_over()
        stop = run.stop_requested
        if stop is not None and (limit is None or stop.why == "stop"):
            self.trainer.end_early(stop.why, stop.mode)
        elif limit is not None:  # also during a drain: another attempt would train past the limit
            self.trainer.end_early(limit, "checkpoint")
        else:
            self.trainer.actions.apply_new_actions(control)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.run.report.alive()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.run.report.alive()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        if self.run.ranks.is_first:
            self._judge_evaluation(state, control, metrics)
        decision.share_decision(self.trainer)

    def _judge_evaluation(self, state: TrainerState, control: TrainerControl, metrics: dict[str, float]) -> None:
        """Decide what follows from the metrics of an evaluation."""
        run, name = self.run, self.run.method.eval_metric
        value = metrics.get(name)
        if value is None or run.is_inference:
            return
        if not self.trainer.evaluation_is_due():  # only requested: training does not depend on it
            if math.isfinite(value):
                run.state.objective, run.state.eval_step = value, state.global_step
            return
        if not math.isfinite(value):
            summary = f"`{name}` of the evaluation at step {state.global_step} is {value}."
            raise TrainingFailure(
                "non_finite_loss",
                f"{summary} Lower `learning_rate`, or check the evaluation data.",
                details=AnomalyDetails(summary=summary, in_evaluation=True, singled_out=[]),
            )
        is_best = run.state.record_objective(value, state.global_step, run.method.higher_is_better)
        if is_best and not control.should_save and state.global_step > 0:  # step 0 is the base model
            control.should_save = True
            run.save_kind = "best"
        patience = run.config.early_stopping_patience
        patient = patience is None or run.state.evals_without_improvement < patience
        if not patient and state.global_step < state.max_steps:
            self.trainer.end_early("early_stopping", "checkpoint")
            run.save_kind = "final"

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        run = self.run
        if "loss" not in logs or not run.state.losses:
            return
        if not run.ranks.is_first:
            run.state.losses.clear()
            return
        loss = logs["loss"]
        run.state.losses.clear()
        if run.state.best_loss is None or loss < run.state.best_loss:
            run.state.best_loss = loss
        samples_per_second, speed = self.trainer.throughput.take_rates(self.trainer.trained_tokens())
        peak, memory = self.trainer.gpu_memory.take_peak()
        metrics: StepMetrics = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": logs.get("learning_rate"),
            "grad_norm": logs.get("grad_norm"),
            "gpu_memory_mb": peak,
            "samples_per_second": samples_per_second,
        }
        names = self.trainer.metric_names()
        measured = {ours: logs[theirs] for theirs, ours in names.items() if logs.get(theirs) is not None}
        extra = {**measured, **speed, **self.trainer.step_phases.take_seconds(), **memory, **run.state.reward_usage}
        extra |= self.trainer.plugin_callbacks.reported_metrics({*metrics, *extra})
        run.record_metric(metrics, extra, state.max_steps)
        run.state.last_metric = {"step": state.global_step, "epoch": state.epoch, "loss": loss}
        self.trainer.report_samples()


_FIRST = ("loss", "reward")
"""Metrics at the beginning of a line, where they are in sight."""


class MetricLines(TrainerCallback):  # type: ignore[misc]
    """Prints the metrics of each step and evaluation as a line of the log."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and state.is_local_process_zero:
            sys.stdout.write(f"{metric_line(state.global_step, state.max_steps, logs)}\n")
            sys.stdout.flush()


def metric_line(step: int, total: int, logs: Mapping[str, Any]) -> str:
    """Return a line such as `step 40/200  loss 2.31  learning_rate 0.0002`."""
    place = f"step {step}/{total}" if total > 0 else f"step {step}"
    names = sorted(logs.keys() - {"step", "total_flos"}, key=lambda name: (name not in _FIRST, [*logs].index(name)))
    values = ((name, logs[name]) for name in names)
    numbers = (f"{name} {plain_number(value) if isinstance(value, float) else value}" for name, value in values)
    return "  ".join([place, *numbers])


class SharingCallback(TrainerCallback):  # type: ignore[misc]
    """Makes every rank follow what the plugins before it have decided on rank 0."""

    def __init__(self, trainer: LoopTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        decision.share_decision(self._trainer)

    def on_log(self, *_: Any, **__: Any) -> None:
        decision.share_decision(self._trainer)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        decision.share_decision(self._trainer)
