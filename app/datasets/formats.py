"""What a row of each format must be, and which format the columns of a file belong to."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Row = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
_WORD = re.compile(r"\S")


class BadRow(ValueError):
    """Why a row is refused: a stable code, and a sentence that names the place in the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def detect(columns: Iterable[str]) -> str:
    """The format that columns with these names belong to; raises `BadRow` where it is none or not the only one."""
    names = list(columns)
    fitting = [(needed, name) for name, choices in _SIGNATURES.items() for needed in choices if needed <= set(names)]
    # {prompt, completion} is more than the lone {prompt} which it contains.
    found = sorted({name for needed, name in fitting if not any(needed < other for other, _ in fitting)})
    if len(found) > 1 and "prompt" in found and not set(names) >= _WITH_ANSWER:
        # A prompt beside something that can be trained on is a column of its own more often than a data set of prompts.
        found.remove("prompt")
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRow(
            "ambiguous_format",
            f"the row could be {' or '.join(found)}; name the `format` in a field before the file",
        )
    there = ", ".join(f"`{name[:40]}`" for name in names[:10]) or "none"
    raise BadRow(
        "unknown_format",
        f"the columns are {there}; a row needs `messages` (chat), `prompt` and `completion` (prompt_completion), "
        "`text` (text), `prompt`, `chosen` and `rejected` (preference) or `prompt` (prompt); `columns` tells which "
        "of yours is which",
    )


def checked(format: str, row: Row) -> Row:
    """The row as it is kept, which is `row` itself unless it came in another shape; raises `BadRow`."""
    return _CHECKS[format](row)


def sequences_of(format: str, row: Row) -> Iterator[Iterator[str]]:
    """What a model would read of a row that `checked` has answered: contents, without any chat template.

    The texts of each sequence; a preference pair is two of them, each with the prompt before its answer.
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
    messages = _present(row, "messages", "chat")
    _check_messages(messages, "messages")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("no_assistant_message", "`messages` has no message of the assistant: nothing to learn from")
    return row


def _prompt_completion(row: Row) -> Row:
    for column in ("prompt", "completion"):
        _present(row, column, "prompt_completion")
    for column in ("prompt", "completion"):
        _check_text(row[column], column)
    return row


def _plain_text(row: Row) -> Row:
    _check_text(_present(row, "text", "text"), "text")
    return row


def _preference(row: Row) -> Row:
    if "preferred_output" in row or "non_preferred_output" in row:
        row = _of_input(row)
    columns = ("prompt", "chosen", "rejected")
    for column in columns:
        _present(row, column, "preference")
    if any(isinstance(row[column], list) for column in columns):
        for column in columns:
            _check_messages(row[column], column)
        for column in ("chosen", "rejected"):
            if row[column][-1]["role"] != "assistant":
                raise BadRow("no_assistant_message", f"the last message of `{column}` must be the assistant's")
    else:
        for column in columns:
            _check_text(row[column], column)
    return row


def _of_input(row: Row) -> Row:
    """A pair in OpenAI's shape as one of ours; what else `input` holds (`tools`) becomes columns."""
    for column in _OPENAI:
        _present(row, column, "preference")
    given = row["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise BadRow("wrong_type", '`input` must be an object such as {"messages": [{"role": "user", …}]}')
    pair = {"prompt": given["messages"], "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    for column in ("preferred_output", "non_preferred_output"):
        _check_messages(row[column], column)
    _check_messages(given["messages"], "input.messages")
    rest = {key: value for key, value in row.items() if key not in _OPENAI}
    beside = {key: value for key, value in given.items() if key != "messages"}
    if twice := sorted((rest.keys() | beside.keys()) & pair.keys() | (rest.keys() & beside.keys())):
        raise BadRow("column_conflict", f"`{twice[0][:40]}` is there twice once `input` is taken apart; remove one")
    return {**pair, **beside, **rest}


def _prompt(row: Row) -> Row:
    prompt = _present(row, "prompt", "prompt")
    if isinstance(prompt, list):
        _check_messages(prompt, "prompt")
    else:
        _check_text(prompt, "prompt")
    if row.get("answer") is not None:
        _check_text(row["answer"], "answer")
    return row


def _present(row: Row, column: str, format: str) -> Any:
    if column not in row:
        raise BadRow("missing_column", f"there is no `{column}`; every row of the format {format} needs it")
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
            raise BadRow(
                "unknown_key", f"`{place}` has `{extra[:40]}`; a message has `role` and `content`, nothing else"
            )


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise BadRow("wrong_type", f"`{name}` must be a text")
    if _WORD.search(text) is None:
        raise BadRow("empty_text", f"`{name}` is empty; fill it or leave the row out")


_LONE_PROMPT = frozenset({"prompt"})
_WITH_ANSWER = frozenset({"prompt", "answer"})
_OPENAI = frozenset({"input", "preferred_output", "non_preferred_output"})
_SIGNATURES: dict[str, list[frozenset[str]]] = {
    "chat": [frozenset({"messages"})],
    "prompt_completion": [frozenset({"prompt", "completion"})],
    "text": [frozenset({"text"})],
    "preference": [frozenset({"prompt", "chosen", "rejected"}), _OPENAI],
    "prompt": [_LONE_PROMPT, _WITH_ANSWER],
}
"""Sets of columns, each of which tells a format."""
_CHECKS: dict[str, Callable[[Row], Row]] = {
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
    "preference": _preference,
    "prompt": _prompt,
}
_READ: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
    "preference": (("prompt", "chosen"), ("prompt", "rejected")),
    "prompt": (("prompt",),),
}
"""Columns of each sequence."""
FORMATS = tuple(_CHECKS)
NEEDED = frozenset[str]().union(*(needed for choices in _SIGNATURES.values() for needed in choices)) - {"answer"}
"""Columns that some format cannot do without: an empty cell of theirs is a mistake, not an absence."""
NEVER_TEXT = frozenset({"messages"}) | _OPENAI
"""Columns that no format has as a text: a table's cell holds them as JSON."""
