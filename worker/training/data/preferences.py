"""Preference pairs and prompts: from a JSONL file to the datasets of the `dpo`, `reward` and `rlhf` trainers."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset, Features, Json, List, Value
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from anneal.contracts.reward_texts.templates import row_item
from anneal.contracts.rewards import Reward, referenced_columns
from worker.training.data import reader, tokenization
from worker.training.data.answers import answer_problem, item_problem
from worker.training.data.completions import Texts
from worker.training.data.reader import RowSource
from worker.training.data.remarks import NotedRows, Remark
from worker.training.data.token_cache import Write
from worker.training.data.tokenization import BadRow, Encoder, Ints
from worker.training.failures import TrainingFailure

VERSION = 5
"""Version of the code that makes tokens from pairs, here and in the encoders. Increase it when the output changes."""
_ROWS_AT_ONCE = 1000
IDS = pa.list_(pa.int32())
"""Type of a column of token ids."""


Example = TypeVar("Example")


def answer_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns of token ids that follow those of the prompt, if that is in a column of its own."""
    return [name for name in columns if name.endswith("_ids") and name not in ("prompt_ids", "input_ids")]


@dataclass(frozen=True)
class Pairs:
    """Data ready to train on; every row of `dataset` has its number in the file in the list `rows`."""

    dataset: Dataset
    rows: int
    tokens: int
    highest_id: int
    remarks: list[Remark] = field(default_factory=list)
    are_cached: bool = False
    """True if an earlier run made the tokens."""


class Pair(NamedTuple):
    """Token ids of a prompt and of two answers to it."""

    prompt: Ints
    chosen: Ints
    rejected: Ints
    margin: float = 0.0
    """Difference of the rewards that the better answer has to exceed."""


class AnswerEncoder:
    """Encoder of a prompt and its answers to token ids, exactly as in TRL.

    The answers start at the first token where any text, prompt included, differs from the prompt alone: tokens may
    merge across that border, and a chat template may render a prompt differently if an answer follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *answers: str, needs_prompt: bool = True) -> None:
        """Prepare an encoder of rows with a `prompt` and these columns of answers."""
        self._needs_prompt = needs_prompt
        self._texts = Texts(tokenizer)
        self._eos = str(tokenizer.eos_token)
        self._answers = answers

    def prepare(self, row: dict[str, Any], number: int) -> tuple[bool, list[str]]:
        """Return True for a chat, and the texts: the prompt alone, and the prompt with each answer."""
        prompt, answers = row["prompt"], [row[name] for name in self._answers]
        if isinstance(prompt, str):
            return False, [prompt, *(prompt + tokenization.with_eos(answer, self._eos) for answer in answers)]
        if not prompt and self._needs_prompt:
            raise BadRow("its answers have no message in common, so there is no prompt to compare answers to")
        return True, self._texts.render_texts(number, row, prompt, *answers)

    def encode(self, prepared: Sequence[tuple[bool, list[str]]]) -> list[tuple[Ints, ...]]:
        """Return for each row the token ids of the prompt, and those of each answer."""
        encoded = []
        for is_chat, texts in prepared:
            before, *wholes = self._texts.token_ids(texts, is_chat)
            start = min(_common_prefix(before, whole) for whole in wholes)
            encoded.append((before[:start], *(whole[start:] for whole in wholes)))
        return encoded

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._texts.chats.remarks(total)


class ComparisonEncoder:
    """Encoder of a prompt and two answers to it for `reward`, with the margin of the pair: 0 where the row has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._answers = AnswerEncoder(tokenizer, "chosen", "rejected", needs_prompt=False)

    def prepare(self, row: dict[str, Any], number: int) -> tuple[float, tuple[bool, list[str]]]:
        """Return the margin, and the texts of the row."""
        margin = 0.0 if row.get("margin") is None else row["margin"]
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise BadRow("its `margin` is not a number")
        return float(margin), self._answers.prepare(row, number)

    def encode(self, prepared: Sequence[tuple[float, tuple[bool, list[str]]]]) -> list[tuple[Any, ...]]:
        """Return for each row the token ids of the prompt and of both answers, and the margin."""
        encoded = self._answers.encode([texts for _, texts in prepared])
        return [(*ids, margin) for (margin, _), ids in zip(prepared, encoded, strict=True)]

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._answers.remarks(total)


