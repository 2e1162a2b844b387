"""Promises about formats: which is seen in which columns, what each of their rows must be, and what trains on them."""

import json
from typing import Any

import pytest

from app.datasets.formats import validate_row
from tests.app.uploads import CHAT, errors, lines, stored_rows, upload
from tests.server import ApiServer

USER = [{"role": "user", "content": "q"}]
GOOD = [{"role": "assistant", "content": "yes"}]
BAD = [{"role": "assistant", "content": "no"}]
PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
RATED = {"prompt": "p", "completion": "c", "label": True}


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (PAIR, "preference"),
        ({"prompt": USER, "chosen": GOOD, "rejected": BAD, "score": 1.5}, "preference"),
        ({**PAIR, "messages_of_its_own": 1}, "preference"),
        (RATED, "rated"),
        ({"prompt": USER, "completion": BAD, "label": False, "source": "web"}, "rated"),
        ({"text": "t", "label": 1}, "text"),
        ({**PAIR, "label": 1}, "preference"),
        ({"prompt": "p"}, "prompt"),
        ({"prompt": USER, "answer": "42"}, "prompt"),
        ({"prompt": "p", "source": "web"}, "prompt"),
        ({"prompt": "p", "completion": "c"}, "prompt_completion"),
        ({**CHAT, "prompt": "p"}, "chat"),
        ({"text": "t", "prompt": "p"}, "text"),
        ({"text": "t", "answer": "a"}, "text"),
    ],
)
def test_the_columns_give_the_format_and_the_row_stays_as_it_is(
    shared_api: ApiServer, row: dict[str, Any], format: str
) -> None:
    answer = upload(shared_api, lines(row))
    assert (answer.status_code, answer.json()["format"]) == (201, format)
    assert stored_rows(shared_api, lines(row)) == [row]


@pytest.mark.parametrize(
    "row",
    [
        {**PAIR, **CHAT},
        {**PAIR, "completion": "c"},
        {"prompt": "p", "completion": "c", "answer": "a"},
        {"prompt": "p", "answer": "a", "text": "t"},
    ],
)
def test_columns_of_two_formats_ask_for_the_format(shared_api: ApiServer, row: dict[str, Any]) -> None:
    assert errors(shared_api, lines(row)) == [("line 1", "ambiguous_format")]
    answer = upload(shared_api, lines(row), format="prompt")
    assert (answer.status_code, answer.json()["format"]) == (201, "prompt")


def test_pairs_in_the_shape_of_openai_are_kept_in_ours(shared_api: ApiServer) -> None:
    theirs = {
        "input": {"messages": USER, "tools": [{"type": "function"}]},
        "preferred_output": GOOD,
        "non_preferred_output": BAD,
        "source": "web",
    }
    ours = {"prompt": USER, "chosen": GOOD, "rejected": BAD, "tools": [{"type": "function"}], "source": "web"}
    assert stored_rows(shared_api, lines(theirs, theirs)) == [ours, ours]
    columns = upload(shared_api, lines(theirs)).json()["columns"]
    assert columns == ["prompt", "chosen", "rejected", "tools", "source"]
    cells = ",".join('"' + json.dumps(theirs[name]).replace('"', '""') + '"' for name in list(theirs)[:3])
    table = f"input,preferred_output,non_preferred_output\n{cells}\n".encode()
    assert stored_rows(shared_api, table, "a.csv") == [{name: ours[name] for name in list(ours)[:4]}]


TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"q": 1}}}
TEXT_CALL = {**CALL, "function": {"name": "search", "arguments": '{"q": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "search"}}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": ASKED, "system": "s", "id": 7}, {"messages": [SYSTEM, *ASKED], "id": 7}),
        ({"messages": [SYSTEM, *ASKED], "system": "other"}, {"messages": [SYSTEM, *ASKED], "system": "other"}),
        ({"messages": ASKED, "system": " "}, {"messages": ASKED, "system": " "}),
        ({"messages": ASKED, "system": {"id": 1}}, {"messages": ASKED, "system": {"id": 1}}),
    ],
    ids=["a text", "beside a system message", "blank", "no text"],
)
def test_a_column_system_beside_messages_becomes_the_first_message(
    row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert validate_row("chat", row) == expected


@pytest.mark.parametrize(
    ("row", "stored", "layout"),
    [
        ({"conversations": TURNS, "id": 7}, {"messages": ASKED, "id": 7}, "sharegpt"),
        ({"conversations": TURNS, "system": "s"}, {"messages": [SYSTEM, *ASKED]}, "sharegpt"),
        ({"conversations": ASKED, "system": ""}, {"messages": ASKED}, "sharegpt"),
        ({"instruction": "q", "output": "a"}, {"messages": ASKED}, "alpaca"),
        ({"instruction": "q", "input": "", "output": "a", "n": 1}, {"messages": ASKED, "n": 1}, "alpaca"),
        (
            {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q", "a"]]},
            {"messages": [SYSTEM, *ASKED, {"role": "user", "content": "q\n\ni"}, ASKED[1]]},
            "alpaca",
        ),
        ({"instruction": "q", "output": "a", "text": "t"}, {"instruction": "q", "output": "a", "text": "t"}, None),
        ({"messages": ASKED, "conversations": 1}, {"messages": ASKED, "conversations": 1}, None),
    ],
)
def test_chats_of_sharegpt_and_alpaca_are_kept_as_messages(
    shared_api: ApiServer, row: dict[str, Any], stored: dict[str, Any], layout: str | None
) -> None:
    assert stored_rows(shared_api, lines(row, row)) == [stored, stored]
    dataset = upload(shared_api, lines(row, row)).json()
    assert (dataset["format"], dataset["source"]["layout"]) == ("text" if "text" in row else "chat", layout)


def test_alpaca_may_be_a_table(shared_api: ApiServer) -> None:
    table = b"instruction;input;output\nq;;a\n"
    assert stored_rows(shared_api, table, "a.csv") == [{"messages": ASKED}]
    (error,) = upload(shared_api, table + b"q;;\n", "a.csv").json()["errors"]
    assert (error["field"], error["code"]) == ("line 3", "missing_column") and "`output`" in error["message"]


@pytest.mark.parametrize(
    ("row", "code", "place"),
    [
        ({"conversations": []}, "wrong_type", "`conversations`"),
        ({"conversations": ["q"]}, "wrong_type", "`conversations[0]`"),
        ({"conversations": [*TURNS, {"from": "alien", "value": "x"}]}, "unknown_role", "`conversations[2].from`"),
        ({"conversations": [{"from": "gpt"}]}, "wrong_type", "`conversations[0].value`"),
        ({"conversations": TURNS[:1]}, "no_assistant_message", "`messages`"),
        ({"conversations": TURNS, "system": 1}, "wrong_type", "`system`"),
        ({"instruction": "q"}, "missing_column", "`output`"),
        ({"instruction": 1, "output": "a"}, "wrong_type", "`instruction`"),
        ({"instruction": "q", "input": 1, "output": "a"}, "wrong_type", "`input`"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "wrong_type", "`history[0]`"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "wrong_type", "`messages[0].tool_calls`"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "wrong_type", "`messages[0].content`"),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "unknown_key", "`tool_calls`"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "wrong_type",
            "`messages[0].tool_calls[0].function`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "invalid_json",
            "`messages[0].tool_calls[0].function.arguments`",
        ),
        ({"messages": ASKED, "tools": "hammer"}, "invalid_json", "`tools`"),
        ({"messages": ASKED, "tools": [1]}, "wrong_type", "`tools`"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named_by_row_and_field(
    shared_api: ApiServer, row: dict[str, Any], code: str, place: str
) -> None:
    (error,) = upload(shared_api, lines({"messages": ASKED}, row)).json()["errors"]
    assert (error["field"], error["code"]) == ("line 2", code)
    assert place in error["message"]


def test_calls_of_tools_need_no_content_and_are_stored_as_they_are(shared_api: ApiServer) -> None:
    result = {"role": "tool", "tool_call_id": "1", "name": "search", "content": "found"}
    for content, call in (({"content": ""}, CALL), ({}, TEXT_CALL), ({"content": None}, TEXT_CALL)):
        row = {"messages": [*ASKED, {"role": "assistant", **content, "tool_calls": [call]}, result], "tools": TOOLS}
        assert stored_rows(shared_api, lines(row, {**row, "tools": json.dumps(TOOLS)})) == [row, row]
    prompts = {"prompt": USER, "chosen": [{"role": "assistant", "tool_calls": [CALL]}], "rejected": BAD}
    assert stored_rows(shared_api, lines(prompts)) == [prompts]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "p", "chosen": "c"}, "missing_column"),
        ({**PAIR, "chosen": ""}, "empty_text"),
        ({**PAIR, "chosen": None}, "wrong_type"),
        ({**PAIR, "chosen": GOOD}, "wrong_type"),
        ({"prompt": USER, "chosen": GOOD, "rejected": USER}, "no_assistant_message"),
        ({"prompt": [], "chosen": GOOD, "rejected": BAD}, "wrong_type"),
        ({"input": USER, "preferred_output": GOOD, "non_preferred_output": BAD}, "wrong_type"),
        ({"input": {"messages": USER}, "preferred_output": "x", "non_preferred_output": BAD}, "wrong_type"),
        ({"input": {"messages": USER}, "preferred_output": GOOD}, "missing_column"),
        (
            {"input": {"messages": USER, "prompt": 1}, "preferred_output": GOOD, "non_preferred_output": BAD},
            "column_conflict",
        ),
    ],
)
def test_a_pair_must_be_whole(shared_api: ApiServer, row: dict[str, Any], code: str) -> None:
    assert errors(shared_api, lines(PAIR, row)) == [("line 2", code)]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": "p", "completion": "c"}, "missing_column"),
        ({**RATED, "completion": " "}, "empty_text"),
        ({**RATED, "completion": GOOD}, "wrong_type"),
        ({**RATED, "prompt": USER, "completion": USER}, "no_assistant_message"),
        ({**RATED, "label": 2}, "wrong_type"),
        ({**RATED, "label": None}, "wrong_type"),
        ({**RATED, "label": "good"}, "wrong_type"),
    ],
)
def test_a_rated_answer_must_be_whole(shared_api: ApiServer, row: dict[str, Any], code: str) -> None:
    assert errors(shared_api, lines(RATED, row)) == [("line 2", code)]


