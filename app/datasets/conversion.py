"""Rows of other tools, converted to the columns of our formats."""

from typing import Any

from app.datasets.messages import BadRow, Row, check_messages, check_text, is_blank

OPENAI_PAIR = frozenset({"input", "preferred_output", "non_preferred_output"})
LAYOUTS = {"sharegpt": frozenset({"conversations"}), "alpaca": frozenset({"instruction", "output"})}
"""Columns of the layouts of chats that are converted, tried if no format matches."""
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
_ALPACA = frozenset({"instruction", "input", "output", "system", "history"})


def required_value(row: Row, column: str, format: str) -> Any:
    """Return a value of a row that its format needs; raises `BadRow`."""
    if column not in row:
        raise BadRow("missing_column", f"`{column}` is missing; every row of the format {format} needs it")
    return row[column]


def from_openai_pair(row: Row) -> Row:
    """Convert a preference pair from OpenAI's format; other members of `input` (`tools`) become columns."""
    for column in OPENAI_PAIR:
        required_value(row, column, "preference")
    source = row["input"]
    if not isinstance(source, dict) or "messages" not in source:
        raise BadRow("wrong_type", '`input` must be an object such as {"messages": [{"role": "user", …}]}')
    pair = {"prompt": source["messages"], "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    for column in ("preferred_output", "non_preferred_output"):
        check_messages(row[column], column)
    check_messages(source["messages"], "input.messages")
    rest = {key: value for key, value in row.items() if key not in OPENAI_PAIR}
    extra = {key: value for key, value in source.items() if key != "messages"}
    if twice := sorted((rest.keys() | extra.keys()) & pair.keys() | (rest.keys() & extra.keys())):
        raise BadRow(
            "column_conflict", f"`{twice[0][:40]}` occurs twice after `input` is expanded into columns; remove one"
        )
    return {**pair, **extra, **rest}


def from_openai_prompt(row: Row) -> Row:
    """Convert a row of OpenAI's reinforcement fine-tuning: its messages end with the question to the model."""
    messages = check_messages(row["messages"], "messages")
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            "answer_after_prompt",
            "`messages` ends with a message of the role `assistant`, and those of the first row do not, so that its "
            "rows are prompts; remove the answer here, or add the missing ones",
        )
    rest = {key: value for key, value in row.items() if key != "messages"}
    return {"prompt": messages, **rest}


def split_prompt(row: Row) -> Row:
    """Split a pair whose answers contain the prompt into prompt and answers.

    Source: `maybe_extract_prompt` of TRL, which takes what both begin with. A text that is the content of one of those
    messages may be in the column `prompt`.
    """
    chosen, rejected = required_value(row, "chosen", "preference"), required_value(row, "rejected", "preference")
    prompt, are_chats = row.get("prompt"), isinstance(chosen, list) and isinstance(rejected, list)
    if "prompt" in row and not (are_chats and isinstance(prompt, str)):
        return row
    if not are_chats and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise BadRow("wrong_type", "`chosen` and `rejected` must be two texts, or two lists of messages")
    for column in ("chosen", "rejected"):
        if not row[column]:
            code = "wrong_type" if are_chats else "empty_text"
            raise BadRow(code, f"`{column}` is empty; fill it or remove the row")
    most = min(len(chosen), len(rejected)) - 1
    end = next((at for at in range(most) if chosen[at] != rejected[at]), most)
    if chosen[end] != rejected[end] and end and chosen[end - 1] == " ":  # the space before an answer belongs to it
        end -= 1
    shared = chosen[:end]
    if isinstance(prompt, str) and not any(isinstance(one, dict) and one.get("content") == prompt for one in shared):
        raise BadRow(
            "wrong_type",
            "`prompt` is a text, `chosen` and `rejected` are messages, and no message that both begin with has this "
            "text; write `prompt` as a list of messages, or leave it out",
        )
    return {**row, "prompt": shared, "chosen": chosen[end:], "rejected": rejected[end:]}


def from_sharegpt(row: Row) -> Row:
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
        check_text(turn.get("value"), f"{place}.value")
        extra = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": _SPEAKERS[speaker], "content": turn["value"], **extra})
    check_messages(messages, "conversations")
    rest = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    return {"messages": [*_system_messages(row), *messages], **rest}


def from_alpaca(row: Row) -> Row:
    """Convert an instruction, with its optional columns `input`, `system` and `history`, to a chat."""
    for column in ("instruction", "output"):
        check_text(required_value(row, column, "chat"), column)
    question = row["instruction"]
    if not is_blank(row.get("input")):
        check_text(row["input"], "input")
        question += "\n\n" + row["input"]
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow("wrong_type", "`history` must be a list of pairs of a question and its answer")
    pairs = []
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow("wrong_type", f"`history[{at}]` must be a question and its answer")
        for text in pair:
            check_text(text, f"history[{at}]")
        pairs.append(pair)
    messages = _system_messages(row)
    for user_text, assistant_text in [*pairs, (question, row["output"])]:
        messages += [{"role": "user", "content": user_text}, {"role": "assistant", "content": assistant_text}]
    rest = {key: value for key, value in row.items() if key not in _ALPACA}
    return {"messages": messages, **rest}


def with_system_message(row: Row) -> Row:
    """Make the text of the column `system` the first message of a checked chat that begins with another role."""
    text = row.get("system")
    if not isinstance(text, str) or not text.strip() or row["messages"][0]["role"] in ("system", "developer"):
        return row
    rest = {key: value for key, value in row.items() if key != "system"}
    return {**rest, "messages": [*_system_messages(row), *row["messages"]]}


def _system_messages(row: Row) -> list[dict[str, Any]]:
    if is_blank(row.get("system")):
        return []
    check_text(row["system"], "system")
    return [{"role": "system", "content": row["system"]}]
