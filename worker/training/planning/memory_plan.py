"""Recomputation of the runs whose passes are not measured: chosen by the memory estimate, before weights are loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import Replacement
from app.estimator import memory_planner
from app.estimator.activations import Precision
from app.estimator.architecture import UnknownArchitecture, read_architecture
from app.estimator.memory import WHOLE, Division
from app.estimator.parameters import CannotTrain
from app.estimator.steps import micro_batch
from worker.training.context import TrainingContext
from worker.training.data.preferences import answer_columns
from worker.training.model.base_model import BaseModelSource
from worker.training.model.kernels import has_liger
from worker.training.planning import pass_meter


def is_measured(run: TrainingContext) -> bool:
    """Return True if the passes of the run can be measured on each device alone, before its first step.

    Ranks that share a model or its sequences wait for each other within a pass, so one that runs out of memory there
    would leave the others waiting for ever. A run that generates takes most of its memory and time in another way.
    """
    return not (run.is_sharded or run.ranks.per_sequence > 1 or run.method.generates)


def choose_checkpointing(
    run: TrainingContext, replaced: list[Replacement], base: BaseModelSource, data: Dataset, max_length: int
) -> None:
    """Replace `gradient_checkpointing: "auto"` where nothing is measured, and add the reason to `replaced`.

    The choice changes neither losses nor updates beyond rounding, so a resumed run may choose again.
    """
    if run.is_inference:
        run.config = run.config.model_copy(update={"gradient_checkpointing": False})  # there is no backward pass
        return
    if run.config.gradient_checkpointing != "auto":
        return
    if pass_meter.meter_of(run.machine) is None:
        used: memory_planner.Value = False
        reason = "On a CPU it costs time and saves memory that is not scarce."
    elif is_measured(run):
        return
    else:
        used, reason = _choose_by_estimate(run, base, longest_row(data, run.config, max_length), len(data))
    replaced.append(Replacement(field="gradient_checkpointing", requested="auto", used=used, reason=reason))
    run.config = run.config.model_copy(update={"gradient_checkpointing": used})


def to_config_value(recomputed: int, layers: int) -> memory_planner.Value:
    """Return the value of `gradient_checkpointing` that says how many layers are recomputed: none, some or all."""
    return "selective" if 0 < recomputed < layers else recomputed > 0


def size_that_did_not_fit(run: TrainingContext) -> Mapping[str, Any]:
    """Return the first micro-batch that ran out of memory in an earlier attempt, as configuration fields; or nothing.

    The first repair after out of memory halves the micro-batch alone. Planning for the size that did not fit keeps the
    same layers recomputed: for the smaller size, fewer could be chosen and use the memory up again.
    """
    return next((repair.instead_of for repair in run.job.auto_repairs if "batch_size" in repair.instead_of), {})


def _choose_by_estimate(
    run: TrainingContext, base: BaseModelSource, length: int, rows: int
) -> tuple[memory_planner.Value, str]:
    if run.config.trainer_options.model_factory is not None:
        return True, "The model of a model factory is not known in advance, so every layer is recomputed."
    config = run.config.model_copy(update={"max_seq_length": length}) if run.config.packing else run.config
    too_large = size_that_did_not_fit(run)
    config = config.model_copy(update=too_large)
    # The same on every rank: those of one pass must recompute the same layers, whose exchanges they repeat together.
    free_bytes = min(run.ranks.gather_values(int(torch.cuda.mem_get_info()[0])))
    try:
        model = read_architecture(base.architecture.to_dict())
        choice = memory_planner.choose_checkpointing(
            model,
            config,
            Precision.for_device(config, "cuda", has_liger=has_liger(run.machine)),
            replace(micro_batch(model, config, length, rows), sequence_parallel=run.ranks.per_sequence),
            # Excludes memory of other processes; the context that the estimate counts is already allocated.
            free_bytes,
            division=Division(run.ranks.size, run.job.expert_parallel) if run.is_sharded else WHOLE,
        )
    except (UnknownArchitecture, CannotTrain) as error:
        return True, f"The memory that the run needs is unknown, so every layer is recomputed. {error}"
    why = "completions are generated" if run.method.generates else "its devices compute each pass together"
    reason = f"Estimated, not measured, because {why}. {choice.reason}"
    if too_large:
        reason = f"Planned for `batch_size` {config.batch_size}, which did not fit in an earlier attempt: {reason}"
    return memory_planner.to_config_value(choice.checkpointing), reason


def longest_row(data: Dataset, config: TrainingConfig, max_length: int) -> int:
    """Return the number of tokens of the longest sequence that the model will see, at most `max_length`."""
    if config.generation is not None or config.packing:
        return max_length
    answers = answer_columns(data.column_names)
    if not answers:
        return max(min(_longest_row(data, "input_ids"), max_length), 2)
    prompt = _longest_row(data, "prompt_ids") if "prompt_ids" in data.column_names else 0
    return max(min(prompt + max(_longest_row(data, name) for name in answers), max_length), 2)


def _longest_row(data: Dataset, column: str) -> int:
    if column not in data.column_names:
        return 2**31
    lengths = pc.max(pc.list_value_length(data.data.column(column))).as_py()
    return int(lengths or 0)
