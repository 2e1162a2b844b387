"""Text of an answer, from its tokens one by one: whole characters, without its stop text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from anneal.contracts.attempt.answers import ToolCall

_INCOMPLETE = "\ufffd"
"""Character that a decoder returns for bytes that are no character, such as an incomplete one."""


class TextStream:
    """Converter of the tokens of an answer to text.

    What it has returned is never changed by later tokens: it keeps the first bytes of a character until the others
    follow, and the beginning of what may become a stop text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], *, keeps_special_tokens: bool = False
    ) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._skips_special_tokens = not keeps_special_tokens
        self.tool_calls: list[ToolCall] = []
        """Calls of tools that the answer contains; without a way to recognize them, they are part of its text."""
        self._tokens: list[int] = []
        self._context = self._decoded = 0
        """Numbers of the tokens before the last ones that were decoded, and after them.

        Some decoders leave out a space before their first token: text is decoded after the tokens before it.
        """
        self._held = ""
        self.is_stopped = False
        """True once the answer contains a stop text."""

    def add(self, token: int) -> str:
        """Return the text that is complete with the next token."""
        self._tokens.append(token)
        text = self._undecoded_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return self._release(text, is_last=False)

    def finish(self) -> str:
        """Return the rest of the text, as decoded without further tokens."""
        return "" if self.is_stopped else self._release(self._undecoded_text(), is_last=True)

    def _undecoded_text(self) -> str:
        context = self._decode(self._tokens[self._context : self._decoded])
        return self._decode(self._tokens[self._context :])[len(context) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips_special_tokens))

    def _release(self, text: str, *, is_last: bool) -> str:
        """Return the text up to a stop text, or to where one may begin unless this is the last."""
        text, self._held = self._held + text, ""
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return text[: min(places)]
        if not is_last:
            held = max((_length_of_beginning(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _length_of_beginning(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop`, without all of it, with which `text` ends."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
