"""How many tokens the rows of a data set have, counted while they come in."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENIZER_BYTES = 64 * 1024**2
_BATCH_CHARACTERS = 256 * 1024
_PIECE_CHARACTERS = 64 * 1024


class BadTokenizer(ValueError):
    """The file is not a tokenizer that can be read."""


class TokenCounter:
    """Counts the tokens of rows, a batch at a time; special tokens and chat templates are left out.

    Keeps how many rows have each length. The caps on rows' and data sets' bytes leave room for some 100,000
    different lengths, so that every figure is exact in a few megabytes.
    """

    def __init__(self, name: str, file: Path) -> None:
        self._name = name
        self._tokenizer = _load(file)
        self._rows_of_length: Counter[int] = Counter()
        self._texts: list[tuple[int, str]] = []
        self._rows = 0
        self._characters = 0

    def add(self, texts: Iterable[str]) -> None:
        """One more row, as the texts that a model would read of it."""
        for text in texts:
            for piece in _pieces(text):
                self._texts.append((self._rows, piece))
                self._characters += len(piece)
        self._rows += 1
        if self._characters >= _BATCH_CHARACTERS or self._rows >= 4096:
            self._count()

    def statistics(self) -> dict[str, Any]:
        """What is known once all rows were added."""
        self._count()
        lengths = sorted(self._rows_of_length.items())
        rows = sum(count for _, count in lengths)
        total = sum(length * count for length, count in lengths)
        return {
            "tokenizer": self._name,
            "rows": rows,
            "total": total,
            "mean": round(total / rows, 2),
            "min": lengths[0][0],
            "p50": _percentile(lengths, rows, 0.5),
            "p95": _percentile(lengths, rows, 0.95),
            "max": lengths[-1][0],
        }

    def _count(self) -> None:
        lengths = [0] * self._rows
        encoded = self._tokenizer.encode_batch_fast([text for _, text in self._texts], add_special_tokens=False)
        for (row, _), encoding in zip(self._texts, encoded, strict=True):
            lengths[row] += len(encoding)
        self._rows_of_length.update(lengths)
        self._texts.clear()
        self._rows = self._characters = 0


def _load(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        if file.stat().st_size > MOST_TOKENIZER_BYTES:
            raise BadTokenizer(f"its tokenizer.json has more than {MOST_TOKENIZER_BYTES:,} bytes")
        tokenizer = Tokenizer.from_file(str(file))
    except BadTokenizer:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise BadTokenizer(f"its tokenizer.json cannot be read ({str(error)[:200]})") from None
    # A tokenizer may have been saved with the cut and the padding of its last training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces that end with a word: what a tokenizer holds of a text is many times its size."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        space = text.rfind(" ", start + _PIECE_CHARACTERS // 2, end)
        end = space if space > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def _percentile(lengths: list[tuple[int, int]], rows: int, part: float) -> int:
    """The length that so many rows do not exceed."""
    passed = 0
    for length, count in lengths:
        passed += count
        if passed >= part * rows:
            return length
    return lengths[-1][0]
