"""How a run goes through its data: shape of its largest micro-batch, steps, tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.estimates.architecture import Architecture
from app.estimates.layers import Attention, Batch
from app.runs.config import PREFERENCE, TrainingConfig, TrainingMethod

BYTES_OF_A_TOKEN = 4.0
"""Assumed where no tokenizer has counted: bytes of a data set's file for each token of it."""
_OF_A_PAIR = 2 / 3
_EQUALLY = "The prompt of a pair and its two answers are assumed to be equally long."


@dataclass(frozen=True)
class Data:
    """What is known of a data set without reading it."""

    rows: int
    bytes: int | None
    """Of its file; None: not known."""
    tokens: Mapping[str, Any] | None = None
    """Statistics of a tokenizer: mean and max of sequences; without `sequences` of rows, the prompt of a pair once."""


@dataclass(kw_only=True)
class Course:
    """What a run does with its data, whatever its model is; tokens without padding."""

    steps: int | None
    """None: nobody knows how many rows there will be."""
    tokens: int | None
    """In all steps; None: the same."""
    attended: float
    """Mean tokens that attention sees together: of a text, even where several share a sequence."""
    largest: int
    """Tokens of the longest sequence."""
    rows: int | None = None
    """Of a pass, or packed sequences; None: nobody knows how many there will be."""
    repeats: bool = False
    """Whether it goes through its rows more than once."""
    assumptions: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Plan(Course):
    """A run in numbers."""

    batch: Batch
    """Of the model, at its largest: of pairs both answers."""


def attention_of(model: Architecture, config: TrainingConfig) -> Attention:
    """The attention that a run uses: the one asked for, else torch's own, which not every family has."""
    if config.attn_implementation is not None:
        return config.attn_implementation
    return "eager" if model.family == "gemma2" else "sdpa"


def longest(model: Architecture, config: TrainingConfig) -> int:
    """Tokens that a sequence may have."""
    return min(config.max_seq_length or 2**31, model.longest or 2**31)


def micro_batch(model: Architecture, config: TrainingConfig, length: int, rows: int | None) -> Batch:
    """The largest micro-batch, where the longest sequence has `length` tokens.

    `rows`: those that there are, or packed sequences; None: not known.
    """
    size = config.batch_size
    # Data smaller than a batch are one smaller batch, except that `rlhf` writes as many completions as it is told to.
    if rows is not None and config.method is not TrainingMethod.rlhf:
        size = min(size, rows)
    if config.packing:
        room = longest(model, config)
        if config.trainer_options.packing_strategy == "wrapped":
            return Batch(size, room)
        # Packs lie one behind the other in one long sequence; without kernels for that a mask keeps texts apart.
        masked = not attention_of(model, config).startswith("flash")
        return Batch(1, size * room, masked=masked, positions_each=True)
    sequences = size * (2 if config.method in PREFERENCE else 1)
    return Batch(sequences, length, masked=sequences > 1)


def plan(model: Architecture, config: TrainingConfig, data: Data) -> Plan:
    """Of an effective configuration on a data set."""
    course = course_of(config, data, longest(model, config))
    batch = micro_batch(model, config, course.largest, course.rows)
    return Plan(**vars(course), batch=batch)


def course_of(config: TrainingConfig, data: Data, most: int) -> Course:
    """The way of an effective configuration through a data set, whose sequences may have `most` tokens."""
    if config.trainer_options.data_source is not None:
        return _of_a_source(config, most)
    assumed: list[str] = []
    mean, largest = _lengths(config, data, most, assumed)
    if config.method is TrainingMethod.rlhf:
        mean, largest = mean + config.rlhf.max_completion_length, most
        assumed.append("Completions are as long as `rlhf.max_completion_length` allows.")
    mean = max(min(mean, most), 1.0)
    if config.packing:
        assumed.append("Packed sequences are full.")
    return _in_steps(config, _rows(config, data), mean, max(min(largest, most), 2), most, assumed)


