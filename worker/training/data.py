"""Data sets: from a JSONL file to token ids and labels, cut or packed, each row with its number in the file."""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from app.runs.config import TrainingConfig
from worker.training import encoding
from worker.training.chat import ChatEncoder
from worker.training.encoding import BadRow, CompletionEncoder, Encoded, Encoder, TextEncoder
from worker.training.failures import TrainingFailure
from worker.training.packing import Sequences
from worker.training.token_cache import TokenCache, Write

_VERSION = 1
"""Of the code that makes tokens from rows, here and in `encoding`, `chat` and `packing`: raise it with any change of
what comes out, or runs go on with what was made before."""
_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 256 * 1024
"""What is encoded in one call, which no stop request interrupts."""
_BAD_ROWS_TOLD = 20
_SECONDS_BETWEEN_PROGRESS = 0.5
_NOTHING_LEFT = "no token to learn is left of any row within {} tokens"
_UNUSABLE = (BadRow, KeyError, TypeError, IndexError)
_INTS = pa.list_(pa.int32())

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all; may raise to stop."""


@dataclass(frozen=True)
class Tokens:
    """A data set ready to train on: columns `input_ids`, `labels`, `rows` and, packed, `seq_lengths`."""

    dataset: Dataset
    rows: int
    """Rows of the file that it holds."""
    tokens: int
    remarks: list[str]
    """What the user should know: rows cut or left out."""
    highest_id: int
    """The highest token id in it."""
    are_cached: bool = False
    """An earlier run has made them."""


def split(rows: int, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to hold out, both in the order of the file; at least one in each."""
    if rows < 2:
        raise TrainingFailure("bad_data", "`eval_split` needs at least two rows.")
    held = min(max(round(rows * part), 1), rows - 1)
    chosen = set(random.Random(seed).sample(range(rows), held))
    return [row for row in range(rows) if row not in chosen], sorted(chosen)


def count_rows(path: str) -> int:
    """Rows of a JSONL file; blank lines do not count."""
    with open(path, "rb") as file:  # noqa: PTH123
        return sum(1 for line in file if line.strip())


def tokenise(
    path: str,
    data_format: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainingConfig,
    *,
    max_length: int,
    chosen: list[int] | None,
    progress: Progress,
    purpose: Literal["training", "evaluation"] = "training",
    sha256: str | None = None,
    cache: TokenCache | None = None,
) -> Tokens:
    """Read, tokenise, mask, cut and pack the `chosen` rows (None: all) of a file, in its order.

    Columns that the format does not name are passed over. What comes out is kept in `cache` when `sha256` says what
    the file holds, and taken from there when it was made before. `purpose` is what messages call the data.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """
    encoder = _encoder(data_format, tokenizer, config.loss_on)
    strategy = config.trainer_options.packing_strategy if config.packing else None
    parts = sha256 and {
        "version": _VERSION,
        "data": sha256,
        "format": data_format,
        "rows": None if chosen is None else hashlib.sha256(np.array(chosen, "<i8").tobytes()).hexdigest(),
        "tokenizer": encoding.identity(tokenizer),
        "loss_on": config.loss_on,
        "max_length": max_length,
        "truncation_mode": config.truncation_mode,
        "packing": strategy,
    }
    names = ["input_ids", *(["labels"] if encoder.masks else []), "rows"]
    if strategy == "bfd":
        names.append("seq_lengths")
    schema = pa.schema([(name, _INTS) for name in names])

    def build(write: Write) -> dict[str, Any]:
        made = Sequences(write, schema, max_length, strategy)
        return _build(path, encoder, config, made, chosen, progress, purpose)

    entry = (cache or TokenCache()).entry(parts or None, schema, build)
    facts, table = entry.facts, entry.table
    if entry.was_there:
        progress(facts["rows"], facts["rows"])
    if not encoder.masks:  # then labels are the tokens themselves, and need no room
        table = table.add_column(1, pa.field("labels", _INTS), table["input_ids"])
    # Left to itself, it would find its fingerprint by writing all of the table out.
    dataset = Dataset(InMemoryTable(table), fingerprint=entry.name[:32])
    return Tokens(dataset, **facts, are_cached=entry.was_there)


def first_batch(data: Dataset, config: TrainingConfig) -> Dataset:
    """The rows of one optimizer step, to be seen again and again."""
    return data.select(range(min(len(data), config.batch_size * config.gradient_accumulation_steps)))


def steps_in(data: Dataset, config: TrainingConfig) -> int:
    """Optimizer steps of one pass."""
    return math.ceil(math.ceil(len(data) / config.batch_size) / config.gradient_accumulation_steps)


