"""Planning of a run's optimizer step by measurement: micro-batch and recomputed layers, before the first step.

The longest rows go forward and backward on the device as in training. `StepPlanner` says which passes to measure, and
chooses. Nothing of a pass is left behind: the run trains as if it had never been measured.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from anneal.contracts.training_config.resolution import Replacement
from app.estimator.memory import optimizer_state
from worker.checkpoint_files import resume_fidelity
from worker.training.context import TrainingContext
from worker.training.loop import probe, sampling
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.model.compilation import reported_compiler_errors
from worker.training.planning import memory_plan, pass_meter
from worker.training.planning.pass_meter import PassMeter, Reading
from worker.training.planning.recomputation import Recomputation
from worker.training.planning.step_planner import (
    MeasuredPass,
    StepChoices,
    StepPlan,
    StepPlanner,
    Trial,
    micro_batches,
)

_SAMPLES = 16
"""Micro-batches whose mean number of positions stands for that of all."""
_COMPILED_SAMPLES = 4
_PLAIN = (bool, int, float, str, type(None))


def plan_step(trainer: ServiceTrainerMixin, replaced: list[Replacement]) -> dict[str, Any]:
    """Choose micro-batch and recomputed layers of a run, apply them to the trainer, and return run info about them.

    Call it once the trainer has its model on the device, before there is an optimizer. A value that the user set is
    never changed. The choice is added to `replaced`, and to the run's configuration.
    """
    run = trainer.run
    if run.is_inference:
        return {}
    recomputation, meter = Recomputation(trainer.model), pass_meter.meter_of(run.machine)
    sizes = _possible_micro_batches(trainer)
    rows = _rows_of_checkpoint(run)
    if len(sizes) > 1 and rows in sizes:
        _set_micro_batch(trainer, replaced, rows, "The checkpoint was made with micro-batches of this size.")
        sizes = (rows,)
    is_open = run.config.gradient_checkpointing == "auto" or len(sizes) > 1
    if meter is None or not is_open or not memory_plan.is_measured(run):
        _set_recomputation(trainer, recomputation, recomputation.layers_of(run.config.gradient_checkpointing))
        return {}
    began = time.monotonic()
    with reported_compiler_errors():
        plan = _measure_passes(trainer, recomputation, meter, sizes)
    reason = _plan_reason(plan)
    if memory_plan.size_that_did_not_fit(run):
        reason = f"Planned for `batch_size` {plan.rows}, which did not fit in an earlier attempt: {reason}"
    elif plan.rows != run.config.batch_size and len(sizes) > 1:
        _set_micro_batch(trainer, replaced, plan.rows, reason)
    if run.config.gradient_checkpointing == "auto":
        used = memory_plan.to_config_value(plan.recomputed, recomputation.layers)
        replaced.append(Replacement(field="gradient_checkpointing", requested="auto", used=used, reason=reason))
        run.config = run.config.model_copy(update={"gradient_checkpointing": used})
    _set_recomputation(trainer, recomputation, plan.recomputed)
    seconds = time.monotonic() - began
    text = f"{reason}{_alternatives_text(plan)} {len(plan.passes)} passes were measured in {seconds:.1f} s."
    run.report.message(text, level="info" if plan.fits else "warning")
    return {"step_plan": _plan_facts(plan, seconds)}


def compile_ahead(trainer: ServiceTrainerMixin) -> dict[str, Any]:
    """Compile the layers of a run that asks for it, and return the seconds that it took as run info.

    The longest, the shortest and some other micro-batches go forward and backward, so that the first steps compile
    nothing, and their times are those of a step.

    Raises:
        TrainingFailure: `config_error`, if this worker or this model cannot compile.
    """
    run = trainer.run
    if not run.config.torch_compile or run.is_inference:
        return {}
    run.report.message("The layers are being compiled; the first run of a model takes minutes.")
    began = time.monotonic()
    rows = min(run.config.batch_size, _rows_per_device(trainer))
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    with leaving_no_trace(trainer), run.ranks.alone(), reported_compiler_errors():
        batches = _Batches(trainer)
        # Padding, lengths and gradients of the input decide which variants of a layer are needed.
        for batch in (
            batches.longest_batch(rows),
            batches.shortest_batch(rows),
            *batches.random_batches(rows, _COMPILED_SAMPLES),
        ):
            run.raise_if_stopped()
            run.report.alive()
            _build_pass(trainer, trained, batch, accumulates=False)()
    return {"compile_seconds": time.monotonic() - began}


def _possible_micro_batches(trainer: ServiceTrainerMixin) -> tuple[int, ...]:
    """Return the sizes that the micro-batches may have, with as many rows per step: one, if that is fixed.

    It is, if the user or a repair has set it, or if the loss of a row depends on the other rows of its micro-batch.
    """
    run, config = trainer.run, trainer.run.config
    is_set = bool(run.user_set_fields & {"batch_size", "gradient_accumulation_steps"})
    is_part_of_the_loss = (
        run.method.mixes_rows
        or run.method.generates
        or config.neftune_noise_alpha is not None  # its noise depends on the positions of the batch
        or bool(getattr(trainer, "aux_loss_enabled", False))  # balances the experts of each micro-batch
    )
    if is_set or is_part_of_the_loss or config.activation_offload:
        return (config.batch_size,)
    most = max(config.batch_size, _rows_per_device(trainer))
    return micro_batches(config.batch_size * config.gradient_accumulation_steps, most)


def _rows_per_device(trainer: ServiceTrainerMixin) -> int:
    return max(len(trainer.train_dataset) // trainer.run.ranks.data_parallel_size, 1)


def _rows_of_checkpoint(run: TrainingContext) -> int | None:
    """Return the rows of the micro-batches that the checkpoint to resume from was made with."""
    return None if run.resume_from is None else resume_fidelity.batch_size(run.resume_from.path)


def _set_micro_batch(trainer: ServiceTrainerMixin, replaced: list[Replacement], rows: int, reason: str) -> None:
    """Let a step have as many rows as before, in micro-batches of `rows`."""
    run, args, config = trainer.run, trainer.args, trainer.run.config
    if rows == config.batch_size:
        return
    steps = config.batch_size * config.gradient_accumulation_steps // rows
    same_rows = "As many rows per step as before."
    for field, used, why in (("batch_size", rows, reason), ("gradient_accumulation_steps", steps, same_rows)):
        replaced.append(Replacement(field=field, requested=getattr(config, field), used=used, reason=why))
    extra = dict(config.extra)
    if config.trainer_options.eval_batch_size is None and trainer.eval_dataset is not None:
        # An evaluation keeps no activations, but may materialize logits, which the plan does not count.
        args.per_device_eval_batch_size = extra["eval_batch_size"] = min(config.batch_size, rows)
    run.config = config.model_copy(update={"batch_size": rows, "gradient_accumulation_steps": steps, "extra": extra})
    args.per_device_train_batch_size, args.gradient_accumulation_steps = rows, steps
    trainer._train_batch_size = args.train_batch_size


def _set_recomputation(trainer: ServiceTrainerMixin, recomputation: Recomputation, layers: int) -> None:
    recomputation.recompute_first(layers)
    trainer.args.activation_checkpointing = layers > 0
    trainer.recomputed_part = layers / recomputation.layers


def _measure_passes(
    trainer: ServiceTrainerMixin, recomputation: Recomputation, meter: PassMeter, sizes: tuple[int, ...]
) -> StepPlan:
    """Measure passes on all ranks until the plan is known."""
    run, config = trainer.run, trainer.run.config
    tried = memory_plan.size_that_did_not_fit(run)
    if len(sizes) == 1:
        steps = int(tried.get("gradient_accumulation_steps", config.gradient_accumulation_steps))
        sizes = (min(int(tried.get("batch_size", sizes[0])), _rows_per_device(trainer)),)
        rows_per_step = sizes[0] * steps
    else:
        rows_per_step = config.batch_size * config.gradient_accumulation_steps
    with leaving_no_trace(trainer), run.ranks.alone():
        batches = _Batches(trainer)
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in trained)
        later = optimizer_state(trained_tensors(trainer.model), config)
        if run.ranks.size > 1:
            later += gradients  # the buckets in which they are exchanged
        bounds = (0, recomputation.layers)
        if config.gradient_checkpointing != "auto":
            bounds = (recomputation.layers_of(config.gradient_checkpointing),) * 2
        planner = StepPlanner(
            StepChoices(
                rows_per_step=rows_per_step,
                micro_batches=sizes,
                configured_rows=config.batch_size if len(sizes) > 1 else sizes[0],
                layers=recomputation.layers,
                fewest_recomputed=bounds[0],
                most_recomputed=bounds[1],
                longest_tokens={rows: _count_positions(batches.longest_batch(rows)) for rows in sizes},
                mean_tokens={rows: batches.mean_positions(rows) for rows in sizes},
                usable_bytes=min(run.ranks.gather_values(meter.usable_bytes())),
                allocated_bytes=max(run.ranks.gather_values(meter.allocated_bytes())),
                later_bytes=later,
            )
        )

        def measure_trial(trial: Trial) -> MeasuredPass:
            run.raise_if_stopped()
            run.report.alive()
            recomputation.recompute_first(trial.recomputed)
            batch = batches.longest_batch(trial.rows)
            accumulates = rows_per_step > trial.rows
            run_pass = _build_pass(trainer, trained, batch, accumulates=accumulates)
            # Of two passes in a row, the host launches the second one while the device computes the first.
            in_a_row = 2 if accumulates else 1
            if config.torch_compile:
                pass_meter.measure_pass(meter, run_pass)  # other layers are recomputed, which compiles them again
            reading = pass_meter.measure_pass(meter, lambda: _repeat_pass(run_pass, in_a_row))
            # Each rank has measured by itself, and all must choose the same.
            every: list[Reading] = run.ranks.gather_values(reading)
            peaks = [each.peak_bytes for each in every if each.peak_bytes is not None]
            peak = max(peaks) if len(peaks) == len(every) else None
            return MeasuredPass(trial, _count_positions(batch), peak, max(each.seconds for each in every) / in_a_row)

        measure_trial(Trial(sizes[0], bounds[1]))  # the first pass of a process loads and plans kernels
        while (trial := planner.next_trial()) is not None:
            planner.add_measurement(measure_trial(trial))
        plan = planner.best_plan()
    meter.release()
    return plan


def _repeat_pass(run_pass: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run_pass()


def _build_pass(
    trainer: ServiceTrainerMixin, trained: list[nn.Parameter], batch: dict[str, Any], *, accumulates: bool
) -> Callable[[], None]:
    """Return a function that takes a batch forward and backward; with gradients of an earlier one if it accumulates."""

    def run_pass() -> None:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if accumulates else None
        inputs = trainer._prepare_inputs(dict(batch))
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(trainer.model, inputs)
        del inputs
        loss.backward()

    return run_pass


class _Batches:
    """Micro-batches of the training data, collated as in training, without row numbers."""

    def __init__(self, trainer: ServiceTrainerMixin) -> None:
        self._trainer = trainer
        self._order = np.argsort(-probe.token_lengths(trainer.train_dataset), kind="stable")
        self._shuffled = np.random.default_rng(trainer.run.config.seed).permutation(self._order)
        self._longest: dict[int, dict[str, Any]] = {}

    def longest_batch(self, rows: int) -> dict[str, Any]:
        """Return the micro-batch of the longest rows."""
        if rows not in self._longest:
            self._longest[rows] = self._collate_rows(self._order[:rows])
        return self._longest[rows]

    def shortest_batch(self, rows: int) -> dict[str, Any]:
        """Return the micro-batch of the shortest rows."""
        return self._collate_rows(self._order[-rows:])

    def mean_positions(self, rows: int) -> float:
        """Return the positions of a micro-batch of this many rows drawn at random, padding included."""
        return float(np.mean([_count_positions(batch) for batch in self.random_batches(rows, _SAMPLES)]))

    def random_batches(self, rows: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield at most `count` micro-batches drawn at random."""
        for start in range(0, max(len(self._shuffled) - rows, 0) + 1, rows)[:count]:
            yield self._collate_rows(self._shuffled[start : start + rows])

    def _collate_rows(self, numbers: Any) -> dict[str, Any]:
        rows = self._trainer.train_dataset
        batch: dict[str, Any] = self._trainer.data_collator([rows[int(number)] for number in numbers])
        self._trainer.take_rows(batch)
        return batch