def _of_a_source(config: TrainingConfig, most: int) -> Course:
    """Nobody knows the rows that a data source makes."""
    allowed = f"Some row is as long as `max_seq_length` allows ({most} tokens): a data source makes the rows."
    steps = None if config.max_steps is None else max(config.max_steps, config.min_steps or 0)
    if steps is not None and config.stop_at_step is not None:
        steps = min(steps, config.stop_at_step)
    return Course(steps=steps, tokens=None, attended=float(most), largest=max(most, 2), assumptions=[allowed])


def _lengths(config: TrainingConfig, data: Data, most: int, assumed: list[str]) -> tuple[float, int]:
    """Mean and most tokens of a sequence before it is cut; tells under `assumed` what they stand on."""
    pairs = config.method in PREFERENCE
    if data.tokens is not None:
        mean, largest = float(data.tokens["mean"]), int(data.tokens["max"])
        is_old = pairs and data.tokens.get("sequences") is None
        what = "Pairs" if is_old else "Sequences (prompt and either answer)" if pairs else "Rows"
        assumed.append(
            f"{what} have the lengths that the tokenizer {data.tokens['tokenizer']} counted at the upload: "
            f"{mean:g} tokens on average, {largest} at most, special tokens and chat templates left out."
        )
        if is_old:
            mean *= _OF_A_PAIR
            assumed.append(
                f"They were counted before this version, with the prompt once: {_EQUALLY} To have either answer "
                "counted with its prompt, upload the rows again."
            )
    elif data.bytes is None:
        mean = largest = most
        what = "sequence" if pairs else "row"
        assumed.append(f"Every {what} has the {most} tokens that `max_seq_length` allows: only their number is known.")
    else:
        mean, largest = data.bytes / data.rows / BYTES_OF_A_TOKEN, most
        assumed.append(
            f"A token takes {BYTES_OF_A_TOKEN:g} bytes of the data set's file, and some sequence is as long as "
            f"`max_seq_length` allows ({most} tokens): no tokenizer was named at the upload."
        )
        if pairs:
            mean *= _OF_A_PAIR
            assumed.append(_EQUALLY)
    return mean, largest


def _rows(config: TrainingConfig, data: Data) -> int:
    """Rows that train: with `eval_split` one at least is held out, and one stays."""
    held = max(round(data.rows * config.eval_split), 1) if config.eval_split > 0 else 0
    return max(data.rows - held, 1)


def _in_steps(config: TrainingConfig, rows: int, mean: float, largest: int, most: int, assumed: list[str]) -> Course:
    each = config.batch_size * config.gradient_accumulation_steps
    sequences = math.ceil(rows * mean / most) if config.packing else rows
    if config.method is TrainingMethod.rlhf:
        a_pass = max(rows * config.rlhf.num_generations // each, 1)
    else:
        a_pass = math.ceil(math.ceil(sequences / config.batch_size) / config.gradient_accumulation_steps)
    steps = max(config.max_steps or math.ceil(config.epochs * a_pass), config.min_steps or 0)
    repeats = steps > a_pass
    steps = min(steps, config.stop_at_step or steps)
    if config.method is TrainingMethod.rlhf:
        tokens = steps * each * mean
    else:
        # The last step of a pass takes the rows that are left, so a pass is never more than all of them.
        of_a_pass = rows * mean
        passes, more = divmod(steps, a_pass)
        tokens = passes * of_a_pass + min(more * each * (most if config.packing else mean), of_a_pass)
        tokens *= 2 if config.method in PREFERENCE else 1
    one_stream = config.packing and config.trainer_options.packing_strategy == "wrapped"
    return Course(
        steps=steps,
        tokens=round(tokens),
        attended=float(most) if one_stream else mean,
        largest=largest,
        rows=sequences,
        repeats=repeats,
        assumptions=assumed,
    )
