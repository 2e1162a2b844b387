"""Dataset formats: validation of rows, and format detection by column names."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from app.infra.strict_json import BadJson, parse

Row = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
_NON_SPACE = re.compile(r"\S")


class BadRow(ValueError):
    """Invalid row: a stable code and a message that names the location in the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def detect(columns: Iterable[str]) -> str:
    """Detect the format from column names; raises `BadRow` if no format or more than one matches."""
    names = list(columns)
    fitting = [(needed, name) for name, choices in _SIGNATURES.items() for needed in choices if needed <= set(names)]
    # {prompt, completion} is more specific than {prompt}, which it contains.
    found = sorted({name for needed, name in fitting if not any(needed < other for other, _ in fitting)})
    if len(found) > 1 and "prompt" in found and not set(names) >= _WITH_ANSWER:
        # A prompt next to the columns of another format is usually an extra column, not a dataset of prompts.
        found.remove("prompt")
    if not found and layout_of(names) is not None:
        return "chat"
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRow(
            "ambiguous_format",
            f"the row could be {' or '.join(found)}; set the field `format` before the file",
        )
    there = ", ".join(f"`{name[:40]}`" for name in names[:10]) or "none"
    raise BadRow(
        "unknown_format",
        "a row needs `messages`, `conversations` or `instruction` and `output` (chat), `prompt` and `completion`, "
        "`text`, `prompt`, `chosen` and `rejected`, `prompt`, `completion` and `label`, or `prompt`; use `columns` to "
        f"rename yours: {there}",
    )


def layout_of(columns: Iterable[str]) -> str | None:
    """Return the layout of chats whose columns are converted to `messages`, or None: `sharegpt` or `alpaca`."""
    names = set(columns)
    if "messages" in names:
        return None
    return next((layout for layout, needed in _LAYOUTS.items() if needed <= names), None)


def is_json(column: str, format: str | None) -> bool:
    """Return True if a table's cell in this column must contain JSON, because the format has no text in it."""
    return column in ("messages", "conversations") or (format == "preference" and column in _OPENAI)


def validate_row(format: str, row: Row) -> Row:
    """Validate a row and return it in its stored form, which is `row` itself unless converted; raises `BadRow`."""
    return _CHECKS[format](row)


def sequences_of(format: str, row: Row) -> Iterator[Iterator[str]]:
    """Yield the texts of each sequence of a row that `validate_row` returned, without a chat template.

    A preference pair has two sequences, each with the prompt before its answer.
    """
    for columns in _READ[format]:
        yield _texts(row, columns)


def _texts(row: Row, columns: tuple[str, ...]) -> Iterator[str]:
    for column in columns:
        value = row[column]
        if isinstance(value, str):
            yield value
        else:
            for message in value:
                yield message["content"]
                yield from (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ()))


def _chat(row: Row) -> Row:
    layout = layout_of(row)
    if layout == "sharegpt":
        row = _from_sharegpt(row)
    elif "messages" not in row and row.keys() & _LAYOUTS["alpaca"]:
        row = _from_alpaca(row)
    _required(row, "messages", "chat")
    row = _with_messages(row, "messages")
    messages = row["messages"]
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("no_assistant_message", "`messages` has no message of the role `assistant` to train on")
    return row


def _prompt_completion(row: Row) -> Row:
    for column in ("prompt", "completion"):
        _required(row, column, "prompt_completion")
    for column in ("prompt", "completion"):
        _check_text(row[column], column)
    return row


def _plain_text(row: Row) -> Row:
    _check_text(_required(row, "text", "text"), "text")
    return row


def _preference(row: Row) -> Row:
    if "preferred_output" in row or "non_preferred_output" in row:
        row = _from_openai(row)
    columns = ("prompt", "chosen", "rejected")
    for column in columns:
        _required(row, column, "preference")
    if any(isinstance(row[column], list) for column in columns):
        row = _with_messages(row, *columns)
        for column in ("chosen", "rejected"):
            if row[column][-1]["role"] != "assistant":
                raise BadRow("no_assistant_message", f"the last message of `{column}` must have the role `assistant`")
    else:
        for column in columns:
            _check_text(row[column], column)
    return row


def _rated(row: Row) -> Row:
    columns = ("prompt", "completion")
    for column in (*columns, "label"):
        _required(row, column, "rated")
    if any(isinstance(row[column], list) for column in columns):
        row = _with_messages(row, *columns)
        if row["completion"][-1]["role"] != "assistant":
            raise BadRow("no_assistant_message", "the last message of `completion` must have the role `assistant`")
    else:
        for column in columns:
            _check_text(row[column], column)
    label = row["label"]
    if isinstance(label, str) and label.lower() in ("true", "false"):  # cells of CSV are texts
        return {**row, "label": label.lower() == "true"}
    if not isinstance(label, bool):
        raise BadRow(
            "wrong_type",
            "`label` must be true (desirable) or false (undesirable); if it means something else, set the field "
            "`format` to prompt_completion before the file",
        )
    return row


