"""Token statistics of a dataset's sequences, computed while its rows are received."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from anneal.contracts.errors import FieldError
from app.api.errors import ApiError, invalid, to_printable
from app.config import Settings
from app.infra.process.sandbox import ChildFailed, SandboxProcess

MOST_TOKENIZER_BYTES = 64 * 1024**2
_PROGRAM = "app.datasets.token_counter_process"
_SILENT_SECONDS = 60.0
_MAX_SECONDS = 3600.0
_BATCH_CHARACTERS = 256 * 1024
_PIECE_CHARACTERS = 64 * 1024


class TokenCounter:
    """Counts the tokens of sequences in batches, without special tokens and chat templates.

    Keeps the number of sequences per length. The size limits of rows and datasets allow some 100,000 different
    lengths, so all statistics are exact and take a few megabytes. A separate process runs the tokenizer and counts
    one batch while the next is collected. Raises `ApiError` if the tokenizer cannot be used.
    """

    def __init__(self, name: str, file: Path, settings: Settings) -> None:
        self._name = name
        self._child = SandboxProcess(
            _PROGRAM,
            [str(file), str(MOST_TOKENIZER_BYTES)],
            settings,
            silent=_SILENT_SECONDS,
            most_seconds=_MAX_SECONDS,
            # Each thread may take 128 MB of the limited address space.
            environment={"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(min(4, os.cpu_count() or 1))},
        )
        self._answer = bytearray()
        self._sent: tuple[list[int], int, bool] | None = None
        try:
            self._read_line()
        except BaseException:
            self.close()
            raise
        self._length_counts: Counter[int] = Counter()
        self._partial_length = 0
        """Tokens so far of a row that continues in the next batch."""
        self._texts: list[tuple[int, str]] = []
        self._rows = 0
        self._characters = 0

    def add_sequence(self, texts: Iterable[str]) -> None:
        """Add one sequence, given as the texts that a model would read."""
        for text in texts:
            for piece in _split_text(text):
                if self._characters >= _BATCH_CHARACTERS:
                    self._send_batch(goes_on=True)
                self._texts.append((self._rows, piece))
                self._characters += len(piece)
        self._rows += 1
        if self._characters >= _BATCH_CHARACTERS or self._rows >= 4096:
            self._send_batch()

    def add_length(self, tokens: int) -> None:
        """Add one sequence that is given as token ids."""
        self._length_counts[tokens] += 1

    def compute_statistics(self, rows: int) -> dict[str, Any]:
        """Return the token statistics after all sequences, of `rows` rows in total, were added."""
        self._send_batch()
        self._collect_counts()
        lengths = sorted(self._length_counts.items())
        sequences = sum(count for _, count in lengths)
        total = sum(length * count for length, count in lengths)
        return {
            "tokenizer": self._name,
            "rows": rows,
            "sequences": sequences,
            "total": total,
            "mean": round(total / sequences, 2),
            "min": lengths[0][0],
            "p50": _length_percentile(lengths, sequences, 0.5),
            "p95": _length_percentile(lengths, sequences, 0.95),
            "max": lengths[-1][0],
        }

    def close(self) -> None:
        """Stop the process."""
        self._child.close()

    def _send_batch(self, goes_on: bool = False) -> None:
        """Send the pending texts to the process; `goes_on`: the last row is not complete yet."""
        self._collect_counts()
        try:
            self._child.send(json.dumps([text for _, text in self._texts]).encode() + b"\n")
        except ChildFailed as error:
            raise self._tokenizer_error(error) from None
        self._sent = ([row for row, _ in self._texts], self._rows, goes_on)
        self._texts.clear()
        self._rows = self._characters = 0

    def _collect_counts(self) -> None:
        """Add the process's counts for the last batch."""
        if self._sent is None:
            return
        (rows, count, goes_on), self._sent = self._sent, None
        lengths = [0] * (count + goes_on)
        if lengths:
            lengths[0], self._partial_length = self._partial_length, 0
        for row, length in zip(rows, json.loads(self._read_line()), strict=True):
            lengths[row] += length
        if goes_on:
            self._partial_length = lengths.pop()
        self._length_counts.update(lengths)

    def _read_line(self) -> bytes:
        self._answer.clear()
        try:
            while not self._answer.endswith(b"\n"):
                piece = self._child.read()
                if not piece:
                    raise ChildFailed("its process exited early")
                self._answer += piece
        except ChildFailed as error:
            raise self._tokenizer_error(error) from None
        return bytes(self._answer)

    def _tokenizer_error(self, error: ChildFailed) -> ApiError:
        message = to_printable(f"the tokenizer of {self._name!r} cannot be used: {error}", 450)
        return invalid([FieldError(field="tokenizer", code="bad_tokenizer", message=message)], code="bad_tokenizer")


def _split_text(text: str) -> Iterator[str]:
    """Split a long text at word boundaries, because a tokenizer needs many times the size of its input."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        space = text.rfind(" ", start + _PIECE_CHARACTERS // 2, end)
        end = space if space > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def _length_percentile(lengths: list[tuple[int, int]], sequences: int, part: float) -> int:
    """Return the length that the fraction `part` of the sequences does not exceed."""
    passed = 0
    for length, count in lengths:
        passed += count
        if passed >= part * sequences:
            return length
    return lengths[-1][0]