def _count_positions(batch: dict[str, Any]) -> int:
    return int(batch["input_ids"].numel())


@contextmanager
def leaving_no_trace(trainer: ServiceTrainerMixin) -> Iterator[None]:
    """Train in the block, and restore everything that a step would have changed: no weights, which it must not change.

    Restored are random number generators, gradients, buffers and plain values of modules, such as lengths seen, and
    what the trainer counts.
    """
    model = trainer.model
    values = [(module, _plain_values(module)) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.to("cpu", copy=True))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    metrics, tokens = deepcopy(trainer._metrics), trainer._total_train_tokens
    throughput = dict(vars(trainer.throughput))
    model.train()
    try:
        with sampling.preserve_rng():
            yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for module, name, buffer, content in buffers:
            buffer.copy_(content)
            module._buffers[name] = buffer  # some are replaced
        for module, before in values:
            for name, value in before.items():
                setattr(module, name, value)
        trainer._metrics, trainer._total_train_tokens = metrics, tokens
        vars(trainer.throughput).update(throughput)
        trainer.step_phases.take_seconds()


def _plain_values(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def trained_tensors(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield each trained tensor as `Trained.tensors` does: kind of its layer, rows, columns."""
    for module in model.modules():
        kind = "embedding" if isinstance(module, nn.Embedding) else "linear"
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                yield kind, parameter.shape[0], parameter.numel() // parameter.shape[0]


def _plan_reason(plan: StepPlan) -> str:
    needed = "more than the device has" if plan.needed_bytes is None else _format_bytes(plan.needed_bytes)
    usable = _format_bytes(plan.usable_bytes)
    reason = f"The longest micro-batch (rows: {plan.rows}) was measured to need {needed} of {usable}"
    if not plan.fits:
        return f"{reason}, even with all layers recomputed, so the run may run out of memory."
    layers = f"with {plan.recomputed} of {plan.layers} layers recomputed"
    return f"{reason} {layers}, and an average step to take {plan.step_seconds or 0:.3g} s."


def _alternatives_text(plan: StepPlan) -> str:
    others = (
        f"{other.trial.rows}: {other.trial.recomputed} layers, {_format_bytes(other.needed_bytes)}, "
        f"{other.step_seconds:.3g} s"
        for other in plan.alternatives
    )
    listed = "; ".join(others)
    return f" Other micro-batches, as predicted: {listed}." if listed else ""


def _plan_facts(plan: StepPlan, seconds: float) -> dict[str, Any]:
    return {
        "batch_size": plan.rows,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "recomputed_layers": plan.recomputed,
        "layers": plan.layers,
        "fits": plan.fits,
        "needed_bytes": plan.needed_bytes,
        "usable_bytes": plan.usable_bytes,
        "step_seconds": plan.step_seconds,
        "alternatives": [
            {**other.trial._asdict(), "needed_bytes": other.needed_bytes, "step_seconds": other.step_seconds}
            for other in plan.alternatives
        ],
        "passes": [
            {**each.trial._asdict(), "tokens": each.tokens, "peak_bytes": each.peak_bytes, "seconds": each.seconds}
            for each in plan.passes
        ],
        "seconds": seconds,
    }


def _format_bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
