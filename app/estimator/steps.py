"""Step plan of a run: shape of its largest micro-batch, steps, tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.padding import SEPARATES_TEXTS, is_padding_free
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Attention, Batch

BYTES_OF_A_TOKEN = 4.0
"""Assumed bytes of a dataset's file per token, if no tokenizer has counted."""
_SEQUENCE_PER_PAIR = 2 / 3
_EQUAL_LENGTHS = "The prompt and the two answers of a pair are assumed to have equal lengths."


@dataclass(frozen=True)
class Data:
    """Figures of a dataset that are known without reading it."""

    rows: int
    bytes: int | None
    """Size of its file; None if not known."""
    tokens: Mapping[str, Any] | None = None
    """Token statistics: mean and max of sequences; without `sequences`, of rows, with the prompt of a pair once."""
    mean: float | None = None
    """Mean number of tokens of a sequence as the user expects it, of a dataset that is not here."""


@dataclass(kw_only=True)
class StepPlan:
    """Steps and tokens of a run, independent of its model; tokens are counted without padding."""

    steps: int | None
    """Number of steps; None if the number of rows is not known."""
    tokens: int | None
    """Tokens in all steps; None if the number of rows is not known."""
    attended: float
    """Mean number of tokens that attend to each other: of one text, even if several share a sequence."""
    largest: int
    """Tokens of the longest sequence."""
    rows: int | None = None
    """Rows or packed sequences per epoch; None if not known."""
    repeats: bool = False
    """True if the run uses its rows more than once."""
    assumptions: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Plan(StepPlan):
    """Steps, tokens and largest micro-batch of a run."""

    batch: Batch
    """Largest micro-batch of the model; contains both answers of each pair."""


def attention_of(model: Architecture, config: TrainingConfig) -> Attention:
    """Return the attention implementation of a run: the requested one, else that of most devices."""
    if config.attn_implementation is not None:
        return config.attn_implementation
    return "eager" if model.family == "gemma2" else "varlen"  # its scores are capped, which no other one computes


def max_sequence_length(model: Architecture, config: TrainingConfig) -> int:
    """Return the maximum number of tokens of a sequence."""
    return min(config.max_seq_length or 2**31, model.longest or 2**31)


def micro_batch(model: Architecture, config: TrainingConfig, length: int, rows: int | None) -> Batch:
    """Return the largest micro-batch if the longest sequence has `length` tokens.

    `rows`: number of rows or packed sequences; None if not known.
    """
    size = config.batch_size
    # A dataset smaller than a batch makes one smaller batch, except that generation always fills it.
    if rows is not None and config.generation is None:
        size = min(size, rows)
    if config.packing:
        room = max_sequence_length(model, config)
        if config.trainer_options.packing_strategy == "wrapped":
            return Batch(size, room)
        # Packs are concatenated to one long sequence; with some implementations a mask separates the texts.
        masked = attention_of(model, config) not in SEPARATES_TEXTS
        return Batch(1, size * room, masked=masked, positions_each=True)
    if size > 1 and is_padding_free(config, attention_of(model, config)):
        return Batch(1, size * length, texts=size, positions_each=True)
    sequences = size * (2 if METHODS[config.method].has_pairs else 1)
    return Batch(sequences, length, masked=sequences > 1)


def plan_steps(model: Architecture, config: TrainingConfig, data: Data, devices: int = 1) -> Plan:
    """Return steps, tokens and the largest micro-batch of an effective configuration on a dataset."""
    step_plan = make_step_plan(config, data, max_sequence_length(model, config), devices)
    batch = micro_batch(model, config, step_plan.largest, step_plan.rows)
    return Plan(**vars(step_plan), batch=batch)


def make_step_plan(config: TrainingConfig, data: Data, most: int, devices: int = 1) -> StepPlan:
    """Return steps and tokens of an effective configuration on a dataset; sequences are cut to `most` tokens.

    A step has the batches of all `devices`.
    """
    if config.trainer_options.data_source is not None:
        return _data_source_step_plan(config, most)
    assumed: list[str] = []
    mean, largest = _sequence_lengths(config, data, most, assumed)
    if config.generation is not None:
        mean, largest = mean + config.generation.max_completion_length, most
        assumed.append(f"Completions are assumed to have `{config.method}.max_completion_length` tokens.")
    mean = max(min(mean, most), 1.0)
    if config.packing:
        assumed.append("Packed sequences are assumed to be full.")
    return _in_steps(config, _training_rows(config, data), mean, max(min(largest, most), 2), most, devices, assumed)


