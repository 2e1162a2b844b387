"""Dataset formats: validation of rows, and format detection by column names."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
        f"the columns are {there}; a row needs `messages` (chat), `prompt` and `completion` (prompt_completion), "
        "`text` (text), `prompt`, `chosen` and `rejected` (preference), `prompt`, `completion` and `label` (rated) or "
        "`prompt` (prompt); use `columns` to map your columns to these names",
    )


def checked(format: str, row: Row) -> Row:
    """Validate a row and return it in its stored form, which is `row` itself unless converted; raises `BadRow`."""
    return _CHECKS[format](row)


def sequences_of(format: str, row: Row) -> Iterator[Iterator[str]]:
    """Yield the texts of each sequence of a row that `checked` returned, without a chat template.

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
            yield from (message["content"] for message in value)


def _chat(row: Row) -> Row:
    messages = _required(row, "messages", "chat")
    _check_messages(messages, "messages")
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
        for column in columns:
            _check_messages(row[column], column)
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
        for column in columns:
            _check_messages(row[column], column)
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
        _check_messages(prompt, "prompt")
    else:
        _check_text(prompt, "prompt")
    if row.get("answer") is not None:
        _check_text(row["answer"], "answer")
    return row


def _required(row: Row, column: str, format: str) -> Any:
    if column not in row:
        raise BadRow("missing_column", f"`{column}` is missing; every row of the format {format} needs it")
    return row[column]


def _check_messages(messages: Any, name: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one message")
    for at, message in enumerate(messages):
        place = f"{name}[{at}]"
        if not isinstance(message, dict):
            raise BadRow("wrong_type", f'`{place}` must be an object such as {{"role": "user", "content": "…"}}')
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRow("unknown_role", f"`{place}.role` must be one of {', '.join(ROLES)}")
        _check_text(message.get("content"), f"{place}.content")
        if len(message) != 2:
            extra = next(key for key in message if key not in ("role", "content"))
            raise BadRow("unknown_key", f"`{place}` has `{extra[:40]}`; a message may have only `role` and `content`")


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise BadRow("wrong_type", f"`{name}` must be a string")
    if _NON_SPACE.search(text) is None:
        raise BadRow("empty_text", f"`{name}` is empty; fill it or remove the row")


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
NEEDED = frozenset[str]().union(*(needed for choices in _SIGNATURES.values() for needed in choices)) - {
    "answer",
    "label",
}
"""Columns that a format requires: an empty cell in them is an error, not a missing value. `answer` and `label` are also
common as additional columns of other formats."""
NEVER_TEXT = frozenset({"messages"}) | _OPENAI
"""Columns that are never plain text in any format: a table's cell contains them as JSON."""
