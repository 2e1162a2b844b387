"""Rows as tokens: many at a time, each with the tokens that the model is to learn of it.

An encoder `prepare`s rows one by one, which tells bad ones, and `encode`s what came out of many at once. Several
threads may run the tokenizer's own Rust code; all else of transformers keeps state, and is called by one at a time.
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

IGNORED = -100
"""The label of a token that is not learned."""

Ints = npt.NDArray[np.int32]


class BadRow(Exception):
    """A row that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One text."""

    ids: Ints
    labels: Ints | None
    """`IGNORED` for what is not learned; None: every token is."""

    @property
    def teaches(self) -> bool:
        """Whether there is a token to learn; the first one is predicted from nothing."""
        return len(self.ids) > 1 if self.labels is None else bool((self.labels[1:] != IGNORED).any())

    def cut(self, part: slice) -> "Encoded":
        """A part of it."""
        return Encoded(self.ids[part], None if self.labels is None else self.labels[part])


Result = TypeVar("Result")


class Encoder(Protocol[Result]):
    """Of one format of data, to whatever a method learns from."""

    def prepare(self, row: dict[str, Any]) -> Any:
        """What `encode` takes.

        Raises:
            BadRow: the row cannot be used.
            KeyError, TypeError, IndexError: it is not of this format.
            TrainingFailure: no row can.
        """

    def encode(self, prepared: Sequence[Any]) -> list[Result]:
        """What each becomes; raises as `prepare` does, for whichever comes first. Any thread may call it."""


class TextsEncoder(Encoder[Encoded], Protocol):
    """Of rows that are one text each."""

    masks: bool
    """Whether its labels tell what is learned; False: everything is, and labels are None."""


class Ids:
    """Texts to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus")
        )
        # Without offsets, which nobody asked for and which take a third of the time.
        self._backend = tokenizer.backend_tokenizer if is_plain else None
        self._alone = threading.Lock()
        tokenizer("")  # leaves the backend as a call without padding and truncation finds it

    def __call__(self, texts: Sequence[str]) -> list[Ints]:
        """Token ids of each text, as the tokenizer gives them when it is called with the text alone."""
        if self._backend is not None:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=self._add_special_tokens)
            return [np.array(one.ids, np.int32) for one in found]
        with self._alone:
            plain = self._tokenizer(list(texts), add_special_tokens=self._add_special_tokens, verbose=False)
        return [np.array(ids, np.int32) for ids in plain["input_ids"]]


class TextEncoder:
    """Rows of the format `text`: all of it is learned."""

    masks = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ids = Ids(tokenizer)
        self._eos = str(tokenizer.eos_token)

    def prepare(self, row: dict[str, Any]) -> str:
        """The text with its end."""
        return ended(row["text"], self._eos)

    def encode(self, prepared: Sequence[str]) -> list[Encoded]:
        """Tokens of each text."""
        return [Encoded(ids, None) for ids in self._ids(prepared)]


class CompletionEncoder:
    """Rows of the format `prompt_completion`; `loss_on` = `completion` learns the completion alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        self.masks = loss_on == "completion"
        self._ids = Ids(tokenizer)
        self._eos = str(tokenizer.eos_token)

    def prepare(self, row: dict[str, Any]) -> tuple[str, str]:
        """The prompt, and the whole text with its end."""
        prompt, completion = row["prompt"], row["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadRow("prompt and completion must be texts")
        return prompt, prompt + ended(completion, self._eos)

    def encode(self, prepared: Sequence[tuple[str, str]]) -> list[Encoded]:
        """Tokens of each, prompt and completion as one text."""
        wholes = self._ids([whole for _, whole in prepared])
        if not self.masks:
            return [Encoded(ids, None) for ids in wholes]
        prompts = self._ids([prompt for prompt, _ in prepared])
        return [Encoded(ids, mask_prefix(prompt, ids)) for prompt, ids in zip(prompts, wholes, strict=True)]


def identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that decides which tokens a text or a chat becomes, template and libraries among it."""
    kind, template = type(tokenizer), tokenizer.chat_template
    state = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "chat_template": template,
        # Some templates tell the model which day it is.
        "day": datetime.date.today().isoformat() if "strftime_now" in str(template) else None,
        "versions": [tokenizers.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    if tokenizer.is_fast:
        tokenizer("")  # padding and truncation, which are part of the state, as they are while it encodes
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def mask_prefix(prompt: Ints, ids: Ints) -> Ints:
    """Labels of `ids` without the part that it shares with `prompt`.

    Tokens may merge across the border, so what counts is where the two part, not the prompt's length.
    """
    length = min(len(prompt), len(ids))
    apart = np.flatnonzero(prompt[:length] != ids[:length])
    labels = ids.copy()
    labels[: apart[0] if len(apart) else length] = IGNORED
    return labels


def ended(text: Any, eos: str) -> str:
    """A text with the mark of its end; raises `BadRow` where it is no text."""
    if not isinstance(text, str):
        raise BadRow("its text is not a string")
    return text if text.endswith(eos) else text + eos