class PromptEncoder:
    """Encoder of prompts, which adds the token ids that the model receives."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, compared_by: Sequence[Reward] = ()) -> None:
        self._texts = Texts(tokenizer)
        self._rewards = compared_by
        self._columns = referenced_columns(compared_by)

    def prepare(self, row: dict[str, Any], number: int) -> tuple[dict[str, Any], str]:
        """Return the row in the trainer's format, and its prompt as text."""
        prompt, answer = row["prompt"], row.get("answer")
        item = row_item(row, self._columns)
        problem = answer_problem(self._rewards, answer) or item_problem(self._rewards, item)
        if problem is not None:
            raise BadRow(problem)
        for column in ("tools", "chat_template_kwargs"):
            if row.get(column):
                remedy = (
                    "write them into the prompt" if column == "tools" else "set a `chat_template` without variables"
                )
                raise BadRow(f"it has `{column}`, which the trainer does not pass to the model: {remedy}")
        columns = {"prompt": prompt, "answer": answer, "item": json.dumps(item)}
        if isinstance(prompt, str):
            return columns, prompt
        chats, opens = self._texts.chats, {"add_generation_prompt": True}
        (chat,) = chats.fit_chats(number, row, prompt, **opens)
        return {**columns, "prompt": chat.messages}, chats.render(chat.messages, chat.options, **opens)

    def encode(self, prepared: Sequence[tuple[dict[str, Any], str]]) -> list[tuple[dict[str, Any], Ints]]:
        """Return each row with the token ids of its prompt."""
        return [(row, self._texts.token_ids([text], not isinstance(row["prompt"], str))[0]) for row, text in prepared]

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._texts.chats.remarks(total)