def _from_openai(row: Row) -> Row:
    """Convert a preference pair from OpenAI's format; other members of `input` (`tools`) become columns."""
    for column in _OPENAI:
        _required(row, column, "preference")
    given = row["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise BadRow("wrong_type", '`input` must be an object such as {"messages": [{"role": "user", …}]}')
    pair = {"prompt": given["messages"], "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    for column in ("preferred_output", "non_preferred_output"):
        _check_messages(row[column], column)
    _check_messages(given["messages"], "input.messages")
    rest = {key: value for key, value in row.items() if key not in _OPENAI}
    extra = {key: value for key, value in given.items() if key != "messages"}
    if twice := sorted((rest.keys() | extra.keys()) & pair.keys() | (rest.keys() & extra.keys())):
        raise BadRow(
            "column_conflict", f"`{twice[0][:40]}` occurs twice after `input` is expanded into columns; remove one"
        )
    return {**pair, **extra, **rest}


def _prompt(row: Row) -> Row:
    prompt = _required(row, "prompt", "prompt")
    if isinstance(prompt, list):
        row = _with_messages(row, "prompt")
    else:
        _check_text(prompt, "prompt")
    if row.get("answer") is not None:
        _check_text(row["answer"], "answer")
    return row


def _required(row: Row, column: str, format: str) -> Any:
    if column not in row:
        raise BadRow("missing_column", f"`{column}` is missing; every row of the format {format} needs it")
    return row[column]


def _from_sharegpt(row: Row) -> Row:
    """Convert a chat of `from` and `value`, and its column `system`; turns of `role` and `content` stay."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("wrong_type", "`conversations` must be a list of at least one turn")
    messages = []
    for at, turn in enumerate(turns):
        place = f"conversations[{at}]"
        if not isinstance(turn, dict):
            raise BadRow("wrong_type", f'`{place}` must be an object such as {{"from": "human", "value": "…"}}')
        if "from" not in turn:
            messages.append(turn)
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise BadRow("unknown_role", f"`{place}.from` must be one of {', '.join(_SPEAKERS)}")
        _check_text(turn.get("value"), f"{place}.value")
        extra = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": _SPEAKERS[speaker], "content": turn["value"], **extra})
    _check_messages(messages, "conversations")
    rest = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    return {"messages": [*_system(row), *messages], **rest}


def _from_alpaca(row: Row) -> Row:
    """Convert an instruction, with its optional columns `input`, `system` and `history`, to a chat."""
    for column in ("instruction", "output"):
        _check_text(_required(row, column, "chat"), column)
    question = row["instruction"]
    if not _is_blank(row.get("input")):
        _check_text(row["input"], "input")
        question += "\n\n" + row["input"]
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow("wrong_type", "`history` must be a list of pairs of a question and its answer")
    pairs = []
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow("wrong_type", f"`history[{at}]` must be a question and its answer")
        for text in pair:
            _check_text(text, f"history[{at}]")
        pairs.append(pair)
    messages = _system(row)
    for asked, answered in [*pairs, (question, row["output"])]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    rest = {key: value for key, value in row.items() if key not in _ALPACA}
    return {"messages": messages, **rest}


def _system(row: Row) -> list[dict[str, Any]]:
    if _is_blank(row.get("system")):
        return []
    _check_text(row["system"], "system")
    return [{"role": "system", "content": row["system"]}]


def _is_blank(value: Any) -> bool:
    return value is None or value == ""


def _with_messages(row: Row, *columns: str) -> Row:
    """Check lists of messages and the column `tools`; return the row, or a copy if a value must change."""
    changed: Row = {}
    for column in columns:
        messages = _check_messages(row[column], column)
        if messages is not row[column]:
            changed[column] = messages
    tools = row.get("tools")
    if isinstance(tools, str) and tools:  # many datasets store them as JSON in a text
        tools = changed["tools"] = _from_json(tools, "tools")
    if not _is_blank(tools) and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("wrong_type", "`tools` must be a list of objects, each the JSON schema of a function")
    return {**row, **changed} if changed else row


def _check_messages(messages: Any, name: str) -> list[Any]:
    """Check messages; return the same list, or a copy if a message must change."""
    if not isinstance(messages, list) or not messages:
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one message")
    converted = [_check_message(message, f"{name}[{at}]") for at, message in enumerate(messages)]
    same = all(new is old for new, old in zip(converted, messages, strict=True))
    return messages if same else converted


def _check_message(message: Any, place: str) -> Any:
    if not isinstance(message, dict):
        raise BadRow("wrong_type", f'`{place}` must be an object such as {{"role": "user", "content": "…"}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown_role", f"`{place}.role` must be one of {', '.join(ROLES)}")
    keys = _MESSAGE_KEYS.get(role, ())
    for key in message:
        if key not in ("role", "content", *keys):
            allowed = " and ".join(f"`{allowed}`" for allowed in ("role", "content", *keys))
            raise BadRow("unknown_key", f"`{place}` has `{key[:40]}`; a message of this role may have only {allowed}")
    if any(message.get(key, "") in (None, []) for key in keys):
        message = {key: value for key, value in message.items() if key not in keys or value not in (None, [])}
    if "tool_calls" not in message:
        _check_text(message.get("content"), f"{place}.content")
        for key in message.keys() & keys:
            _check_text(message[key], f"{place}.{key}")
        return message
    content = message.get("content")
    if not _is_blank(content):
        _check_text(content, f"{place}.content")
    calls = _check_calls(message["tool_calls"], f"{place}.tool_calls")
    if content is not None and calls is message["tool_calls"]:
        return message
    # Chat templates read `content` of every message, and many do not expect null.
    return {**message, "content": content or "", "tool_calls": calls}


def _check_calls(calls: Any, name: str) -> list[Any]:
    """Check tool calls; return the same list, or a copy with the arguments as objects instead of JSON in a text."""
    if not isinstance(calls, list) or not calls:
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one call; leave it out if there is none")
    converted = list(calls)
    for at, call in enumerate(calls):
        place = f"{name}[{at}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadRow("wrong_type", f'`{place}` must be an object such as {{"name": "search", "arguments": {{}}}}')
        _check_text(function.get("name"), f"{place}.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _from_json(arguments or "{}", f"{place}.arguments")
            converted[at] = {**call, "function": {**function, "arguments": arguments}}
        if not isinstance(arguments, dict):
            raise BadRow("wrong_type", f"`{place}.arguments` must be an object, or a text with one as JSON")
    return calls if all(new is old for new, old in zip(converted, calls, strict=True)) else converted


def _from_json(text: str, name: str) -> Any:
    try:
        return parse(text.encode(errors="surrogatepass"))
    except BadJson as error:
        raise BadRow(error.code, f"`{name}` is a text, which must be JSON: {error.message}") from None


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise BadRow("wrong_type", f"`{name}` must be a string")
    if _NON_SPACE.search(text) is None:
        raise BadRow("empty_text", f"`{name}` is empty; fill it or remove the row")


_MESSAGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "assistant": ("tool_calls",),
    "tool": ("tool_call_id", "name"),
}
"""Optional keys of a message besides `role` and `content`, by role."""
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of the values of `from` in ShareGPT."""
_LAYOUTS = {"sharegpt": frozenset({"conversations"}), "alpaca": frozenset({"instruction", "output"})}
"""Columns of the layouts of chats that are converted, tried if no format matches."""
_ALPACA = frozenset({"instruction", "input", "output", "system", "history"})
_LONE_PROMPT = frozenset({"prompt"})
_WITH_ANSWER = frozenset({"prompt", "answer"})
_OPENAI = frozenset({"input", "preferred_output", "non_preferred_output"})
_SIGNATURES: dict[str, list[frozenset[str]]] = {
    "chat": [frozenset({"messages"})],
    "prompt_completion": [frozenset({"prompt", "completion"})],
    "text": [frozenset({"text"})],
    "preference": [frozenset({"prompt", "chosen", "rejected"}), _OPENAI],
    "rated": [frozenset({"prompt", "completion", "label"})],
    "prompt": [_LONE_PROMPT, _WITH_ANSWER],
}
"""Sets of columns that identify each format."""
_CHECKS: dict[str, Callable[[Row], Row]] = {
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
    "preference": _preference,
    "rated": _rated,
    "prompt": _prompt,
}
_READ: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
    "preference": (("prompt", "chosen"), ("prompt", "rejected")),
    "rated": (("prompt", "completion"),),
    "prompt": (("prompt",),),
}
"""Columns that make up each sequence, by format."""
FORMATS = tuple(_CHECKS)
REQUIRED_COLUMNS = frozenset[str]().union(*(needed for choices in _SIGNATURES.values() for needed in choices)) - {
    "answer",
    "label",
}
"""Columns that a format requires: an empty cell in them is an error, not a missing value. `answer` and `label` are also
common as additional columns of other formats."""
