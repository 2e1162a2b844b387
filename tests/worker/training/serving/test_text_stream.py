"""Text of an answer arrives in whole characters, and without any part of its stop text."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker.training.serving.asking import load_tokenizer
from worker.training.serving.text_stream import TextStream

TEXT = "naïve 漢字 🎉🎊 – the end"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def pieces_of(tokenizer: Any, tokens: list[int], stop: list[str]) -> list[str]:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.is_stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_no_piece_has_a_part_of_a_character(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    pieces = pieces_of(tokenizer, tokens, [])
    assert len(tokens) > len(TEXT) and "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "漢" in pieces and "🎉" in pieces


def test_incomplete_character_at_the_end_is_what_the_tokenizer_makes_of_it(tokenizer: Any) -> None:
    tokens = tokenizer("ab🎉")["input_ids"][:-1]
    pieces = pieces_of(tokenizer, tokens, [])
    assert pieces[-1] and "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("stop", ["字 🎉", "🎊", "ï", "the end", "– the", "n", "e 漢"])
def test_stop_text_across_pieces_is_left_out_and_never_partly_sent(stop: str, tokenizer: Any) -> None:
    pieces = pieces_of(tokenizer, tokenizer(TEXT)["input_ids"], ["not in it", stop])
    assert "".join(pieces) == TEXT[: TEXT.index(stop)]


def test_beginning_of_a_stop_text_that_is_none_is_sent_late(tokenizer: Any) -> None:
    assert "".join(pieces_of(tokenizer, tokenizer("aaab – aab")["input_ids"], ["aabc", "– x"])) == "aaab – aab"
    stream = TextStream(tokenizer, ["xyz"])
    tokens = tokenizer("wxyw")["input_ids"]
    assert [stream.add(token) for token in tokens] == ["w", "", "", "xyw"]


def test_random_tokens_have_the_text_of_all_tokens_up_to_the_first_stop_text(tokenizer: Any) -> None:
    chance = random.Random(0)
    for _ in range(300):
        tokens = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 30))]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        start = chance.randrange(len(whole) + 1)
        stop = whole[start : start + chance.randrange(1, 4)]
        assert "".join(pieces_of(tokenizer, tokens, [])) == whole
        pieces = pieces_of(tokenizer, tokens, [stop])
        assert "".join(pieces) == (whole[: whole.index(stop)] if stop else whole)
