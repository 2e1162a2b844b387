"""Memory planner of a run: chooses what the backward pass recomputes, once the lengths are known."""

from dataclasses import replace
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from app.contracts.training_config.fields import TrainingConfig
from app.contracts.training_config.resolution import Replacement
from app.estimator import memory_planner
from app.estimator.activations import EVERY, Precision
from app.estimator.architecture import UnknownArchitecture, read
from app.estimator.memory import WHOLE, Division
from app.estimator.parameters import CannotTrain
from app.estimator.steps import micro_batch
from worker.training.context import TrainingContext
from worker.training.data.preferences import answer_columns
from worker.training.model.base_model import BaseModelSource


def choose_checkpointing(
    run: TrainingContext, replaced: list[Replacement], found: BaseModelSource, data: Dataset, max_length: int
) -> None:
    """Replace `gradient_checkpointing: "auto"` by the chosen value, and add the reason to `replaced`.

    The choice changes neither losses nor updates beyond rounding, so a resumed run may choose again.
    """
    if run.only_evaluates:
        run.config = run.config.model_copy(update={"gradient_checkpointing": False})  # there is no backward pass
        return
    if run.config.gradient_checkpointing != "auto":
        return
    used, reason = _choose(run, found, longest_row(data, run.config, max_length), len(data))
    replaced.append(Replacement(field="gradient_checkpointing", requested="auto", used=used, reason=reason))
    run.config = run.config.model_copy(update={"gradient_checkpointing": used})


def _choose(run: TrainingContext, found: BaseModelSource, length: int, rows: int) -> tuple[memory_planner.Value, str]:
    if run.machine.kind == "cpu":
        return False, "On a CPU it costs time and saves memory that is not scarce."
    if run.config.trainer_options.model_factory is not None:
        return True, "The model of a model factory is not known in advance, so every layer is recomputed."
    config = run.config.model_copy(update={"max_seq_length": length}) if run.config.packing else run.config
    # The first repair after out of memory halves the micro-batch alone. Planning for the size that did not fit keeps
    # the same layers recomputed: for the smaller size, fewer could be chosen and use the memory up again.
    too_large = next((one.instead_of for one in run.job.auto_repairs if "batch_size" in one.instead_of), {})
    config = config.model_copy(update=too_large)
    # The same on every rank: those of one pass must recompute the same layers, whose exchanges they repeat together.
    free_bytes = min(run.ranks.gathered(int(torch.cuda.mem_get_info()[0])))
    try:
        model = read(found.architecture.to_dict())
        choice = memory_planner.choose(
            model,
            config,
            Precision.of(config, "cuda"),
            replace(micro_batch(model, config, length, rows), sequence_parallel=run.ranks.per_sequence),
            # Excludes memory of other processes; the context that the estimate counts is already allocated.
            free_bytes,
            division=Division(run.ranks.size, run.job.expert_parallel) if run.is_sharded else WHOLE,
        )
    except (UnknownArchitecture, CannotTrain) as error:
        return True, f"The memory that the run needs is unknown, so every layer is recomputed. {error}"
    reason = choice.reason
    if too_large:
        reason = f"Planned for `batch_size` {config.batch_size}, which did not fit in an earlier attempt: {reason}"
    return memory_planner.to_config_value(choice.checkpointing), reason


def longest_row(data: Dataset, config: TrainingConfig, max_length: int) -> int:
    """Return the number of tokens of the longest sequence that the model will see, at most `max_length`."""
    if config.generation is not None or config.packing:
        return max_length
    answers = answer_columns(data.column_names)
    if not answers:
        return max(min(_longest(data, "input_ids"), max_length), 2)
    prompt = _longest(data, "prompt_ids") if "prompt_ids" in data.column_names else 0
    return max(min(prompt + max(_longest(data, name) for name in answers), max_length), 2)


def _longest(data: Dataset, column: str) -> int:
    if column not in data.column_names:
        return 2**31
    lengths = pc.max(pc.list_value_length(data.data.column(column))).as_py()
    return int(lengths or 0)


def checkpoint_every_second_layer(network: PreTrainedModel) -> None:
    """Limit recomputation to every second layer, from the first on, whenever it is enabled.

    The trainers of preferences and rewards disable it for their reference and enable it again without naming the
    layers, so the model itself must know them.
    """
    switch = network._set_gradient_checkpointing

    def every_second_layer(
        enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        every = EVERY["selective"] if enable else every_n_layers
        switch(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, every_n_layers=every)

    network._set_gradient_checkpointing = every_second_layer
