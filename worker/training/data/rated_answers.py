"""Rated answers: from a JSONL file to the dataset of the `kto` trainer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from worker.training.data import preferences
from worker.training.data.preferences import IDS, AnswerEncoder, Pairs
from worker.training.data.reader import RowSource
from worker.training.data.remarks import NotedRows, Remark
from worker.training.data.tokenization import BadRow, Ints
from worker.training.failures import TrainingFailure

_SCHEMA = pa.schema([("prompt_ids", IDS), ("completion_ids", IDS), ("label", pa.bool_()), ("rows", IDS)])


class RatedEncoder:
    """Encoder of a prompt and its completion to token ids, with the label."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._answers = AnswerEncoder(tokenizer, "completion")

    def prepare(self, row: dict[str, Any], number: int) -> tuple[bool, tuple[bool, list[str]]]:
        """Return the label, and the texts of the row."""
        if not isinstance(row["label"], bool):
            raise BadRow("its `label` is neither true nor false")
        return row["label"], self._answers.prepare(row, number)

    def encode(self, prepared: Sequence[tuple[bool, tuple[bool, list[str]]]]) -> list[tuple[bool, Ints, Ints]]:
        """Return the label of each row, and the token ids of its prompt and of its completion."""
        encoded = self._answers.encode([texts for _, texts in prepared])
        return [(label, prompt, answer) for (label, _), (prompt, answer) in zip(prepared, encoded, strict=True)]

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._answers.remarks(total)


def rated_answers(source: RowSource, tokenizer: PreTrainedTokenizerBase, *, max_length: int, batch_size: int) -> Pairs:
    """Read rows for `kto`: columns `prompt_ids`, `completion_ids`, `KL_completion_ids`, `label` and `rows`.

    The trainer's collator cuts them at the end. A row whose prompt leaves no room for an answer is left out.

    Raises:
        TrainingFailure: `bad_data` that names the lines, or says that the rows to train on have one label only.
    """
    longer = NotedRows()

    def to_columns(number: int, row: tuple[bool, Ints, Ints]) -> dict[str, Any] | None:
        label, prompt, answer = row
        if len(prompt) >= max_length:
            return None
        if len(prompt) + len(answer) > max_length:
            longer.add(number)
        return {"prompt_ids": prompt, "completion_ids": answer, "label": label}

    def length_remarks(rows: int) -> list[Remark]:
        return longer.remarks(rows, f"{{n}} rows are longer than {max_length} tokens: cut at the end.")

    pairs = preferences.tokenize_rows(
        source, tokenizer, RatedEncoder(tokenizer), {"method": "kto", "max_length": max_length}, _SCHEMA, to_columns,
        left_out=f"the prompt alone fills the {max_length} tokens", remarks=length_remarks,
    )  # fmt: skip
    if source.purpose == "training":
        _check_labels(pairs.dataset)
    return dataclasses.replace(pairs, dataset=with_kl_answers(pairs.dataset, batch_size))


def with_kl_answers(data: Dataset, batch_size: int) -> Dataset:
    """Add the column `KL_completion_ids`: the answer of another row, from which the trainer estimates the KL term.

    As in TRL, it is that of the previous row in the micro-batch, for the first row that of the last. The trainer
    therefore takes the rows in order. A micro-batch of a single row uses its own answer.
    """
    rows = np.arange(len(data))
    first = rows - rows % batch_size
    last = np.minimum(first + batch_size, len(data)) - 1
    others = np.where(rows == first, last, rows - 1)
    table = data.data.table
    table = table.append_column(pa.field("KL_completion_ids", IDS), table["completion_ids"].take(pa.array(others)))
    return Dataset(InMemoryTable(table), fingerprint=f"{data._fingerprint}-{batch_size}")


def _check_labels(data: Dataset) -> None:
    labels = set(data.data.column("label").unique().to_pylist())
    if len(labels) == 1:
        only, other = ("true", "false") if True in labels else ("false", "true")
        raise TrainingFailure(
            "bad_data",
            f"All {len(data)} rows of the training data have the label {only}; method `kto` learns from the difference "
            f"between both, so add rows with the label {other}.",
        )