def is_conversational(path: str) -> bool:
    """Return True if the prompts of a file are messages and not texts, judging by its first row."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            first = next((raw for raw in file if raw.strip()), b"{}")
        return isinstance(json.loads(first).get("prompt"), list)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False  # reported when the rows are read


def read_preferences(
    source: RowSource, tokenizer: PreTrainedTokenizerBase, *, max_length: int, truncation_mode: str
) -> Pairs:
    """Read pairs for `dpo`: columns `prompt_ids`, `chosen_ids`, `rejected_ids` and `rows`.

    The trainer's collator truncates them. A pair of which truncation would leave no answer is left out.

    Raises:
        TrainingFailure: `bad_data` that names the lines.
    """
    keeps_start = truncation_mode == "keep_start"

    def to_columns(pair: Pair) -> dict[str, Ints] | None:
        if keeps_start and len(pair.prompt) >= max_length:
            return None
        return {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}

    def is_cut(pair: Pair) -> bool:
        return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) > max_length

    made_from = {"method": "dpo", "max_length": max_length, "truncation_mode": truncation_mode}
    end = "end" if keeps_start else "start"
    encoder = AnswerEncoder(tokenizer, "chosen", "rejected")
    schema = pa.schema([(name, IDS) for name in ("prompt_ids", "chosen_ids", "rejected_ids", "rows")])
    return _read_pairs(
        source, tokenizer, encoder, made_from, schema, to_columns,
        left_out=f"the prompt alone fills the {max_length} tokens",
        cut=(is_cut, f"pairs are longer than {max_length} tokens: cut at the {end}"),
    )  # fmt: skip


def read_comparisons(source: RowSource, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> Pairs:
    """Read pairs for `reward`: columns `chosen_ids` and `rejected_ids` (each with its prompt) and `rows`.

    If a row has a `margin`, there is a column of these too, which TRL's loss subtracts from the difference of rewards.
    A pair that is too long is left out: the reward is read at the end of a text, which truncation would remove.

    Raises:
        TrainingFailure: `bad_data` that names the lines.
    """
    margin = [("margin", pa.float32())] if reader.has_margins(source.path) else []

    def to_columns(pair: Pair) -> dict[str, Any] | None:
        if len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) > max_length:
            return None
        answers = {"chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
        columns = {name: np.concatenate([pair.prompt, ids]) for name, ids in answers.items()}
        return {**columns, "margin": pair.margin} if margin else columns

    made_from = {"method": "reward", "max_length": max_length}
    left_out = f"one of the two is longer than {max_length} tokens"
    schema = pa.schema([("chosen_ids", IDS), ("rejected_ids", IDS), *margin, ("rows", IDS)])
    return _read_pairs(
        source, tokenizer, ComparisonEncoder(tokenizer), made_from, schema, to_columns, left_out=left_out
    )


def read_prompts(
    source: RowSource, tokenizer: PreTrainedTokenizerBase, *, max_length: int, compared_by: Sequence[Reward]
) -> Pairs:
    """Read prompts for `rlhf`: columns `prompt` (a text or messages), `answer` (a text or None), `item` and `rows`.

    `item` has the columns that templates of rewards refer to, as JSON. A prompt of more than `max_length` tokens is
    left out: truncated, it would be another question. The trainer tokenizes prompts as it generates, so there are no
    tokens to cache.

    Raises:
        TrainingFailure: `bad_data` that names the lines, including rows whose answer cannot be used by a reward of
            `compared_by`.
    """
    encoder = PromptEncoder(tokenizer, compared_by)
    taken: list[dict[str, Any]] = []
    done = tokens = highest = 0
    too_long = NotedRows()
    for number, (row, ids) in reader.encode_rows(
        source.path, encoder, chosen=source.chosen, progress=source.progress, purpose=source.purpose
    ):
        done += 1
        if len(ids) <= max_length:
            taken.append({**row, "rows": [number]})
            tokens += len(ids)
            highest = max(highest, int(ids.max(initial=0)))
        else:
            too_long.add(number)
    _check_not_empty(len(taken), done, source, why := f"the prompt is longer than {max_length} tokens")
    are_texts = {isinstance(row["prompt"], str) for row in taken}
    if len(are_texts) > 1:
        raise TrainingFailure(
            "bad_data",
            f"Some prompts of the {source.purpose} data are texts and some are messages; use one kind for all.",
        )
    remarks = _left_out_remark(too_long, done, why) + encoder.remarks(done)
    # As JSON: a table of structs would give each message and tool call the keys of all others.
    prompt = Value("string") if True in are_texts else Json()
    texts = {"answer": Value("string"), "item": Value("string")}
    features = Features({"prompt": prompt, **texts, "rows": List(Value("int64"))})
    return Pairs(Dataset.from_list(taken, features=features), len(taken), tokens, highest, remarks)


def _read_pairs(
    source: RowSource,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder[tuple[Any, ...]],
    made_from: dict[str, Any],
    schema: pa.Schema,
    to_columns: Callable[[Pair], dict[str, Any] | None],
    *,
    left_out: str,
    cut: tuple[Callable[[Pair], bool], str] | None = None,
) -> Pairs:
    equal, longer = NotedRows(), NotedRows()

    def columns_of_row(number: int, encoded: tuple[Any, ...]) -> dict[str, Any] | None:
        pair = Pair(*encoded)
        columns = to_columns(pair)
        if columns is not None:
            if np.array_equal(pair.chosen, pair.rejected):
                equal.add(number)
            if cut is not None and cut[0](pair):
                longer.add(number)
        return columns

    def pair_remarks(rows: int) -> list[Remark]:
        same = "In {n} pairs both answers are the same, so the model learns nothing from them."
        return [*(longer.remarks(rows, f"{{n}} {cut[1]}.") if cut else []), *equal.remarks(rows, same)]

    return tokenize_rows(
        source, tokenizer, encoder, made_from, schema, columns_of_row, left_out=left_out, remarks=pair_remarks
    )


def tokenize_rows(
    source: RowSource,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder[Example],
    made_from: dict[str, Any],
    schema: pa.Schema,
    columns: Callable[[int, Example], dict[str, Any] | None],
    *,
    left_out: str,
    remarks: Callable[[int], list[Remark]],
) -> Pairs:
    """Encode rows and keep them in the cache, or read them from there.

    `made_from`: everything besides data and tokenizer that the result depends on. `columns` returns the values of a
    row for `schema` without `rows`, given its number; None leaves the row out, for the reason `left_out`. `remarks`
    returns further warnings, given the number of rows in the result.

    Raises:
        TrainingFailure: `bad_data` that names the lines.
    """
    numbers = None if source.chosen is None else hashlib.sha256(np.array(source.chosen, "<i8").tobytes()).hexdigest()

    def write_table(write: Write) -> dict[str, Any]:
        table = _Table(write, schema)
        done, skipped = 0, NotedRows()
        for number, example in reader.encode_rows(
            source.path, encoder, chosen=source.chosen, progress=source.progress, purpose=source.purpose
        ):
            done += 1
            row_columns = columns(number, example)
            if row_columns is not None:
                table.add_row(number, row_columns)
            else:
                skipped.add(number)
        table.write_rows()
        _check_not_empty(table.rows, done, source, left_out)
        warnings = _left_out_remark(skipped, done, left_out) + remarks(table.rows) + encoder.remarks(done)
        return {"rows": table.rows, "tokens": table.tokens, "highest_id": table.highest_id, "remarks": warnings}

    parts = {
        **made_from, "version": VERSION, "data": source.sha256, "rows": numbers,
        "tokenizer": tokenization.tokenizer_digest(tokenizer),
    }  # fmt: skip
    entry = source.cache.get_or_build(parts if source.sha256 else None, schema, write_table)
    if entry.from_cache:
        source.progress(entry.facts["rows"], entry.facts["rows"])
    # Without a fingerprint, `Dataset` would compute one by serializing the whole table.
    dataset = Dataset(InMemoryTable(entry.table), fingerprint=entry.name[:32])
    return Pairs(dataset, **entry.facts, are_cached=entry.from_cache)


class _Table:
    """Writer of columns of token ids and of plain values, many rows at once."""

    def __init__(self, write: Write, schema: pa.Schema) -> None:
        self._write, self._schema = write, schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._answers = len(answer_columns(schema.names))
        self.rows = self.tokens = self.highest_id = 0

    def add_row(self, number: int, columns: dict[str, Any]) -> None:
        for name, value in columns.items():
            self._columns[name].append(value)
            if name.endswith("_ids"):
                # The prompt precedes each answer.
                self.tokens += len(value) * (self._answers if name == "prompt_ids" else 1)
                self.highest_id = max(self.highest_id, int(value.max(initial=0)))
        self._columns["rows"].append([number])
        self.rows += 1
        if self.rows % _ROWS_AT_ONCE == 0:
            self.write_rows()

    def write_rows(self) -> None:
        arrays = [pa.array(self._columns[field.name], type=field.type) for field in self._schema]
        self._write(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        for values in self._columns.values():
            values.clear()


def _common_prefix(some: Ints, other: Ints) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    length = min(len(some), len(other))
    apart = np.flatnonzero(some[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


def _check_not_empty(usable: int, done: int, source: RowSource, why: str) -> None:
    if not usable:
        reason = f"in all {done} rows {why}" if done else "it has no rows"
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {source.purpose} data: {reason}.")


def _left_out_remark(rows: NotedRows, done: int, why: str) -> list[Remark]:
    return rows.remarks(done, f"{{n}} rows were left out: {why}.")
