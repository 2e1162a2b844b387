"""Records of answers, each small enough for a datagram: a larger one would be cut."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from anneal.contracts.attempt.answers import AnswerPiece, ToolCall
from anneal.contracts.attempt.messages import MAX_RECORD_BYTES, AnswersRecord

_MOST_CHARACTERS = 8_000
"""Of a piece: at most 96 KB, since JSON takes up to 12 bytes for one."""
_MOST_BYTES = MAX_RECORD_BYTES - 1024
"""Of the pieces of a record, which also has a type and a time."""


def answer_records(pieces: Sequence[AnswerPiece]) -> Iterator[AnswersRecord]:
    """Divide pieces of answers among records that are below the maximum size, in order."""
    waiting: list[dict[str, Any]] = []
    size = 0
    for piece in chain.from_iterable(map(_divide_piece, pieces)):
        sent = piece.model_dump(mode="json", exclude_defaults=True)
        length = len(json.dumps(sent)) + 2
        if waiting and size + length > _MOST_BYTES:
            yield {"type": "answers", "pieces": waiting}
            waiting, size = [], 0
        waiting.append(sent)
        size += length
    if waiting:
        yield {"type": "answers", "pieces": waiting}


def _divide_piece(piece: AnswerPiece) -> Iterator[AnswerPiece]:
    """Divide a long piece; the first part has its numbers of tokens, and the last ends the choice as the piece does."""
    length = len(piece.text) + sum(len(call.name) + len(call.arguments) for call in piece.tool_calls)
    if length <= _MOST_CHARACTERS:
        yield piece
        return
    contents: list[dict[str, Any]] = [{"text": text} for text in _divide_text(piece.text)]
    for call in piece.tool_calls:
        for number, arguments in enumerate(_divide_text(call.arguments)):
            part = ToolCall(name=call.name, arguments=arguments, is_continued=number > 0)
            contents.append({"tool_calls": [part]})
    counts: dict[str, Any] = {"tokens": piece.tokens, "prompt_tokens": piece.prompt_tokens}
    for number, content in enumerate(contents):
        if number == 0:
            content |= counts
        if number == len(contents) - 1:
            content |= {"finish_reason": piece.finish_reason, "error": piece.error}
        yield AnswerPiece(question_id=piece.question_id, choice=piece.choice, **content)


def _divide_text(text: str) -> list[str]:
    return [text[start : start + _MOST_CHARACTERS] for start in range(0, len(text), _MOST_CHARACTERS)]
