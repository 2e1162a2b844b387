"""Rows as tokens, encoded in batches, with labels for the tokens that the model learns.

An encoder `prepare`s rows one by one, which finds bad rows, and `encode`s many prepared rows at once. Several threads
may run the tokenizer's own Rust code; the rest of transformers keeps state, and is called by one thread at a time.
"""

import datetime
import hashlib
import json
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from worker.training.data.remarks import Remark

IGNORED = -100
"""Label of a token that is not learned."""

Ints = npt.NDArray[np.int32]


class BadRow(Exception):
    """A row that cannot be used, with the reason."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one text."""

    ids: Ints
    labels: Ints | None
    """`IGNORED` for tokens that are not learned; None: every token is learned."""

    @property
    def teaches(self) -> bool:
        """True if there is a token to learn; the first token is never predicted."""
        return len(self.ids) > 1 if self.labels is None else bool((self.labels[1:] != IGNORED).any())

    def cut(self, part: slice) -> "Encoded":
        """Return the tokens and labels of a slice."""
        return Encoded(self.ids[part], None if self.labels is None else self.labels[part])


Result = TypeVar("Result")


class Encoder(Protocol[Result]):
    """Encoder of one data format to the examples of a training method."""

    def prepare(self, row: dict[str, Any], number: int) -> Any:
        """Return the input of `encode` for the row with this number.

        Raises:
            BadRow: the row cannot be used.
            KeyError, TypeError, IndexError: it does not have this format.
            worker.training.failures.TrainingFailure: no row can be used.
        """

    def encode(self, prepared: Sequence[Any]) -> list[Result]:
        """Encode prepared rows; raise as `prepare` does, for the first bad row. Any thread may call it."""

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""


class TextsEncoder(Encoder[Encoded], Protocol):
    """Encoder of rows that are one text each."""

    masks: bool
    """True if labels mark the tokens to learn; False: every token is learned, and labels are None."""


class TextTokenizer:
    """Converter of texts to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus")
        )
        # Calling the backend skips offsets, which are not needed and take a third of the time.
        self._backend = tokenizer.backend_tokenizer if is_plain else None
        self._lock = threading.Lock()
        tokenizer("")  # sets the backend to no padding and no truncation

    def __call__(self, texts: Sequence[str]) -> list[Ints]:
        """Return the token ids of each text, as the tokenizer returns them for that text alone."""
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._add_special_tokens)
            return [np.array(one.ids, np.int32) for one in encodings]
        with self._lock:
            plain = self._tokenizer(list(texts), add_special_tokens=self._add_special_tokens, verbose=False)
        return [np.array(ids, np.int32) for ids in plain["input_ids"]]


class TextEncoder:
    """Encoder of the format `text`: every token is learned."""

    masks = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ids = TextTokenizer(tokenizer)
        self._eos = str(tokenizer.eos_token)

    def prepare(self, row: dict[str, Any], number: int) -> str:
        """Return the text with its end-of-sequence token."""
        return with_eos(row["text"], self._eos)

    def encode(self, prepared: Sequence[str]) -> list[Encoded]:
        """Tokenize each text."""
        return [Encoded(ids, None) for ids in self._ids(prepared)]

    def remarks(self, total: int) -> list[Remark]:
        """Return no remarks: a text is used as it is."""
        return []


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase, is_dated: bool = True) -> str:
    """Compute a digest of all that affects tokenization, including the chat template and library versions.

    With `is_dated`, it also depends on the current date if the chat template does.
    """
    kind, template = type(tokenizer), tokenizer.chat_template
    state = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "chat_template": template,
        "day": datetime.date.today().isoformat() if is_dated and "strftime_now" in str(template) else None,
        "versions": [tokenizers.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    if tokenizer.is_fast:
        tokenizer("")  # sets padding and truncation, which are part of the state, as encoding does
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def mask_prefix(prompt: Ints, ids: Ints) -> Ints:
    """Return labels for `ids` in which the prefix shared with `prompt` is masked.

    Tokens may merge across the border, so the mask ends at the first difference, not at the prompt's length.
    """
    length = min(len(prompt), len(ids))
    apart = np.flatnonzero(prompt[:length] != ids[:length])
    labels = ids.copy()
    labels[: apart[0] if len(apart) else length] = IGNORED
    return labels


def with_eos(text: Any, eos: str) -> str:
    """Append the end-of-sequence token if it is missing; raise `BadRow` if `text` is not a string."""
    if not isinstance(text, str):
        raise BadRow("its text is not a string")
    return text if text.endswith(eos) else text + eos
