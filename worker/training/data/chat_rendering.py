"""Chats as texts: rendered by the chat template, each message in a form that the template takes.

Rows are rendered as `apply_chat_template` of transformers renders them. Where a template takes another form of the
same content (arguments of tools as text or as an object, contents as text or as parts), it gets that form, and a
remark says so.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import has_generation_markers

from worker.training.data.remarks import NotedRows, Remark
from worker.training.data.tokenization import BadRow
from worker.training.failures import TrainingFailure

Messages = list[dict[str, Any]]
_REASONING = ("reasoning_content", "thinking", "reasoning")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_DEVELOPER = re.compile(r"""["']developer["']""")
_PROBE = "probe"
_PROBE_ARGUMENTS = {"probe_key": "probe value"}

_AS_SYSTEM = (
    "{n} rows have messages of the role `developer`, which the chat template does not know. They are rendered as "
    "`system`, as OpenAI does for models without that role."
)
_PARSED = "{n} rows have the arguments of tool calls as text, and the chat template takes objects: they were parsed."
_WRITTEN = "{n} rows have the arguments of tool calls as objects, and the chat template takes text: they became JSON."
_JOINED = "{n} rows have contents in parts, which the chat template does not know: the texts were joined."
_IN_PARTS = "{n} rows have contents that are texts, and the chat template takes parts: each became one part."
_EMPTY = "{n} rows have messages without content, which the chat template rejects: it gets an empty text."
_DROPPED = (
    "In {n} rows the chat template leaves out reasoning (`reasoning_content`, or `<think>` in an answer), so the model "
    "does not learn it. Many templates keep only that of the last answer: write a row for each answer, or set a "
    "`chat_template` that renders all of it."
)
_WITH_TOOLS = "set a `chat_template` that renders them, or use a base model whose template does."
_WITHOUT_CALLS = (
    "In {n} rows the chat template leaves out the tool calls of answers, so the model does not learn them: "
    + _WITH_TOOLS
)
_WITHOUT_TOOLS = (
    "In {n} rows the chat template leaves out the descriptions of `tools`, so the model does not see them: "
    + _WITH_TOOLS
)


@dataclass(frozen=True)
class Chat:
    """Messages as the template takes them."""

    messages: Messages
    options: dict[str, Any]
    """The row's `tools`, and the variables of its `chat_template_kwargs`."""


@dataclass(frozen=True)
class _Forms:
    """Forms of a message that a template renders."""

    text: bool
    parts: bool
    object_arguments: bool
    text_arguments: bool
    developer: bool
    calls: bool
    """False if the template leaves out tool calls."""
    tools: bool
    """False if it leaves out the descriptions of tools."""


def rejected_chat(error: Exception) -> BadRow:
    """Return what to report for a chat with which a template raises an error."""
    return BadRow(
        f"the chat template rejects it: {str(error)[:200].rstrip('.')}; change the roles or the order of its messages, "
        "or use a `chat_template` that takes them"
    )


class ChatRenderer:
    """Renderer of the chats of a dataset, which collects remarks about their rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        """Prepare a renderer; `template` replaces the tokenizer's own."""
        self._tokenizer = tokenizer
        self._template = template
        self._forms: dict[str, _Forms] = {}
        self._noted = {
            reason: NotedRows()
            for reason in (
                _AS_SYSTEM, _PARSED, _WRITTEN, _JOINED, _IN_PARTS, _EMPTY, _DROPPED, _WITHOUT_CALLS, _WITHOUT_TOOLS,
            )
        }  # fmt: skip

    def remarks(self, total: int) -> list[Remark]:
        """Return what was noted about rows, of `total`."""
        return [remark for reason, rows in self._noted.items() for remark in rows.remarks(total, reason)]

    def template_of(self, options: dict[str, Any]) -> str:
        """Return the template that renders a chat; a tokenizer may have another for chats with tools."""
        return self._template or own_template(self._tokenizer, options["tools"])

    def is_marked(self, chat: Chat) -> bool:
        """Return True if the template of a chat has `{% generation %}` marks."""
        return bool(has_generation_markers(self.template_of(chat.options)))

    def render(self, messages: Sequence[Any], options: dict[str, Any], **more: Any) -> str:
        """Render messages as one text.

        Raises:
            BadRow: the template rejects them.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._template, tokenize=False, **options, **more
                )
            )
        except Exception as error:  # a template can raise anything
            raise rejected_chat(error) from error

    def generation_spans(self, messages: Sequence[Any], options: dict[str, Any]) -> list[tuple[int, int]]:
        """Return the start and end character of each `{% generation %}` block of the rendered messages."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self._tokenizer.special_tokens_map, **options}
        _, (blocks,) = render_jinja_template(
            conversations=[plain],
            chat_template=self.template_of(options),
            return_assistant_tokens_mask=True,
            **variables,
        )
        return [(start, end) for start, end in blocks if start < end]

    def fit_chats(self, number: int, row: dict[str, Any], *chats: Any, **more: Any) -> list[Chat]:
        """Return the chats of a row, all in the same form; `more` are further arguments of the rendering.

        Raises:
            BadRow: a chat is not a list of messages, or the template rejects it in every form.
        """
        for messages in chats:
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise BadRow("a chat is not a list of messages")
            if not messages:
                raise BadRow("a chat has no messages")
        options = {"tools": row.get("tools"), **(row.get("chat_template_kwargs") or {})}
        forms = self._forms_of(options)
        if options["tools"] and not forms.tools:
            self._noted[_WITHOUT_TOOLS].add(number)
        if forms.text and all(_is_plain(message) for messages in chats for message in messages):
            return [Chat(messages, options) for messages in chats]
        refusals: list[BadRow] = []
        for messages_of_chats, notes in _candidate_chats(chats, forms):
            try:
                texts = [self.render(messages, options, **more) for messages in messages_of_chats]
            except BadRow as error:
                refusals.append(error)
                continue
            if any(_drops_thoughts(messages, text) for messages, text in zip(messages_of_chats, texts, strict=True)):
                notes.add(_DROPPED)
            if not forms.calls and any(message.get("tool_calls") for messages in chats for message in messages):
                notes.add(_WITHOUT_CALLS)
            for note in notes:
                self._noted[note].add(number)
            return [Chat(messages, options) for messages in messages_of_chats]
        raise refusals[0]

    def _forms_of(self, options: dict[str, Any]) -> _Forms:
        template = self.template_of(options)
        if template not in self._forms:
            self._forms[template] = self._find_forms(template)
        return self._forms[template]

    def _find_forms(self, template: str) -> _Forms:
        """Render short chats, to find out which forms a template takes."""

        def render_answer(content: Any, tools: Any = None, **answer: Any) -> str:
            chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content, **answer}]
            try:
                return str(
                    self._tokenizer.apply_chat_template(chat, chat_template=template, tools=tools, tokenize=False)
                )
            except Exception:  # it may require other messages
                return ""

        parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
        function = {"name": _PROBE, "description": _PROBE, "parameters": parameters}
        tools = [{"type": "function", "function": function}]

        def render_call(arguments: Any) -> str:
            call = {"id": "probe0000", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
            return render_answer("", tools, tool_calls=[call])

        text = render_answer(_PROBE)
        parts = render_answer([{"type": "text", "text": _PROBE}])
        as_object, as_text = render_call(_PROBE_ARGUMENTS), render_call(json.dumps(_PROBE_ARGUMENTS))
        takes_parts = parts.count(_PROBE) >= 2 and "'type'" not in parts and '"type"' not in parts
        value = _PROBE_ARGUMENTS["probe_key"]
        calls, described = as_object + as_text, render_answer("text", tools)
        return _Forms(
            text=text.count(_PROBE) >= 2 or not takes_parts,
            parts=takes_parts,
            # A template that takes the other form renders Python's notation of a dictionary, or JSON within JSON.
            object_arguments=value in as_object and f"'{value}'" not in as_object,
            text_arguments=value in as_text and '\\"probe_key' not in as_text,
            developer=_DEVELOPER.search(template) is not None,
            # A chat that the template rejects does not show what it renders.
            calls=not calls or value in calls,
            tools=not described or _PROBE in described,
        )


def own_template(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str:
    """Return the tokenizer's template for chats with these tools, by its rules for templates with names.

    Raises:
        TrainingFailure: `config_error`: none of its templates is the default.
    """
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:
        names = ", ".join(f"`{name}`" for name in sorted(tokenizer.chat_template or ()))
        raise TrainingFailure(
            "config_error",
            f"The tokenizer has chat templates of the names {names}, and none is the `default`. Set `chat_template`.",
        ) from error


def _is_plain(message: dict[str, Any]) -> bool:
    """Return True if every template takes this message as it is, and cannot drop a part of it."""
    content = message.get("content")
    return (
        isinstance(content, str)
        and "<think>" not in content
        and message.get("role") != "developer"
        and not message.get("tool_calls")
        and not any(message.get(key) for key in _REASONING)
    )


def _candidate_chats(chats: Sequence[Messages], forms: _Forms) -> Iterator[tuple[list[Messages], set[str]]]:
    """Yield chats in the forms to try, in order, each with the notes about what is not as in the row."""
    tried: list[list[Messages]] = []
    for fills_content, swaps_arguments in product((False, True), repeat=2):
        notes: set[str] = set()
        fitted = [
            [_fit_message(message, forms, notes, fills_content, swaps_arguments) for message in messages]
            for messages in chats
        ]
        if fitted not in tried:
            tried.append(fitted)
            yield fitted, notes
    if list(chats) not in tried:
        yield list(chats), set()


def _fit_message(
    message: dict[str, Any], forms: _Forms, notes: set[str], fills_content: bool, swaps_arguments: bool
) -> dict[str, Any]:
    """Return a message in the form that a template takes, and add to `notes` what is not as in the row."""
    changed: dict[str, Any] = {}
    content = message.get("content")
    if message.get("role") == "developer" and not forms.developer:
        changed["role"] = "system"
        notes.add(_AS_SYSTEM)
    if isinstance(content, list) and not forms.parts:
        changed["content"] = "".join(part["text"] for part in content)
        notes.add(_JOINED)
    elif isinstance(content, str) and not forms.text:
        changed["content"] = [{"type": "text", "text": content}]
        notes.add(_IN_PARTS)
    elif content is None and fills_content:
        changed["content"] = ""
        notes.add(_EMPTY)
    if calls := message.get("tool_calls"):
        fitted_calls = [_fitted_call(call, forms, notes, swaps_arguments) for call in calls]
        if any(new is not old for new, old in zip(fitted_calls, calls, strict=True)):
            changed["tool_calls"] = fitted_calls
    return {**message, **changed} if changed else message


def _fitted_call(call: Any, forms: _Forms, notes: set[str], swaps: bool) -> Any:
    function = call["function"]
    arguments = function.get("arguments")
    is_text = isinstance(arguments, str)
    if not is_text and not isinstance(arguments, dict):
        return call
    takes, takes_other = (
        (forms.text_arguments, forms.object_arguments) if is_text else (forms.object_arguments, forms.text_arguments)
    )
    if (not takes and takes_other) == swaps:
        return call
    notes.add(_PARSED if is_text else _WRITTEN)
    other = json.loads(arguments or "{}") if is_text else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": other}}


def _drops_thoughts(messages: Messages, text: str) -> bool:
    """Return True if the rendered text has less of the reasoning in the answers of a chat than its messages."""
    thoughts: Counter[str] = Counter()
    for message in messages:
        if message.get("role") == "assistant":
            thoughts.update([message[key].strip() for key in _REASONING if isinstance(message.get(key), str)][:1])
            content = message.get("content")
            if isinstance(content, str):
                thoughts.update(thought.strip() for thought in _THOUGHT.findall(content))
    return any(text.count(thought) < count for thought, count in thoughts.items() if thought)
