"""Dataset formats: validation of rows, and format detection by column names."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from app.datasets.conversion import (
    LAYOUTS,
    OPENAI_PAIR,
    from_alpaca,
    from_openai_pair,
    from_openai_prompt,
    from_sharegpt,
    required_value,
    split_prompt,
    with_system_message,
)
from app.datasets.messages import BadRow, Row, check_chats, check_text, texts_of

HIGHEST_TOKEN_ID = 2**31 - 1
IGNORED_LABEL = -100
"""Label of a token that is not learned."""
_TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids")


def detect_format(columns: Iterable[str]) -> str:
    """Detect the format from column names; raises `BadRow` if no format or more than one matches."""
    names = list(columns)
    fitting = [(needed, name) for name, choices in _SIGNATURES.items() for needed in choices if needed <= set(names)]
    # {prompt, completion} is more specific than {prompt}, which it contains.
    matching = sorted({name for needed, name in fitting if not any(needed < other for other, _ in fitting)})
    if len(matching) > 1 and "prompt" in matching and not set(names) >= _WITH_ANSWER:
        # A prompt next to the columns of another format is usually an extra column, not a dataset of prompts.
        matching.remove("prompt")
    if not matching and layout_of(names) is not None:
        return "chat"
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise BadRow(
            "ambiguous_format",
            f"the row could be {' or '.join(matching)}; set the field `format` before the file",
        )
    there = ", ".join(f"`{name[:40]}`" for name in names[:10]) or "none"
    raise BadRow(
        "unknown_format",
        "a row needs `messages`, `conversations` or `instruction` and `output` (chat), `prompt` and `completion`, "
        "`text`, `chosen` and `rejected`, `prompt`, `completion` and `label`, `prompt`, or `input_ids`; use `columns` "
        f"to rename yours: {there}",
    )


def detect_row_format(row: Row) -> str:
    """Detect the format of a row as `detect_format` does, but messages without an answer are a prompt."""
    format, messages = detect_format(row), row.get("messages")
    if format != "chat" or "prompt" in row or not isinstance(messages, list):
        return format
    return format if any(map(_is_of_assistant, messages)) else "prompt"


def _is_of_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def layout_of(columns: Iterable[str]) -> str | None:
    """Return the layout of chats whose columns are converted to `messages`, or None: `sharegpt` or `alpaca`."""
    names = set(columns)
    if "messages" in names:
        return None
    return next((layout for layout, needed in LAYOUTS.items() if needed <= names), None)


def is_json(column: str, format: str | None) -> bool:
    """Return True if a table's cell in this column must contain JSON, because the format has no text in it."""
    if column in ("messages", "conversations"):
        return True
    return (format == "preference" and column in OPENAI_PAIR) or (format == "tokenized" and column in _TOKEN_COLUMNS)


def validate_row(format: str, row: Row) -> Row:
    """Validate a row and return it in its stored form, which is `row` itself unless converted; raises `BadRow`."""
    return _CHECKS[format](row)


def sequences_of(format: str, row: Row) -> Iterator[Iterator[str]]:
    """Yield the texts of each sequence of a row that `validate_row` returned, without a chat template.

    A preference pair has two sequences, each with the prompt before its answer. Rows of token ids have none.
    """
    for columns in _READ[format]:
        yield _column_texts(row, columns)


def _column_texts(row: Row, columns: tuple[str, ...]) -> Iterator[str]:
    for column in columns:
        value = row[column]
        yield from [value] if isinstance(value, str) else texts_of(value)


def _validate_chat(row: Row) -> Row:
    layout = layout_of(row)
    if layout == "sharegpt":
        row = from_sharegpt(row)
    elif "messages" not in row and row.keys() & LAYOUTS["alpaca"]:
        row = from_alpaca(row)
    required_value(row, "messages", "chat")
    row = with_system_message(check_chats(row, "messages", allows_weights=True))
    if all(message["role"] != "assistant" for message in row["messages"]):
        raise BadRow(
            "no_assistant_message",
            "`messages` has no message of the role `assistant` to train on; to train on prompts (`rlhf`), set the "
            "field `format` to prompt before the file",
        )
    return row


