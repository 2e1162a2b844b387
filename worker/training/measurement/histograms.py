"""Histograms of weights and gradients for each kind of parameter, recorded every so many steps on request."""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker.training.context import TrainingContext
from worker.training.run_state import DISTRIBUTIONS, MOST_RECORDS

LOWEST, HIGHEST = -32, 8
EDGES = [-math.inf, *(-(2.0**n) for n in range(HIGHEST, LOWEST - 1, -1)), *(2.0**n for n in range(LOWEST, HIGHEST + 1))]
"""Lower edges of the bins, the same in every record: powers of two on both sides of zero, which is in the middle."""
MOST_GROUPS = 200
_CHUNK = 2**22
"""Numbers processed at a time, so that a large embedding does not need its size in memory again."""


class Histogram:
    """Count, mean, standard deviation, extremes and histogram of numbers that are added in pieces."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._squares = 0.0
        self._min, self._max = math.inf, -math.inf
        self._bins = torch.zeros(len(EDGES), dtype=torch.int64)

    def add_tensor(self, numbers: torch.Tensor) -> None:
        """Add all elements of a tensor, which is not changed."""
        edges = torch.tensor(EDGES[1:], dtype=torch.float32, device=numbers.device)
        for chunk in numbers.detach().reshape(-1).split(_CHUNK):
            piece = chunk.float()
            doubles = piece.double()
            bins = torch.bucketize(piece, edges, right=True)
            self._bins += torch.bincount(bins, minlength=len(EDGES)).cpu()
            self._count += piece.numel()
            self._sum += float(doubles.sum())
            self._squares += float(doubles.square().sum())
            self._min, self._max = min(self._min, float(piece.min())), max(self._max, float(piece.max()))

    def summary(self) -> dict[str, Any]:
        """Return the part of a record; `bins[i]` counts the numbers from `edges[i]` up to the next edge.

        Non-finite values are null, since JSON has neither NaN nor infinity.
        """
        mean = self._sum / self._count
        return {
            "count": self._count,
            "mean": _finite_or_none(mean),
            "std": _finite_or_none(math.sqrt(max(self._squares / self._count - mean**2, 0.0))),
            "min": _finite_or_none(self._min),
            "max": _finite_or_none(self._max),
            "bins": self._bins.tolist(),
        }


class HistogramCallback(TrainerCallback):  # type: ignore[misc]
    """Records trained parameters just before the optimizer step: gradients after clipping, weights before the update.

    Parameters with the same name in all layers form one group. Only reads, and draws no random number.
    """

    def __init__(self, run: TrainingContext, every: int) -> None:
        self._run = run
        self._every = every

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._run.report.message(
            f"Distributions of weights and gradients, every {self._every} steps, are reported as events and "
            f"saved with the output as `{DISTRIBUTIONS}`, the first {MOST_RECORDS[DISTRIBUTIONS]:,} of them."
        )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any, **_: Any
    ) -> None:
        step = state.global_step + 1
        if step % self._every or self._run.distributions.is_full:
            return
        groups: dict[str, dict[str, Histogram]] = {}
        # Without clipping, float16 gradients are not unscaled before the optimizer step.
        scaled = args.fp16 and not args.max_grad_norm
        for group, parameter in _trained_parameters(model):
            if group not in groups and len(groups) >= MOST_GROUPS:
                group = "others"
            histograms = groups.setdefault(group, {})
            histograms.setdefault("weights", Histogram()).add_tensor(parameter)
            if parameter.grad is not None and not scaled:
                histograms.setdefault("gradients", Histogram()).add_tensor(parameter.grad)
            self._run.report.alive()
        recorded = {group: {of: one.summary() for of, one in found.items()} for group, found in groups.items()}
        edges = [None, *EDGES[1:]]  # JSON has no infinity
        record = {"step": step, "edges": edges, "groups": recorded}
        self._run.append_profile(self._run.distributions, record)
        self._run.report.send({"type": "distribution", "step": step, "edges": edges, "groups": recorded})
        self._run.trackers.add_distributions(record)


def _finite_or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield re.sub(r"(?<=\.)\d+(?=\.)", "*", name), parameter
