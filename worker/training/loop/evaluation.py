"""Evaluations of a trainer: on several datasets, divided among the ranks, and interrupted by a stop."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer
from transformers.trainer_utils import speed_metrics

from anneal.contracts.stop import StopRequest
from worker.training.checkpointing import rng_state
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure
from worker.training.loop import decision, sampling
from worker.training.loop.actions import Actions
from worker.training.loop.evaluation_means import EvaluationMeans
from worker.training.model.parallel.router_loss import RouterLoss
from worker.training.plugins import metric_functions

MAIN = "eval"
"""Name of the evaluation data that decisions depend on, if a trainer is given several sets."""


class _Failed(Exception):
    """A part of an evaluation failed on every rank, with this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EvaluationMixin(Trainer):  # type: ignore[misc]
    """Part of `ServiceTrainerMixin` that evaluates.

    `eval_dataset` may be a dictionary: the rows that decisions depend on as `MAIN`, and further sets, each by the start
    of the names of its metrics. Each rank evaluates its own rows, and the means are merged.
    """

    run: TrainingContext
    actions: Actions
    eval_dataset: Any
    router_loss: RouterLoss | None = None
    """Auxiliary loss of a mixture of experts over all ranks; None: there is none, or one rank."""

    def __init__(self, **options: Any) -> None:
        self._eval_batches = 0
        self._eval_total = 0
        self._eval_counted = 0
        """Batches of this rank that count; after them, it only takes part in the forward passes of the others."""
        self._eval_message: str | None = None
        self._eval_means = EvaluationMeans()
        self.own_metrics = metric_functions.Evaluation({})
        """Metric functions of the current evaluation."""
        super().__init__(**options)
        self.extra_eval_datasets: dict[str, Dataset] = {}
        """Evaluation sets that nothing but their metrics depends on."""
        if isinstance(self.eval_dataset, dict):
            self.extra_eval_datasets = dict(self.eval_dataset)
            self.eval_dataset = self.extra_eval_datasets.pop(MAIN)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate on the held-out data; a stop request interrupts it and leaves it to the resumed run."""
        run = self.run
        run.report.send({"type": "phase", "name": "evaluating"})
        state_before = rng_state.current_states()
        is_due = self.evaluation_is_due()
        # A requested evaluation leaves no trace in training; one that is due is part of it, as in TRL.
        trace = nullcontext() if is_due else sampling.preserve_rng()
        try:
            with trace:
                # First, so that a stop during one of them finds that the evaluation has decided nothing yet.
                extra = self._evaluate_extra_datasets()
                self._begin_evaluation(None)
                metrics = super().evaluate(*args, **options)
                results = self.named_metrics(metrics)
                results |= self._own_results(results)
                results |= _without_collisions(extra, results)
        except Stopped:
            rng_state.set_current(state_before)
            self._metrics["eval"].clear()
            run.state.eval_pending = self.actions.drop_evaluation()
            self.control.should_evaluate = False
            self.control.should_training_stop = True
            if self.state.global_step < self.state.max_steps:
                request = run.stop_requested or StopRequest("discard")
                self.end_early(request.why, request.mode)
            decision.share_decision(self)
            return {}
        except _Failed as failed:
            # Only such a failure lets training continue: after any other one, such as that of a callback on rank 0, the
            # other ranks may wait for this one.
            if is_due or run.forwards_together:
                raise failed.error from failed.error.__cause__
            self._metrics["eval"].clear()
            run.state.eval_pending = False
            self.actions.evaluation_failed(failed.error)
            run.report.send({"type": "phase", "name": "training"})
            return {}
        run.state.eval_pending = False
        run.record_evaluation(self.state.global_step, self.state.epoch, results)
        decision.share_decision(self)  # a plugin may have decided something because of the metrics
        self.actions.answer_evaluations(results)
        if not self.control.should_training_stop and not run.is_inference:
            run.report.send({"type": "phase", "name": "training"})
        return dict(metrics)

    def _begin_evaluation(self, message: str | None) -> None:
        self._eval_batches = 0
        self._eval_message = message

    def _evaluate_extra_datasets(self) -> dict[str, float]:
        """Return the metrics of the extra sets, without a trace in training and in the evaluation that follows."""
        results: dict[str, float] = {}
        for prefix, rows in self.extra_eval_datasets.items():
            self._begin_evaluation(f"evaluating {prefix.removeprefix(f'{MAIN}_')}")
            with sampling.preserve_rng():
                measured = self._measure_rows(rows)
            named = {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in measured.items()}
            results |= _without_collisions(named, results)
        return results

    def _measure_rows(self, rows: Dataset) -> dict[str, float]:
        """Return the metrics of rows by the names used here, as `evaluate` does, but without any callback or log."""
        began = time.time()
        done = self.evaluation_loop(self.get_eval_dataloader(rows), "Evaluation", prediction_loss_only=True)
        means, self._metrics["eval"] = self._metrics["eval"], defaultdict(list)
        metrics = done.metrics | speed_metrics("eval", began, num_samples=done.num_samples)
        results = self.named_metrics(metrics | {f"eval_{name}": values[0] for name, values in means.items()})
        return results | self._own_results(results)

    def _own_results(self, reported: Mapping[str, float]) -> dict[str, float]:
        """Return the results of the metric functions, which rank 0 calls."""
        results, error = {}, None
        batches_of_ranks = self.run.ranks.gather_values(self.own_metrics.kept)
        if self.run.ranks.is_first:
            try:
                for batches in batches_of_ranks:
                    self.own_metrics.pass_kept(batches)
                results = self.own_metrics.results(reported)
            except TrainingFailure as failure:
                error = failure
        self._agree_on(error)
        return self.run.ranks.broadcast_value(results)

    def _agree_on(self, error: Exception | None, stopped: bool = False) -> None:
        """End a part of the evaluation that each rank does by itself.

        Raises:
            _Failed: it failed on a rank.
            Stopped: a rank was stopped in it.
        """
        failure, stopped = self.run.ranks.agree_on_end(error, stopped)
        if failure is not None:
            raise _Failed(failure) from failure
        if stopped:
            raise Stopped

    def evaluation_is_due(self) -> bool:
        """Return True if the configuration schedules an evaluation after the current step, requested or not."""
        step, every = self.state.global_step, self.run.eval_every
        return step == 0 or step >= self.state.max_steps or (every is not None and step % every == 0)

    def named_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation by the names used here, without missing ones."""
        names = {
            "loss": "loss",
            "runtime": "seconds",
            "samples_per_second": "samples_per_second",
            **self.metric_names(),
        }
        values = {ours: metrics.get(f"eval_{theirs}") for theirs, ours in names.items()}
        return {f"eval_{ours}": value for ours, value in values.items() if value is not None}

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        ranks = self.run.ranks
        if ranks.size == 1:
            return super().get_eval_dataloader(eval_dataset)
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        own: Sequence[int] = range(ranks.data_parallel_rank, len(rows), ranks.data_parallel_size)
        if self.run.metric_factories and metric_functions.are_given_logits(self.run.method):
            own = range(len(rows) if ranks.is_first else 0)
        size = self.args.eval_batch_size
        self._eval_counted = math.ceil(len(own) / size)
        most = math.ceil(math.ceil(len(rows) / ranks.data_parallel_size) / size)
        if self.run.forwards_together and self._eval_counted < most:
            own = [*own, 0]  # one more batch, as its batches are full
        with ranks.alone():
            return super().get_eval_dataloader(rows.select(own))

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        # Each rank evaluates every n-th row by itself, so that no row counts twice; then their means are merged.
        done: Any = None
        ranks, error, stopped = self.run.ranks, None, False
        self._eval_total = len(dataloader)
        self._eval_means = EvaluationMeans()
        keeps = ranks.size > 1 and not metric_functions.are_given_logits(self.run.method)
        try:
            # Code of a plugin, which may fail on one rank only.
            self.own_metrics = metric_functions.Evaluation(self.run.metric_factories, keeps)
            with ranks.alone(), self.run.stopping_together(self.run.forwards_together):
                done = super().evaluation_loop(dataloader, *args, **options)
        except Stopped:
            stopped = True
        except Exception as problem:
            if self.run.forwards_together:
                raise  # the other ranks wait for a forward pass of this one
            error = problem
        self._agree_on(error, stopped)
        if ranks.size > 1:
            self._eval_means.merge_parts(
                ranks.gather_values(self._eval_means.own_part(self._metrics["eval"])), self._metrics["eval"]
            )
            done = done._replace(num_samples=sum(ranks.gather_values(done.num_samples)) // ranks.per_sequence)
        done.metrics["eval_loss"] = self._eval_means.loss
        self._eval_means.reduce_metrics(self._metrics["eval"])
        return done

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        self._eval_batches += 1
        terms = self.eval_terms(inputs) if self._counts_batch() else 0
        self.take_rows(inputs)
        self.run.report_progress("evaluating", self._eval_batches, self._eval_total, self._eval_message)
        together = self.run.routes_together
        with self.routing(counts=self._counts_batch(), in_evaluation=True) if together else nullcontext():
            outputs = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._eval_means.add_batch(outputs[0].item(), terms, self._metrics["eval"])
        self._log_progress()
        if self.run.metric_factories:
            with torch.no_grad(), self.compute_loss_context_manager():
                self.update_own_metrics(model, inputs)
        return outputs

    def _log_progress(self) -> None:
        every = self.run.config.trainer_options.eval_log_steps
        if every is None or self._eval_batches % every or not self.run.ranks.is_first:
            return
        loss = "" if self.run.method.generates else f", loss {self._eval_means.loss:.4g} so far"
        done = f"{self._eval_batches:,} of {self._eval_total:,} batches"
        self.run.report.message(f"Evaluation at step {self.state.global_step:,}: {done}{loss}.")

    def routing(self, **options: bool) -> AbstractContextManager[None]:
        """During the block, every rank computes the auxiliary loss of the routers as `RouterLoss.over_ranks` says."""
        return nullcontext() if self.router_loss is None else self.router_loss.over_ranks(**options)

    def _counts_batch(self) -> bool:
        return not self.run.forwards_together or self._eval_batches <= self._eval_counted

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        """Pass a batch of an evaluation to the metric functions; by default it has `input_ids` and `completion_mask`.

        The loss is computed without the logits of a whole batch, so metrics need another forward pass.
        """
        batch = self._prepare_inputs(inputs)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        self.own_metrics.update(logits, ids.masked_fill(batch["completion_mask"] == 0, -100))

    def eval_terms(self, inputs: Any) -> int:
        """Return the number of terms that the loss and the metrics of a batch are means of: by default its rows."""
        return len(self.rows_of(inputs))


def _without_collisions(extra: dict[str, float], reported: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of extra sets, whose names must differ from those of the other metrics.

    Raises:
        _Failed: two metrics have the same name, on every rank.
    """
    if taken := sorted(extra.keys() & reported.keys()):
        raise _Failed(
            TrainingFailure(
                "config_error",
                f"Two metrics of the evaluation are named `{taken[0]}`: give the extra evaluation set another name.",
            )
        )
    return extra
