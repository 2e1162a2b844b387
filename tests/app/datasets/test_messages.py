"""Messages as OpenAI and others write them: what is stored as it is, what is converted, and what is refused how."""

from typing import Any

import pytest

from app.datasets import formats
from app.datasets.messages import BadRow

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "b"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


@pytest.mark.parametrize(
    "row",
    [
        chat(USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}),
        chat(USER, {**ANSWER, "weight": 1.0}, {**USER, "weight": 0}),
        chat({"role": "developer", "content": "Be brief."}, {**USER, "name": "Ann"}, ANSWER, parallel_tool_calls=False),
        chat({"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER),
        chat(USER, {"role": "assistant", "tool_calls": [CALL]}, tools=TOOLS),
        chat(USER, {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None}),
        chat({**USER, "tool_calls": None}, {**ANSWER, "function_call": None, "weight": None}),
        chat(USER, {**ANSWER, "reasoning_content": "r"}),
        chat(USER, {"role": "assistant", "content": "", "thinking": "r"}),
        chat({**USER, "id": 7, "created": {"at": 1}}, ANSWER, functions="main"),
        chat(USER, ANSWER, chat_template_kwargs={"enable_thinking": False, "documents": []}),
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "completion": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    ],
)
def test_what_plain_transformers_renders_is_stored_as_it_is(row: dict[str, Any]) -> None:
    assert formats.validate_row(formats.detect_format(row), row) is row


@pytest.mark.parametrize(
    ("row", "stored"),
    [
        (chat(USER, {"role": "assistant", "refusal": "No."}), chat(USER, {**ANSWER, "content": "No."})),
        (
            chat(USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}),
            chat(USER, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}),
        ),
        (
            chat(
                USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"}, functions=[{"name": "f"}],
            ),
            chat(
                USER,
                {"role": "assistant", "content": None,
                 "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "name": "f", "content": "1"}, tools=TOOLS,
            ),
        ),
        (
            chat({"role": "user", "content": [{"type": "input_text", "text": "q"}]}, ANSWER),
            chat({"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER),
        ),
        (chat(USER, ANSWER, chat_template_kwargs='{"a": 1}'), chat(USER, ANSWER, chat_template_kwargs={"a": 1})),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, WORSE], "score": 1},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE], "score": 1},
        ),
        (
            {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
        ),
        (
            {"chosen": "Q: 1 A: yes", "rejected": "Q: 1 A: no"},
            {"prompt": "Q: 1 A:", "chosen": " yes", "rejected": " no"},
        ),
        ({"chosen": "yes", "rejected": "no"}, {"prompt": "", "chosen": "yes", "rejected": "no"}),
        ({"chosen": [ANSWER], "rejected": [WORSE]}, {"prompt": [], "chosen": [ANSWER], "rejected": [WORSE]}),
    ],
)  # fmt: skip
def test_what_no_template_knows_is_converted(row: dict[str, Any], stored: dict[str, Any]) -> None:
    assert formats.validate_row(formats.detect_format(row), row) == stored