def _prompt_completion(row: Row) -> Row:
    row = _checked_answers(row, "prompt_completion", "prompt", "completion")
    if isinstance(row["completion"], list):
        _check_has_answer(row, "completion")
    return row


def _plain_text(row: Row) -> Row:
    check_text(required_value(row, "text", "text"), "text")
    return row


def _validate_preference(row: Row) -> Row:
    if "preferred_output" in row or "non_preferred_output" in row:
        row = from_openai_pair(row)
    source, row = row, split_prompt(row)
    # Answers that have nothing in common are whole texts, from which a reward model can be trained.
    is_whole = row is not source and not (row["prompt"] if isinstance(row["prompt"], list) else row["prompt"].strip())
    row = _checked_answers(row, "preference", *([] if is_whole else ["prompt"]), "chosen", "rejected")
    for column in ("chosen", "rejected"):
        _check_ends_with_answer(row, column)
    return row


def _validate_rated(row: Row) -> Row:
    required_value(row, "label", "rated")
    row = _checked_answers(row, "rated", "prompt", "completion")
    _check_ends_with_answer(row, "completion")
    label = row["label"]
    if isinstance(label, bool):
        return row
    rating = _RATINGS.get(str(label).lower()) if isinstance(label, str | int) else None  # cells of CSV are texts
    if rating is None:
        raise BadRow(
            "wrong_type",
            "`label` must be true or 1 (desirable), or false or 0 (undesirable); if it means something else, set the "
            "field `format` to prompt_completion before the file",
        )
    return {**row, "label": rating}


def _validate_prompt(row: Row) -> Row:
    if "prompt" not in row and "messages" in row:
        row = from_openai_prompt(row)
    prompt = required_value(row, "prompt", "prompt")
    if isinstance(prompt, list):
        row = check_chats(row, "prompt")
    else:
        check_text(prompt, "prompt")
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):  # rewards compare texts
        return {**row, "answer": json.dumps(answer)}
    if answer is not None:
        check_text(answer, "answer")
    return row


def _checked_answers(row: Row, format: str, *columns: str) -> Row:
    """Check columns that are all texts, or all lists of messages."""
    for column in columns:
        required_value(row, column, format)
    are_lists = [isinstance(row[column], list) for column in columns]
    if any(are_lists):
        if not all(are_lists):
            names = ", ".join(f"`{column}`" for column in columns)
            raise BadRow("wrong_type", f"{names} must all be texts, or all lists of messages")
        return check_chats(row, *columns)
    for column in columns:
        check_text(row[column], column)
    return row


def _check_ends_with_answer(row: Row, column: str) -> None:
    if isinstance(row[column], list) and row[column][-1]["role"] != "assistant":
        raise BadRow("no_assistant_message", f"the last message of `{column}` must have the role `assistant`")


def _check_has_answer(row: Row, column: str) -> None:
    if all(message["role"] != "assistant" for message in row[column]):
        raise BadRow("no_assistant_message", f"`{column}` has no message of the role `assistant` to learn")


