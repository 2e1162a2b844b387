"""Answers reach their API process whole, however long they are."""

import json

from anneal.contracts.attempt.answers import AnswerPiece, ToolCall
from anneal.contracts.attempt.messages import MAX_RECORD_BYTES
from app.openai.chat import ChatForm
from worker.ingest.record_parser import parse_record
from worker.ingest.redaction import Redactor
from worker.training.serving.answer_records import answer_records

KEYS = "https://user:password@host hf_abcdefghijklmnopqrstuvwxyz bearer abcdefghijkl "


def received(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Return the pieces as they arrive, from records of at most the maximum size."""
    parsed = []
    for record in answer_records(pieces):
        data = json.dumps({**record, "ts": 1.0}).encode()
        assert len(data) <= MAX_RECORD_BYTES
        parsed.append(parse_record(data, Redactor()))
    return [AnswerPiece.model_validate(piece) for record in parsed if record for piece in record["pieces"]]


def test_long_text_and_tool_calls_that_look_like_keys_arrive_whole_and_end_once() -> None:
    text = KEYS + "\U0001f600é" * 50_000
    arguments = json.dumps({"text": KEYS + "ä" * 100_000}, ensure_ascii=False)
    calls = [ToolCall(name="look", arguments=arguments), ToolCall(name="see", arguments="{}")]
    piece = AnswerPiece(
        question_id="1", text=text, tokens=7, prompt_tokens=3, finish_reason="tool_calls", tool_calls=calls
    )
    form = ChatForm("model")
    pieces = received([piece])
    chunks = []
    for part in pieces:
        form.add(part)
        chunks.append(form.choice_chunk(part))
    (choice,) = form.whole().choices
    assert choice.message.content == text and choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [arguments, "{}"]
    assert (form.prompt_tokens, form.completion_tokens) == (3, 7)
    assert [part.finish_reason for part in pieces if part.finish_reason] == ["tool_calls"]
    assert [len(chunk["delta"]["tool_calls"]) for chunk in chunks if "tool_calls" in chunk["delta"]] == [2]


def test_pieces_of_many_questions_are_all_sent_in_order() -> None:
    pieces = [AnswerPiece(question_id=str(number), text="é" * 5_000, tokens=1) for number in range(100)]
    assert received(pieces) == pieces
    assert list(answer_records([])) == []


def test_what_json_cannot_hold_is_replaced_in_an_answer() -> None:
    (piece,) = received([AnswerPiece(question_id="1", text="a\0b\U0001f600")])
    assert piece.text == "a\ufffdb\U0001f600"
    data = b'{"type": "answers", "pieces": [{"question_id": "1", "text": "\\ud800"}]}'
    record = parse_record(data, Redactor())
    assert record is not None and record["pieces"][0]["text"].encode()