def test_labels_are_also_words_in_a_table_and_numbers(shared_api: ApiServer) -> None:
    rated = [RATED, {**RATED, "completion": "d", "label": False}]
    for true, false in (("True", "false"), ("1", "0")):
        table = f"prompt,completion,label\np,c,{true}\np,d,{false}\n".encode()
        assert stored_rows(shared_api, table, "a.csv") == rated
    assert stored_rows(shared_api, lines(*({**row, "label": int(row["label"])} for row in rated))) == rated
    assert errors(shared_api, b"prompt,completion,label\np,c,\n", "a.csv") == [("line 2", "missing_column")]


def test_answers_that_are_numbers_become_texts_which_rewards_compare(shared_api: ApiServer) -> None:
    rows = [{"prompt": "p", "answer": answer} for answer in (72, -0.5, "seven", None)]
    assert [row["answer"] for row in stored_rows(shared_api, lines(*rows))] == ["72", "-0.5", "seven", None]


def test_a_label_of_another_kind_is_a_column_of_prompts_with_completions(shared_api: ApiServer) -> None:
    row = {**RATED, "label": 3}
    (error,) = upload(shared_api, lines(row)).json()["errors"]
    assert "`format` to prompt_completion" in error["message"]
    assert upload(shared_api, lines(row), format="prompt_completion").status_code == 201


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"prompt": ""}, "empty_text"),
        ({"prompt": 1}, "wrong_type"),
        ({"prompt": [{"role": "user"}]}, "wrong_type"),
        ({"answer": "a"}, "missing_column"),
        ({"prompt": "p", "answer": True}, "wrong_type"),
        ({"prompt": "p", "answer": " "}, "empty_text"),
    ],
)
def test_a_prompt_must_be_one_and_its_answer_a_text(shared_api: ApiServer, row: dict[str, Any], code: str) -> None:
    assert errors(shared_api, lines({"prompt": "p"}, row)) == [("line 2", code)]