def _validate_tokenized(row: Row) -> Row:
    """Check token ids, with the optional columns `labels`, `attention_mask` and `position_ids` of the same length."""
    ids = required_value(row, "input_ids", "tokenized")
    _check_ints(ids, "input_ids", lambda value: 0 <= value <= HIGHEST_TOKEN_ID, "a token id, from 0 to 2147483647")
    labels, mask, positions = row.get("labels"), row.get("attention_mask"), row.get("position_ids")
    if labels is not None:
        allowed = f"a token id, or {IGNORED_LABEL} for a token that is not learned"
        _check_ints(
            labels, "labels", lambda value: 0 <= value <= HIGHEST_TOKEN_ID or value == IGNORED_LABEL, allowed, ids
        )
    first, end = 0, len(ids)
    if mask is not None:
        _check_ints(mask, "attention_mask", lambda value: value in (0, 1), "1, or 0 for padding", ids)
        first, end = attended_range(mask)
        if first == end or 0 in mask[first:end]:
            raise BadRow("bad_mask", "`attention_mask` may be 0 only at the start and at the end, where padding is")
        padded = [*range(first), *range(end, len(ids))]
        learned = [] if labels is None else [at for at in padded if labels[at] != IGNORED_LABEL]
        if learned:
            raise BadRow(
                "label_of_padding",
                f"`labels[{learned[0]}]` is to be learned where `attention_mask` is 0; write {IGNORED_LABEL} there",
            )
    if positions is not None:
        _check_ints(positions, "position_ids", lambda value: value >= 0, "a position, from 0", ids)
        if positions[first:end] != list(range(end - first)):
            raise BadRow(
                "packed_row",
                "`position_ids` starts again within the row, which is several texts; write each as a row of its own "
                "(`packing` packs them), or leave `position_ids` out to train on one text",
            )
    return row


def attended_range(mask: list[int]) -> tuple[int, int]:
    """Return the start and the end of a sequence without its padding."""
    if 1 not in mask:
        return 0, 0
    return mask.index(1), len(mask) - mask[::-1].index(1)


def _check_ints(
    values: Any, name: str, is_allowed: Callable[[int], bool], allowed: str, ids: list[Any] | None = None
) -> None:
    if not isinstance(values, list) or not values:
        raise BadRow("wrong_type", f"`{name}` must be a list of at least one integer")
    if ids is not None and len(values) != len(ids):
        raise BadRow(
            "length_mismatch",
            f"`{name}` has {len(values)} values and `input_ids` has {len(ids)}; both must have the same length",
        )
    # Most rows have far fewer different values than values.
    if set(map(type, values)) == {int} and all(map(is_allowed, set(values))):
        return
    at = next(at for at, value in enumerate(values) if type(value) is not int or not is_allowed(value))
    raise BadRow("wrong_type", f"`{name}[{at}]` must be {allowed}")


_RATINGS = {"true": True, "1": True, "false": False, "0": False}
_LONE_PROMPT = frozenset({"prompt"})
_WITH_ANSWER = frozenset({"prompt", "answer"})
_SIGNATURES: dict[str, list[frozenset[str]]] = {
    "chat": [frozenset({"messages"})],
    "prompt_completion": [frozenset({"prompt", "completion"})],
    "text": [frozenset({"text"})],
    "preference": [frozenset({"chosen", "rejected"}), OPENAI_PAIR],
    "rated": [frozenset({"prompt", "completion", "label"})],
    "prompt": [_LONE_PROMPT, _WITH_ANSWER],
    "tokenized": [frozenset({"input_ids"})],
}
"""Sets of columns that identify each format."""
_CHECKS: dict[str, Callable[[Row], Row]] = {
    "chat": _validate_chat,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
    "preference": _validate_preference,
    "rated": _validate_rated,
    "prompt": _validate_prompt,
    "tokenized": _validate_tokenized,
}
_READ: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
    "preference": (("prompt", "chosen"), ("prompt", "rejected")),
    "rated": (("prompt", "completion"),),
    "prompt": (("prompt",),),
    "tokenized": (),
}
"""Columns that make up each sequence, by format."""
FORMATS = tuple(_CHECKS)
REQUIRED_COLUMNS = frozenset[str]().union(*(needed for choices in _SIGNATURES.values() for needed in choices)) - {
    "answer",
    "label",
}
"""Columns that a format requires: an empty cell in them is an error, not a missing value. `answer` and `label` are also
common as additional columns of other formats."""
