"""Many texts at once are the tokens of each alone, whatever the tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from worker.training.data.tokenization import IGNORED, TextTokenizer, mask_prefix, tokenizer_digest

TEXTS = ["one two", "", "  spaces\n", "<|end|>", "héé 🦙", "one two"]


def tokenizers(model: Path) -> dict[str, PreTrainedTokenizerBase]:
    fast, adds, splits = (AutoTokenizer.from_pretrained(model) for _ in range(3))
    adds.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A <|end|>", special_tokens=[("<|pad|>", 1), ("<|end|>", 0)]
    )
    splits.split_special_tokens = True
    return {"fast": fast, "adds special tokens": adds, "splits special tokens": splits, "slow": ByT5Tokenizer()}


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["fast", "adds special tokens", "splits special tokens", "slow"])
def test_texts_at_once_are_what_the_tokenizer_says_of_each(
    kind: str, add_special_tokens: bool, tiny_model: Path
) -> None:
    tokenizer = tokenizers(tiny_model)[kind]
    tokenizer(TEXTS, padding=True, truncation=True, max_length=2)  # what others do with it in between is not ours
    encoded = TextTokenizer(tokenizer, add_special_tokens)(TEXTS)
    expected = [tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"] for text in TEXTS]
    assert [ids.tolist() for ids in encoded] == expected


def test_tokenizers_are_distinguished_and_each_knows_itself_again(tiny_model: Path) -> None:
    first, second = (
        {kind: tokenizer_digest(tokenizer) for kind, tokenizer in tokenizers(tiny_model).items()} for _ in range(2)
    )
    assert first == second and len(set(first.values())) == 4


@given(
    prompt=st.lists(st.integers(0, 2), max_size=6).map(tuple), ids=st.lists(st.integers(0, 2), max_size=8).map(tuple)
)
def test_what_is_learned_begins_where_it_does_for_trl(prompt: tuple[int, ...], ids: tuple[int, ...]) -> None:
    shared = common_prefix_length(list(prompt), list(ids))
    labels = mask_prefix(np.array(prompt, np.int32), np.array(ids, np.int32))
    assert labels.tolist() == [IGNORED] * shared + list(ids[shared:])