@pytest.mark.parametrize(
    ("row", "code", "place"),
    [
        (chat(USER, {**ANSWER, "weight": 2}), "wrong_type", "`messages[1].weight`"),
        (chat(USER, {**ANSWER, "weight": True}), "wrong_type", "`messages[1].weight`"),
        (chat(USER, {**ANSWER, "weight": "0"}), "wrong_type", "`messages[1].weight`"),
        (chat(USER, {**ANSWER, "weight": 10**400}), "wrong_type", "`messages[1].weight`"),
        (chat({**USER, "weight": 1}, ANSWER), "weight_without_effect", "`messages[0].weight`"),
        (chat(USER, {**ANSWER, "wieght": 0}), "unknown_key", "did you mean `weight`?"),
        (chat({**USER, "reasoning_content": "r"}, ANSWER), "unknown_key", "`reasoning_content`"),
        (chat(USER, {**ANSWER, "reasoning_content": ["r"]}), "wrong_type", "`messages[1].reasoning_content`"),
        (chat(USER, {**ANSWER, "name": 1}), "wrong_type", "`messages[1].name`"),
        (chat(USER, {**ANSWER, "refusal": "No."}), "refusal_and_content", "`messages[1]`"),
        (chat(USER, {"role": "assistant", "content": [1]}), "wrong_type", "`messages[1].content[0]`"),
        (chat(USER, {"role": "assistant", "content": []}), "empty_text", "`messages[1].content`"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER),
            "unsupported_content", "`messages[0].content[0]`",
        ),
        (chat(USER, {**ANSWER, "function_call": {"name": "f", "arguments": "["}}), "invalid_json", "function_call"),
        (chat(USER, ANSWER, chat_template_kwargs=[1]), "wrong_type", "`chat_template_kwargs`"),
        (chat(USER, ANSWER, chat_template_kwargs="["), "invalid_json", "`chat_template_kwargs`"),
        (chat(USER, ANSWER, chat_template_kwargs={"tokenize": True}), "reserved_key", "_kwargs.tokenize`"),
        (chat(USER, ANSWER, chat_template_kwargs={"tools": []}), "reserved_key", "the column `tools`"),
        (chat(USER), "no_assistant_message", "set the field `format` to prompt"),
        ({"prompt": [USER], "completion": "a"}, "wrong_type", "`completion`"),
        ({"prompt": [USER], "completion": [USER]}, "no_assistant_message", "`completion`"),
        ({"prompt": [USER], "completion": [{**ANSWER, "weight": 0}]}, "weight_without_effect", "`completion[0]."),
        ({"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, "wrong_type", "leave it out"),
        ({"chosen": [USER, ANSWER], "rejected": "a"}, "wrong_type", "`chosen` and `rejected`"),
        ({"chosen": [], "rejected": []}, "wrong_type", "`chosen`"),
        ({"chosen": "", "rejected": "a"}, "empty_text", "`chosen`"),
        ({"input_ids": []}, "wrong_type", "`input_ids`"),
        ({"input_ids": "1 2"}, "wrong_type", "`input_ids`"),
        ({"input_ids": [1, 2.0]}, "wrong_type", "`input_ids[1]`"),
        ({"input_ids": [True]}, "wrong_type", "`input_ids[0]`"),
        ({"input_ids": [-1]}, "wrong_type", "`input_ids[0]`"),
        ({"input_ids": [2**31]}, "wrong_type", "`input_ids[0]`"),
        ({"input_ids": [[1]]}, "wrong_type", "`input_ids[0]`"),
        ({"input_ids": [1, 2], "labels": [1]}, "length_mismatch", "`labels`"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "wrong_type", "`labels[1]`"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "wrong_type", "`attention_mask[1]`"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "bad_mask", "`attention_mask`"),
        ({"input_ids": [1], "attention_mask": [0]}, "bad_mask", "`attention_mask`"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}, "label_of_padding", "`labels[1]`"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "packed_row", "`position_ids`"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_named_with_what_to_write_instead(row: dict[str, Any], code: str, place: str) -> None:
    format = formats.detect_format(row)
    with pytest.raises(BadRow) as refused:
        formats.validate_row(format, row)
    assert refused.value.code == code and place in refused.value.message


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "labels": [-100, 7], "attention_mask": [1, 1], "length": 2},
        {"input_ids": [0, 1, 2, 0], "labels": [-100, 1, 2, -100], "attention_mask": [0, 1, 1, 0]},
        {"input_ids": [1, 2], "attention_mask": None, "labels": None, "position_ids": [0, 1]},
    ],
)
def test_token_ids_are_stored_as_they_are(row: dict[str, Any]) -> None:
    assert formats.detect_format(row) == "tokenized" and formats.validate_row("tokenized", row) is row