@pytest.mark.parametrize(("row", "format"), [(PAIR, "preference"), ({"prompt": "p", "answer": "a"}, "prompt")])
def test_supervised_methods_refuse_pairs_and_prompts_by_name(
    shared_api: ApiServer, row: dict[str, Any], format: str
) -> None:
    dataset = upload(shared_api, lines(row)).json()["id"]
    for method in ("sft", "full", "lora", "qlora"):
        body = {"dataset_id": dataset, "backend": "fake", "config": {"base_model": "any", "method": method}}
        answer = shared_api.client.post("/v1/runs", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "wrong_dataset_format")
        assert f"`{format}`" in answer.json()["detail"] and f"`{method}`" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines({"question": "q", "reply": "r", "id": "7"})),
        ("a.json", b'[{"question": "q", "reply": "r", "id": "7"}]'),
        ("a.csv", b"id,question,reply\n7,q,r\n"),
    ],
)
def test_columns_can_be_given_and_rows_are_kept_under_our_names(
    shared_api: ApiServer, name: str, content: bytes
) -> None:
    columns = json.dumps({"prompt": "question", "completion": "reply"})
    assert stored_rows(shared_api, content, name, columns=columns) == [{"prompt": "q", "completion": "r", "id": "7"}]


def test_a_column_may_take_the_name_of_one_that_is_renamed(shared_api: ApiServer) -> None:
    row = {"prompt": "a", "completion": "b"}
    swapped = json.dumps({"prompt": "completion", "completion": "prompt"})
    assert stored_rows(shared_api, lines(row), columns=swapped) == [{"prompt": "b", "completion": "a"}]
    taken = json.dumps({"prompt": "question"})
    assert errors(shared_api, lines({**row, "question": "q"}), columns=taken) == [("line 1", "column_conflict")]


@pytest.mark.parametrize(
    ("columns", "field", "code"),
    [
        ("prompt=question", "columns", "invalid_json"),
        ("[]", "columns", "wrong_type"),
        ("{}", "columns", "wrong_type"),
        ('{"prompt": 1}', "columns", "wrong_type"),
        ('{"prompt": "a", "prompt": "b"}', "columns", "duplicate_key"),
        ('{"prompt": "' + "x" * 300 + '"}', "columns", "key_too_long"),
        ('{"prompt": "' + "x" * 20_000 + '"}', "columns", "too_long"),
        ('{"text": "nowhere"}', "file", "unknown_column"),
    ],
)
def test_columns_that_cannot_be_are_refused(shared_api: ApiServer, columns: str, field: str, code: str) -> None:
    assert errors(shared_api, b"text,n\na,1\n", "a.csv", columns=columns) == [(field, code)]


@pytest.mark.parametrize("field", ["columns", "file_format", "tokenizer"])
def test_what_says_how_to_read_a_file_must_come_before_it(shared_api: ApiServer, field: str) -> None:
    parts = [("file", ("a.jsonl", lines(PAIR))), (field, (None, "x"))]
    answer = shared_api.client.post("/v1/datasets", files=parts)
    assert [(it["field"], it["code"]) for it in answer.json()["errors"]] == [(field, "after_file")]


@pytest.mark.parametrize("rows", [1, 50])
def test_columns_behind_the_file_that_needs_them_are_not_asked_for_again(shared_api: ApiServer, rows: int) -> None:
    mapping = json.dumps({"prompt": "question", "completion": "reply"})
    file = ("a.jsonl", lines(*[{"question": "q", "reply": "a"}] * rows))
    answer = shared_api.client.post("/v1/datasets", files=[("file", file), ("columns", (None, mapping))])
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"], error["code"]) == (422, "columns", "after_file")
    assert "before the part `file`" in error["message"]
    first = shared_api.client.post("/v1/datasets", files=[("columns", (None, mapping)), ("file", file)])
    assert first.status_code == 201, first.text
