"""Data sets: from a JSONL file to token ids and labels, cut or packed, each row with its number in the file."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase
from trl.data_utils import pack_dataset

from app.runs.config import TrainingConfig
from worker.training.chat import BadRow, ChatEncoder, mask_prefix
from worker.training.failures import TrainingFailure

_BATCH = 256
_BAD_ROWS_TOLD = 20
_SECONDS_BETWEEN_PROGRESS = 0.5
_NOTHING_LEFT = "no token to learn is left of any row within {} tokens"

Encode = Callable[[dict[str, Any]], tuple[list[int], list[int]]]
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
) -> Tokens:
    """Read, tokenise, mask, cut and pack the `chosen` rows (None: all) of a file, in its order.

    `purpose` is what messages call the data.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """
    encode = _encoder(data_format, tokenizer, config.loss_on)
    wanted = None if chosen is None else set(chosen)
    total = count_rows(path) if chosen is None else len(chosen)
    batches: list[pa.RecordBatch] = []
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "rows": []}
    bad: list[str] = []
    done = kept = tokens = cut = masked = highest = 0
    told = 0.0
    limit = slice(-max_length, None) if config.truncation_mode == "keep_end" else slice(max_length)
    strategy = config.trainer_options.packing_strategy if config.packing else None
    for number, line, row in _rows(path, bad):
        if wanted is not None and number not in wanted:
            continue
        done += 1
        if time.monotonic() - told > _SECONDS_BETWEEN_PROGRESS:
            told = time.monotonic()
            progress(done, total)
        try:
            ids, labels = encode(row)
        except (BadRow, KeyError, TypeError, IndexError) as error:
            _note(bad, line, f"field {error} is missing" if isinstance(error, KeyError) else str(error))
            continue
        if len(ids) > max_length and strategy != "wrapped":
            cut += 1
            ids, labels = ids[limit], labels[limit]
        # Nothing predicts the first token of a text. One long stream has a place for texts that teach nothing.
        if strategy != "wrapped" and not _teaches(labels):
            masked += 1
            continue
        kept += 1
        highest = max(highest, max(ids, default=0))
        tokens += len(ids)
        columns["input_ids"].append(ids)
        columns["labels"].append(labels)
        # Packing joins whole columns, so every token carries the number of its row until then.
        columns["rows"].append([number] * len(ids) if strategy else [number])
        if len(columns["rows"]) == _BATCH:
            batches.append(_batch(columns))
    if bad:
        more = "" if len(bad) <= _BAD_ROWS_TOLD else f" (and {len(bad) - _BAD_ROWS_TOLD} more)"
        raise TrainingFailure(
            "bad_data", f"Rows of the {purpose} data cannot be used: " + "; ".join(bad[:_BAD_ROWS_TOLD]) + more
        )
    if kept == 0:
        why = _NOTHING_LEFT.format(max_length) if masked else "it has no rows"
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {purpose} data: {why}.")
    progress(done, total)
    batches.append(_batch(columns))
    dataset = Dataset(InMemoryTable(pa.Table.from_batches(batches)))
    if strategy:
        dataset = _pack(dataset, max_length, strategy)
    if strategy == "wrapped" and not any(_teaches(labels) for labels in dataset["labels"]):
        why = _NOTHING_LEFT.format(max_length)
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {purpose} data: {why}.")
    remarks = []
    if cut:
        end = "end" if config.truncation_mode == "keep_start" else "start"
        remarks.append(f"{cut} of {done} rows are longer than {max_length} tokens and were cut at the {end}.")
    if masked:
        remarks.append(f"{masked} of {done} rows were left out: after cutting, no token to learn is left.")
    return Tokens(dataset, kept, tokens, remarks, highest)


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


def _rows(path: str, bad: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number among the rows (from 0), line in the file (from 1) and content of each row."""
    number = 0
    with open(path, "rb") as file:  # noqa: PTH123
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            number += 1
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:
                _note(bad, line, f"not JSON ({error})")
                continue
            if not isinstance(row, dict):
                _note(bad, line, "not an object")
                continue
            yield number - 1, line, row


def _encoder(data_format: str, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> Encode:
    eos = str(tokenizer.eos_token)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    def text(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        ids = ids_of(_ended(row["text"], eos))
        return ids, list(ids)

    def prompt_completion(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt, completion = row["prompt"], row["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadRow("prompt and completion must be texts")
        ids = ids_of(prompt + _ended(completion, eos))
        return ids, mask_prefix(ids_of(prompt), ids) if loss_on == "completion" else list(ids)

    if data_format == "chat":
        return ChatEncoder(tokenizer, loss_on).encode
    if data_format == "prompt_completion":
        return prompt_completion
    if data_format == "text":
        return text
    raise TrainingFailure("bad_data", f"Data sets of format {data_format} cannot be trained on.")


def _ended(text: Any, eos: str) -> str:
    if not isinstance(text, str):
        raise BadRow("its text is not a string")
    return text if text.endswith(eos) else text + eos


def _note(bad: list[str], line: int, why: str) -> None:
    bad.append(f"line {line}: {why}" if len(bad) < _BAD_ROWS_TOLD else "")


def _teaches(labels: Sequence[int]) -> bool:
    """Whether a sequence has a token to learn; its first one is predicted from nothing."""
    return any(label != -100 for label in labels[1:])


def _batch(columns: dict[str, list[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(values, type=pa.list_(pa.int32())) for values in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    for values in columns.values():
        values.clear()
    return batch


def _pack(dataset: Dataset, length: int, strategy: str) -> Dataset:
    packed = pack_dataset(dataset, length, strategy)
    rows = []
    for marks in packed.with_format("numpy")["rows"]:
        marks = np.asarray(marks)
        starts = np.flatnonzero(np.diff(marks, prepend=-1))
        rows.append(marks[starts].tolist())
    table = packed.data.table.combine_chunks()
    place = table.column_names.index("rows")
    table = table.set_column(place, "rows", pa.array(rows, type=pa.list_(pa.int32())))
    return Dataset(InMemoryTable(table))