class WithRows:
    """A collator that keeps the numbers of the rows beside the batch that another collator builds."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._collate(examples)
        batch["rows"] = [row for example in examples for row in example["rows"]]
        return batch


@dataclass
class _BadRows:
    """The first of the rows that cannot be used, and how many there are."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def note(self, line: int, why: str) -> None:
        self.count += 1
        # Found in groups, not quite in the order of the file.
        self.first = sorted([*self.first, (line, why)])[:_BAD_ROWS_TOLD]

    def __str__(self) -> str:
        more = "" if self.count <= _BAD_ROWS_TOLD else f" (and {self.count - _BAD_ROWS_TOLD} more)"
        return "; ".join(f"line {line}: {why}" for line, why in self.first) + more


class _Row(NamedTuple):
    number: int
    """Among the rows, from 0."""
    line: int
    """In the file, from 1."""
    bytes: int
    content: dict[str, Any]


def _rows(path: str, bad: _BadRows) -> Iterator[_Row]:
    number = 0
    with open(path, "rb") as file:  # noqa: PTH123
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            number += 1
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:
                bad.note(line, f"not JSON ({error})")
                continue
            if not isinstance(row, dict):
                bad.note(line, "not an object")
                continue
            yield _Row(number - 1, line, len(raw), row)


def _encoder(data_format: str, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> Encoder:
    if data_format == "chat":
        return ChatEncoder(tokenizer, loss_on)
    if data_format == "prompt_completion":
        return CompletionEncoder(tokenizer, loss_on)
    if data_format == "text":
        return TextEncoder(tokenizer)
    raise TrainingFailure("bad_data", f"Data sets of format {data_format} cannot be trained on.")


def _build(
    path: str,
    encoder: Encoder,
    config: TrainingConfig,
    made: Sequences,
    chosen: list[int] | None,
    progress: Progress,
    purpose: str,
) -> dict[str, Any]:
    """Make all sequences of a file; answers the fields of `Tokens` that tell about them."""
    wanted = None if chosen is None else set(chosen)
    total = count_rows(path) if chosen is None else len(chosen)
    limit = slice(-made.room, None) if config.truncation_mode == "keep_end" else slice(made.room)
    bad = _BadRows()
    done = cut = masked = 0
    told = 0.0

    def counted() -> Iterator[_Row]:
        nonlocal done, told
        for row in _rows(path, bad):
            if wanted is None or row.number in wanted:
                done += 1
                if time.monotonic() - told > _SECONDS_BETWEEN_PROGRESS:
                    told = time.monotonic()
                    progress(done, total)
                yield row

    for number, encoded in _encoded(counted(), encoder, bad):
        if len(encoded.ids) > made.room and made.strategy != "wrapped":
            cut += 1
            encoded = encoded.cut(limit)
        # Nothing predicts the first token of a text. One long stream has a place for texts that teach nothing.
        if made.strategy != "wrapped" and not encoded.teaches:
            masked += 1
        elif not bad.count:
            made.add(number, encoded)
    if bad.count:
        raise TrainingFailure("bad_data", f"Rows of the {purpose} data cannot be used: {bad}")
    made.finish()
    if not made.teaches:
        why = _NOTHING_LEFT.format(made.room) if masked or made.rows else "it has no rows"
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {purpose} data: {why}.")
    progress(done, total)
    remarks = []
    if cut:
        end = "end" if config.truncation_mode == "keep_start" else "start"
        remarks.append(f"{cut} of {done} rows are longer than {made.room} tokens and were cut at the {end}.")
    if masked:
        remarks.append(f"{masked} of {done} rows were left out: after cutting, no token to learn is left.")
    return {"rows": made.rows, "tokens": made.tokens, "remarks": remarks, "highest_id": made.highest_id}


def _encoded(rows: Iterator[_Row], encoder: Encoder, bad: _BadRows) -> Iterator[tuple[int, Encoded]]:
    """Number and tokens of each row that can be used, encoded many at a time."""
    waiting: list[tuple[_Row, Any]] = []
    size = 0
    for row in rows:
        try:
            waiting.append((row, encoder.prepare(row.content)))
        except _UNUSABLE as error:
            bad.note(row.line, _why(error))
            continue
        size += row.bytes
        if len(waiting) == _ROWS_AT_ONCE or size > _BYTES_AT_ONCE:
            yield from _encoded_at_once(waiting, encoder, bad)
            waiting, size = [], 0
    if waiting:
        yield from _encoded_at_once(waiting, encoder, bad)


def _encoded_at_once(waiting: list[tuple[_Row, Any]], encoder: Encoder, bad: _BadRows) -> Iterator[tuple[int, Encoded]]:
    try:
        found = encoder.encode([prepared for _, prepared in waiting])
    except _UNUSABLE as error:
        if len(waiting) == 1:
            bad.note(waiting[0][0].line, _why(error))
            return
        for one in waiting:  # which of them it was
            yield from _encoded_at_once([one], encoder, bad)
        return
    yield from ((row.number, encoded) for (row, _), encoded in zip(waiting, found, strict=True))


def _why(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)
