"""Run on one kind of device, as the formulas see it."""

import math
from dataclasses import replace
from typing import Literal

from anneal.contracts.schemas.estimates import EstimatedDevice, Fit
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator import memory_planner
from app.estimator.activations import Precision, is_in_liger
from app.estimator.architecture import Architecture
from app.estimator.memory import Memory
from app.estimator.parameters import total_parameters
from app.estimator.steps import max_sequence_length, plan_steps
from app.runs.creating.estimates.inputs import EstimateInputs, Subject

_MOST_MB = 2**31 - 1
"""Largest estimated memory; claims compare it as an integer of Postgres."""


def typical_machine(kind: Literal["cpu", "cuda"]) -> DeviceCapabilities:
    """Return what a device of a kind can do as a rule."""
    return DeviceCapabilities(kind=kind, bf16=True, flash_attention=True, flash_attention_3=True)


class RunOnKind:
    """Run on one kind of device: its resolved configuration, its step plan, and its memory.

    Memory use is the same on all devices of a kind, so each variant is computed once.
    """

    def __init__(
        self, model: Architecture, subject: Subject, kind: Literal["cpu", "cuda"], known: EstimateInputs
    ) -> None:
        self.config = resolve_config(
            subject.plan.config,
            subject.user_set_fields,
            typical_machine(kind),
            sharded=subject.sharded,
            stored=model.stored_quantization,
        ).config
        self.division, self.sequence_parallel = subject.division, subject.plan.resources.sequence_parallel
        planned = plan_steps(model, self.config, subject.data, subject.data_parallel)
        self.plan = replace(planned, batch=replace(planned.batch, sequence_parallel=self.sequence_parallel))
        self.precision = Precision.for_device(self.config, kind, has_liger=known.has_liger)
        self.uses_liger = self.precision.has_liger and is_in_liger(model, self.config)
        needs = memory_planner.memory_of_choices(model, self.config, self.precision, self.plan.batch, self.division)
        # As the worker loads it: in 16 bits only if these are of bfloat16, since values could overflow in float16.
        teacher = 0 if known.teacher is None else total_parameters(known.teacher, reward_head=False)
        self.teacher_bytes = teacher * (2 if kind == "cuda" and self.config.dtype == "bfloat16" else 4)
        """Bytes of the teacher's weights, which are in memory all the time."""
        self._needs: memory_planner.Needs = lambda checkpointing: _with_frozen(needs(checkpointing), self.teacher_bytes)
        length = min(self.plan.batch.length, max_sequence_length(model, self.config))
        self._advice = memory_planner.MemoryAdvice(
            model, self.config, self.precision, length, self.plan.rows, self.division, self.sequence_parallel
        )

    def choose_plan(self, device: EstimatedDevice) -> memory_planner.Choice:
        """Return the planner's choice for that device."""
        choices = memory_planner.allowed_choices(self.config.gradient_checkpointing)
        return memory_planner.first_that_fits(self._needs, _memory_bytes(device), choices)

    def least_mb(self) -> int:
        """Return the memory of the smallest choice in MiB, at most `_MOST_MB`."""
        choices = memory_planner.allowed_choices(self.config.gradient_checkpointing)
        return min(_MOST_MB, math.ceil(min(self._needs(one).peak for one in choices) / 2**20))

    def check_fit(self, device: EstimatedDevice, thorough: bool) -> Fit:
        """Check that the run fits on the device; with `thorough`, advise a change if it does not."""
        chosen, room = self.choose_plan(device), _memory_bytes(device)
        advice = []
        if thorough and room is not None and not chosen.fits:
            advice = self._advice.advise_within(max(room - self.teacher_bytes, 0))
        return Fit(
            device=device,
            fits=None if room is None else chosen.fits,
            total_mb=round(chosen.memory.peak / 2**20, 1),
            gradient_checkpointing=chosen.checkpointing,
            reason=chosen.reason,
            advice=advice,
        )


def _with_frozen(needed: Memory, weights: int) -> Memory:
    """Return the memory of a run beside frozen weights of another model."""
    components = replace(needed.components, reference=needed.components.reference + weights)
    return replace(needed, components=components, peak=needed.peak + weights)


def _memory_bytes(device: EstimatedDevice) -> int | None:
    return None if device.memory_mb is None else device.memory_mb * 2**20
