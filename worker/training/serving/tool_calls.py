"""Tool calls in answers, as the chat template of their model writes them."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema

from anneal.contracts.attempt.answers import Question, ToolCall
from worker.training.data.chat_rendering import own_template
from worker.training.prediction.generation import special_tokens
from worker.training.serving.text_stream import TextStream

_CALLS, _CONTENT = "tool_calls", "content"
_HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        _CALLS: {
            "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        _CONTENT: {"content": "text"},
    },
}  # fmt: skip
"""Calls as JSON between two marks: the form of Hermes, Qwen and others, in templates that no library knows."""

_LONGEST_NAME = 1000
"""Characters of the name of a tool; a longer one is no name."""


def response_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return how the tool calls of a model are recognized in its answers; None if that is unknown.

    A template that transformers or TRL has for the tokenizer is reduced to its calls, if everything else is content:
    then the rest of an answer is sent as the model writes it.
    """
    template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if template is None:
        try:
            template = add_response_schema(tokenizer).response_template
        except ValueError:  # TRL does not know it
            text = own_template(tokenizer, [{}])
            return _HERMES if "<tool_call>" in text and "<function=" not in text else None
    fields = template["fields"]
    if _CALLS not in fields or _CONTENT not in fields:
        return None
    if {"open", "open_pattern"}.isdisjoint(fields[_CONTENT]):
        return {**template, "fields": {name: fields[name] for name in (_CALLS, _CONTENT)}}
    return template


class ToolCallStream(TextStream):
    """Converter of the tokens of an answer to its text and its tool calls, whose text is left out.

    An answer with a call that cannot be read is text throughout.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, question: Question, prompt: list[int], template: dict[str, Any]
    ) -> None:
        super().__init__(tokenizer, question.stop, keeps_special_tokens=True)
        is_reduced = template["fields"].keys() == {_CALLS, _CONTENT}
        prefix = "" if is_reduced else tokenizer.decode(prompt)
        self._parser = tokenizer.get_response_parser(template, prefix=prefix, tools=question.tools)
        self._special = special_tokens(tokenizer)
        self._raw = ""
        """Text of the answer, with special tokens."""
        self._parsed = self._sent = 0
        """Lengths of the start of it of which the parser has returned text, and of that which was sent."""
        self._late_content = ""
        """Content after the first call, sent at the end: if a later call cannot be read, the first one is text too."""
        self._is_readable, self._has_call = True, False

    def add(self, token: int) -> str:
        return self._read(super().add(token), is_last=False)

    def finish(self) -> str:
        return self._read(super().finish(), is_last=True)

    def _read(self, text: str, *, is_last: bool) -> str:
        """Return the content in the next part of the answer, and note the calls in it."""
        self._raw += text
        if not self._is_readable:
            return self._without_special_tokens(text)
        try:
            events = self._parser.feed(text)
            if is_last:
                events += self._parser.finalize()[1]
            closed = [event for event in events if event["type"] == "region_close" and event["field"] == _CALLS]
            self.tool_calls += [call for event in closed for call in _calls_of(event["value"])]
        except (ValueError, TypeError, KeyError, AttributeError):  # what the model has written is no call
            self._is_readable, self.tool_calls = False, []
            return self._without_special_tokens(self._raw[self._sent :])
        content = self._content_of(events)
        if is_last:
            content, self._late_content = content + self._late_content, ""
        return self._without_special_tokens(content)

    def _content_of(self, events: list[dict[str, Any]]) -> str:
        """Return the content before the first call, and hold what comes after it."""
        content = ""
        for event in events:
            if event["type"] == "region_open" and event["field"] == _CALLS:
                self._has_call = True
            if event["type"] != "region_chunk":
                continue
            # Only what marks a part is not in the events: where its text is in the answer has to be looked up.
            self._parsed = self._raw.find(event["text"], self._parsed) + len(event["text"])
            if event["field"] == _CONTENT and self._has_call:
                self._late_content += event["text"]
            elif event["field"] == _CONTENT:
                content, self._sent = content + event["text"], self._parsed
        return content

    def _without_special_tokens(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text


def _calls_of(value: Any) -> list[ToolCall]:
    """Return the calls in a part of an answer.

    Raises:
        ValueError: a call is not complete.
    """
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        name = function["name"]
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not isinstance(arguments, dict):
            raise ValueError("a call has a name and an object of arguments")
        calls.append(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
    return calls