def _data_source_step_plan(config: TrainingConfig, most: int) -> StepPlan:
    """Return the steps of a run with a data source, whose number of rows is not known."""
    allowed = f"The longest row is assumed to have `max_seq_length` ({most}) tokens: a data source produces the rows."
    steps = None if config.max_steps is None else max(config.max_steps, config.min_steps or 0)
    if steps is not None and config.stop_at_step is not None:
        steps = min(steps, config.stop_at_step)
    return StepPlan(steps=steps, tokens=None, attended=float(most), largest=max(most, 2), assumptions=[allowed])


def _sequence_lengths(config: TrainingConfig, data: Data, most: int, assumed: list[str]) -> tuple[float, int]:
    """Return mean and maximum tokens of a sequence before truncation; append the basis to `assumed`."""
    pairs = METHODS[config.method].has_pairs
    if data.tokens is not None:
        mean, largest = float(data.tokens["mean"]), int(data.tokens["max"])
        is_old = pairs and data.tokens.get("sequences") is None
        what = "Pairs" if is_old else "Sequences (prompt and either answer)" if pairs else "Rows"
        assumed.append(
            f"{what} have the lengths that the tokenizer {data.tokens['tokenizer']} counted at upload: "
            f"{mean:g} tokens on average, {largest} at most, without special tokens and chat templates."
        )
        if is_old:
            mean *= _SEQUENCE_PER_PAIR
            assumed.append(
                f"An earlier version counted them, with the prompt once. {_EQUAL_LENGTHS} Upload the rows again to "
                "count each answer with its prompt."
            )
    elif data.mean is not None:
        mean, largest = data.mean, most
        assumed.append(
            f"Sequences have {mean:g} tokens on average, as the request says, and the longest is assumed to have "
            f"`max_seq_length` ({most})."
        )
    elif data.bytes is None:
        mean = largest = most
        what = "sequence" if pairs else "row"
        assumed.append(f"Every {what} is assumed to have `max_seq_length` ({most}) tokens: only their number is known.")
    else:
        mean, largest = data.bytes / data.rows / BYTES_OF_A_TOKEN, most
        assumed.append(
            f"A token is assumed to take {BYTES_OF_A_TOKEN:g} bytes of the dataset's file, and the longest sequence "
            f"to have `max_seq_length` ({most}) tokens: no tokenizer was specified at upload."
        )
        if pairs:
            mean *= _SEQUENCE_PER_PAIR
            assumed.append(_EQUAL_LENGTHS)
    return mean, largest


def _training_rows(config: TrainingConfig, data: Data) -> int:
    """Return the number of training rows; `eval_split` holds out at least one row and leaves at least one."""
    held = max(round(data.rows * config.eval_split), 1) if config.eval_split > 0 else 0
    return max(data.rows - held, 1)


def _in_steps(
    config: TrainingConfig, rows: int, mean: float, largest: int, most: int, devices: int, assumed: list[str]
) -> StepPlan:
    each = config.batch_size * config.gradient_accumulation_steps * devices
    sequences = math.ceil(rows * mean / most) if config.packing else rows
    if config.generation is not None:
        epoch_steps = max(rows * config.generation.num_generations // each, 1)
    else:
        batches = math.ceil(math.ceil(sequences / config.batch_size) / devices)
        epoch_steps = math.ceil(batches / config.gradient_accumulation_steps)
    steps = max(config.max_steps or math.ceil(config.epochs * epoch_steps), config.min_steps or 0)
    repeats = steps > epoch_steps
    steps = min(steps, config.stop_at_step or steps)
    if config.generation is not None:
        tokens = steps * each * mean
    else:
        # The last step of an epoch has the remaining rows, so an epoch never exceeds all rows.
        epoch_tokens = rows * mean
        full_epochs, more = divmod(steps, epoch_steps)
        tokens = full_epochs * epoch_tokens + min(more * each * (most if config.packing else mean), epoch_tokens)
        tokens *= 2 if METHODS[config.method].has_pairs else 1
    one_stream = config.packing and config.trainer_options.packing_strategy == "wrapped"
    return StepPlan(
        steps=steps,
        tokens=round(tokens),
        attended=float(most) if one_stream else mean,
        largest=largest,
        rows=sequences,
        repeats=repeats,
        assumptions=assumed,
    )
