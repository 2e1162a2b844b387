"""Preference pairs and prompts: from a JSONL file to what the trainers of `dpo`, `reward` and `rlhf` take."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from app.runs.config import TrainingConfig
from worker.training.encoding import BadRow
from worker.training.failures import TrainingFailure
from worker.training.reading import take_rows

Progress = Callable[[int, int], None]
_IDS = pa.list_(pa.int32())


@dataclass
class Pairs:
    """Data ready to train on; every row of `dataset` carries its number in the file, in the list `rows`."""

    dataset: Dataset
    rows: int
    tokens: int
    highest_id: int
    remarks: list[str] = field(default_factory=list)


class PairEncoder:
    """Turns a pair into the ids of its prompt, of the chosen and of the rejected answer, exactly as TRL does.

    Where the two texts with their prompt part from the prompt alone, the answers begin: tokens may merge across that
    border, and a chat template may render a prompt otherwise once an answer follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._eos = str(tokenizer.eos_token)

    def encode(self, row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        """Ids of prompt, chosen and rejected.

        Raises:
            BadRow: the chat template refuses it.
        """
        prompt, chosen, rejected, tools = row["prompt"], row["chosen"], row["rejected"], row.get("tools")
        if isinstance(prompt, str):
            before = self.ids(prompt)
            with_chosen, with_rejected = (self.ids(prompt + _ended(text, self._eos)) for text in (chosen, rejected))
        else:
            before = self.ids(prompt, tools, add_generation_prompt=True)
            with_chosen, with_rejected = (self.ids(prompt + answer, tools) for answer in (chosen, rejected))
        start = min(shared(before, with_chosen), shared(before, with_rejected))
        return before[:start], with_chosen[start:], with_rejected[start:]

    def ids(self, text: Any, tools: Any = None, **more: Any) -> list[int]:
        """Token ids of a text, or of a chat as its template renders it."""
        if isinstance(text, str):
            return list(self._tokenizer(text, verbose=False)["input_ids"])
        try:
            rendered = self._tokenizer.apply_chat_template(text, tools=tools, tokenize=False, **more)
        except Exception as error:  # a template raises whatever it likes
            raise BadRow(f"the chat template refuses it: {str(error)[:200]}") from error
        return list(self._tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def converse(path: str) -> bool:
    """Whether the prompts of a file are messages, not texts; told by its first row, as all rows are of one kind."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            first = next((raw for raw in file if raw.strip()), b"{}")
        return isinstance(json.loads(first).get("prompt"), list)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False  # said where the rows are read


def preferences(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainingConfig,
    *,
    max_length: int,
    chosen: list[int] | None,
    progress: Progress,
    purpose: str,
) -> Pairs:
    """Pairs for `dpo`, columns `prompt_ids`, `chosen_ids`, `rejected_ids` and `rows`; cut by the trainer's collator.

    A pair of which cutting would leave no answer is left out.

    Raises:
        TrainingFailure: `bad_data` that names the lines.
    """
    table = _Table(path, chosen, progress, purpose)
    encoder, keeps_start = PairEncoder(tokenizer), config.truncation_mode == "keep_start"
    cut = 0

    def take(number: int, row: dict[str, Any]) -> None:
        nonlocal cut
        prompt, one, other = encoder.encode(row)
        if keeps_start and len(prompt) >= max_length:
            table.left_out += 1
            return
        cut += len(prompt) + max(len(one), len(other)) > max_length
        table.add(number, prompt_ids=prompt, chosen_ids=one, rejected_ids=other)

    pairs = table.read(take, f"the prompt alone fills the {max_length} tokens")
    if cut:
        end = "end" if keeps_start else "start"
        pairs.remarks.append(f"{cut} of {pairs.rows} pairs are longer than {max_length} tokens: cut at the {end}.")
    return pairs


def comparisons(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    chosen: list[int] | None,
    progress: Progress,
    purpose: str,
) -> Pairs:
    """Pairs for `reward`, columns `chosen_ids` and `rejected_ids` (each with its prompt) and `rows`.

    A pair that is too long is left out: the reward is read at the end of a text, and a cut one has none.

    Raises:
        TrainingFailure: `bad_data` that names the lines.
    """
    table = _Table(path, chosen, progress, purpose)
    encoder = PairEncoder(tokenizer)

    def take(number: int, row: dict[str, Any]) -> None:
        prompt, one, other = encoder.encode(row)
        one, other = prompt + one, prompt + other
        if max(len(one), len(other)) > max_length:
            table.left_out += 1
            return
        table.add(number, chosen_ids=one, rejected_ids=other)

    return table.read(take, f"one of the two is longer than {max_length} tokens")


def prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    chosen: list[int] | None,
    progress: Progress,
    purpose: str,
    needs_answer: bool,
) -> Pairs:
    """Prompts for `rlhf`, columns `prompt` (a text or messages), `answer` (a text or None) and `rows`.

    A prompt of more than `max_length` tokens is left out: cut, it would be another question.

    Raises:
        TrainingFailure: `bad_data` that names the lines, of rows without the answer that a reward compares with too.
    """
    encoder = PairEncoder(tokenizer)
    kept: list[dict[str, Any]] = []
    tokens = highest = left_out = 0

    def take(number: int, row: dict[str, Any]) -> None:
        nonlocal tokens, highest, left_out
        prompt, answer = row["prompt"], row.get("answer")
        if needs_answer and not isinstance(answer, str):
            raise BadRow("it has no `answer`, and a reward compares with it")
        plain = isinstance(prompt, str)
        ids = encoder.ids(prompt) if plain else encoder.ids(prompt, row.get("tools"), add_generation_prompt=True)
        if len(ids) > max_length:
            left_out += 1
            return
        tokens += len(ids)
        highest = max(highest, max(ids, default=0))
        kept.append({"prompt": prompt, "answer": answer, "rows": [number]})

    done = take_rows(path, chosen, purpose, progress, take)
    remarks = _left_out(left_out, done, f"the prompt is longer than {max_length} tokens", purpose, len(kept))
    kinds = {isinstance(row["prompt"], str) for row in kept}
    if len(kinds) > 1:
        raise TrainingFailure(
            "bad_data", f"Some prompts of the {purpose} data are texts and some are messages; make them all the same."
        )
    return Pairs(Dataset.from_list(kept), len(kept), tokens, highest, remarks)


def shared(some: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    count = 0
    for one, two in zip(some, other, strict=False):
        if one != two:
            break
        count += 1
    return count


class _Table:
    """Collects columns of token ids."""

    def __init__(self, path: str, chosen: list[int] | None, progress: Progress, purpose: str) -> None:
        self._source = path, chosen, purpose, progress
        self._purpose = purpose
        self._columns: dict[str, list[list[int]]] = {}
        self._tokens = self._highest = 0
        self.left_out = self.equal = 0

    def add(self, number: int, **columns: list[int]) -> None:
        self.equal += columns["chosen_ids"] == columns["rejected_ids"]
        for name, ids in columns.items():
            self._columns.setdefault(name, []).append(ids)
            self._tokens += len(ids)
            self._highest = max(self._highest, max(ids, default=0))
        self._columns.setdefault("rows", []).append([number])

    def read(self, take: Callable[[int, dict[str, Any]], None], too_long: str) -> Pairs:
        done = take_rows(*self._source, take)
        count = len(self._columns.get("rows", ()))
        remarks = _left_out(self.left_out, done, too_long, self._purpose, count)
        if self.equal:
            remarks.append(f"In {self.equal} of {count} pairs both answers are the same: they teach nothing.")
        arrays = {name: pa.array(values, type=_IDS) for name, values in self._columns.items()}
        dataset = Dataset(InMemoryTable(pa.table(arrays)))
        return Pairs(dataset, count, self._tokens, self._highest, remarks)


def _left_out(left_out: int, done: int, why: str, purpose: str, kept: int) -> list[str]:
    if kept == 0:
        reason = f"in all {done} rows {why}" if left_out else "it has no rows"
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {purpose} data: {reason}.")
    return [f"{left_out} of {done} rows were left out: {why}."] if left_out else []


def _ended(text: Any, eos: str) -> str:
    if not isinstance(text, str):
        raise BadRow("its text is not a string")
    return text if text.endswith(eos) else text + eos
