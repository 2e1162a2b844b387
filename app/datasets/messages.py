"""Messages of chats: validation, and conversion of what only OpenAI's API understands to what chat templates read.

A message is stored as it was uploaded, since templates differ in what they read of it: the trainer chooses the form
that the template of the model renders.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from app.infra.strict_json import BadJson, parse_json

Row = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_NON_SPACE = re.compile(r"\S")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning before an answer, as transformers knows them."""
_ROLE_OF_KEY: Mapping[str, str] = {
    "tool_calls": "assistant",
    "function_call": "assistant",
    "refusal": "assistant",
    **dict.fromkeys(_REASONING, "assistant"),
    "tool_call_id": "tool",
}
"""Keys of messages that only one role may have."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a content that are text, in OpenAI's APIs for chats and for responses."""
_KEYS = ("role", "content", "name", "weight", *_ROLE_OF_KEY)
_RENDERER_ARGUMENTS = frozenset(
    {
        "tools", "chat_template", "conversation", "messages", "tokenize", "add_generation_prompt", "padding",
        "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "sanitize_control_tokens",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` in transformers that a row cannot set."""


class BadRow(ValueError):
    """Invalid row: a stable code and a message that names the location in the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def check_chats(row: Row, *columns: str, allows_weights: bool = False) -> Row:
    """Check the messages in `columns`, and what is rendered with them; return the row, or a copy if a value changes.

    With `allows_weights` a message may have the weight 0, which leaves it out of the loss.
    """
    changed: Row = {}
    for column in columns:
        messages = check_messages(row[column], column)
        if not allows_weights:
            _check_unweighted(messages, column)
        if messages is not row[column]:
            changed[column] = messages
    tools = _parse_if_text(row.get("tools"), "tools")
    functions = row.get("functions")
    if functions and is_blank(tools) and _are_objects(functions):  # the name of `tools` in older files of OpenAI
        tools = [{"type": "function", "function": function} for function in functions]
        row = {key: value for key, value in row.items() if key != "functions"}
    if not is_blank(tools) and not _are_objects(tools):
        raise BadRow("wrong_type", "`tools` must be a list of objects, each the JSON schema of a function")
    if tools == "":  # an empty cell
        tools = None
    if tools is not row.get("tools"):
        changed["tools"] = tools
    options = _parse_if_text(row.get("chat_template_kwargs"), "chat_template_kwargs")
    _check_template_options(options)
    if options is not row.get("chat_template_kwargs"):
        changed["chat_template_kwargs"] = options
    return {**row, **changed} if changed else row


def check_messages(messages: Any, name: str) -> list[Any]:
    """Check messages; return the same list, or a copy if a message must change."""
    if not isinstance(messages, list) or not messages:
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one message")
    converted = [_check_message(message, f"{name}[{at}]") for at, message in enumerate(messages)]
    same = all(new is old for new, old in zip(converted, messages, strict=True))
    return messages if same else converted


def texts_of(messages: list[Any]) -> Iterator[str]:
    """Yield the texts of messages that were checked: contents, reasoning and calls of tools."""
    for message in messages:
        content = message.get("content") or ""
        yield from [content] if isinstance(content, str) else (part["text"] for part in content)
        yield from (message[key] for key in _REASONING if message.get(key))
        yield from (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ())


def check_text(text: Any, name: str) -> None:
    """Raise `BadRow` unless `text` is a string with something in it."""
    if not isinstance(text, str):
        raise BadRow("wrong_type", f"`{name}` must be a string")
    if _NON_SPACE.search(text) is None:
        raise BadRow("empty_text", f"`{name}` is empty; fill it or remove the row")


def is_blank(value: Any) -> bool:
    """Return True if a column has no value."""
    return value is None or value == ""


def parse_text(text: str, name: str) -> Any:
    """Parse the JSON in a text; raises `BadRow`."""
    try:
        return parse_json(text.encode(errors="surrogatepass"))
    except BadJson as error:
        raise BadRow(error.code, f"`{name}` is a text, which must be JSON: {error.message}") from None


def _parse_if_text(value: Any, name: str) -> Any:
    """Return the value of a column that many datasets store as JSON in a text."""
    return parse_text(value, name) if isinstance(value, str) and value else value


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _check_template_options(options: Any) -> None:
    if is_blank(options):
        return
    if not isinstance(options, dict):
        raise BadRow(
            "wrong_type", '`chat_template_kwargs` must be an object such as {"enable_thinking": false}, or left out'
        )
    if reserved := sorted(options.keys() & _RENDERER_ARGUMENTS):
        other = {"tools": "the column `tools`", "chat_template": "`chat_template` of the run's configuration"}
        remedy = f"use {other[reserved[0]]}" if reserved[0] in other else "leave it out"
        raise BadRow(
            "reserved_key",
            f"`chat_template_kwargs.{reserved[0]}` is set by the trainer and is no variable of a template; {remedy}",
        )


def _check_unweighted(messages: list[Any], name: str) -> None:
    for at, message in enumerate(messages):
        if message.get("weight") == 0:
            raise BadRow(
                "weight_without_effect",
                f"`{name}[{at}].weight` is 0, which only `messages` may have; leave it out, or write the row as "
                "`messages`",
            )


def _check_message(message: Any, place: str) -> Any:
    if not isinstance(message, dict):
        raise BadRow("wrong_type", f'`{place}` must be an object such as {{"role": "user", "content": "…"}}')
    message = _without_functions(message, place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown_role", f"`{place}.role` must be one of {', '.join(ROLES)}")
    for key, value in message.items():
        if value is not None:
            _check_key(key, role, place)
    _check_weight(message, place)
    for key in ("name", "tool_call_id", "refusal", *_REASONING):
        if message.get(key) is not None and not isinstance(message[key], str):
            raise BadRow("wrong_type", f"`{place}.{key}` must be a string")
    if message.get("refusal"):  # templates have no other place for it
        if not is_blank(message.get("content")):
            raise BadRow("refusal_and_content", f"`{place}` has both `content` and `refusal`; keep one of them")
        message = {**{key: value for key, value in message.items() if key != "refusal"}, "content": message["refusal"]}
    if message.get("tool_calls") not in (None, []):
        _check_calls(message["tool_calls"], f"{place}.tool_calls")
    return _check_content(message, place)


def _check_content(message: Row, place: str) -> Row:
    content = message.get("content")
    if isinstance(content, list):
        parts = [_check_part(part, f"{place}.content[{at}]") for at, part in enumerate(content)]
        if any(new is not old for new, old in zip(parts, content, strict=True)):
            message = {**message, "content": parts}
        content = "".join(part["text"] for part in parts)
    says_more = bool(message.get("tool_calls")) or any(message.get(key) for key in _REASONING)
    if content is None and says_more:
        return message
    if not isinstance(content, str):
        raise BadRow("wrong_type", f"`{place}.content` must be a string, or a list of parts of the type `text`")
    if message["role"] == "assistant" and message.get("weight") != 0 and not says_more:
        check_text(content, f"{place}.content")
    return message


def _check_part(part: Any, place: str) -> Row:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise BadRow("wrong_type", f'`{place}` must be an object such as {{"type": "text", "text": "…"}}')
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind not in _TEXT_PARTS:
        raise BadRow(
            "unsupported_content",
            f"`{place}` has the type `{kind[:40]}`, and models are trained on text only; describe it in a part of the "
            "type `text`, or remove the row",
        )
    if not isinstance(part.get("text"), str):
        raise BadRow("wrong_type", f"`{place}.text` must be a string")
    return part if kind == "text" else {**part, "type": "text"}


def _check_key(key: str, role: str, place: str) -> None:
    """Check a key that has a value. Any other key is given to the chat template, which may read it."""
    needed = _ROLE_OF_KEY.get(key)
    if needed is not None and role != needed:
        raise BadRow("unknown_key", f"`{place}` has `{key}`, which only a message of the role {needed} may have")
    if key not in _KEYS and (meant := _closest_key(key)) is not None:
        raise BadRow("unknown_key", f"`{place}` has `{key[:40]}`; did you mean `{meant}`?")


@functools.lru_cache(maxsize=1024)
def _closest_key(key: str) -> str | None:
    return next(iter(difflib.get_close_matches(key[:40], _KEYS, 1, cutoff=0.75)), None)


def _check_weight(message: Row, place: str) -> None:
    weight = message.get("weight")
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow("wrong_type", f"`{place}.weight` must be 0 (the message is not learned) or 1")
    if weight == 1 and message["role"] != "assistant":
        raise BadRow(
            "weight_without_effect",
            f"`{place}.weight` is 1, and only messages of the role assistant are learned; leave it out",
        )


def _check_calls(calls: Any, name: str) -> None:
    """Check calls of tools, whose arguments may be an object, or a text with one as JSON."""
    if not isinstance(calls, list):
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one call; leave it out if there is none")
    for at, call in enumerate(calls):
        _check_function(call.get("function") if isinstance(call, dict) else None, f"{name}[{at}].function")


def _check_function(function: Any, place: str) -> None:
    if not isinstance(function, dict):
        raise BadRow("wrong_type", f'`{place}` must be an object such as {{"name": "search", "arguments": {{}}}}')
    check_text(function.get("name"), f"{place}.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_text(arguments or "{}", f"{place}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow("wrong_type", f"`{place}.arguments` must be an object, or a text with one as JSON")


def _without_functions(message: Row, place: str) -> Row:
    """Convert a message of the time before `tool_calls`: the role `function`, and the key `function_call`."""
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    call = message.get("function_call")
    if call is None or message.get("tool_calls"):
        return message
    _check_function(call, f"{place}.function_call")
    rest = {key: value for key, value in message.items() if key not in ("function_call", "tool_calls")}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}
