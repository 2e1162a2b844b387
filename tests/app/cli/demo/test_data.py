"""What the demo promises of the data and the model that it makes."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from app.cli.demo import base_model, data

_MODULE = '''"""A module."""

class Shelf:
    """A place where books stand in a row."""

    def take(self, title):
        """Take the book with this title.

        A second paragraph that is not learnt.
        """
        # a remark
        return self._books.pop(title)

    def short(self):
        """Too short."""

    def undocumented(self):
        return 1


async def read(book, pages=3):
    """Read some pages
    of a book."""
    for page in book:

        await page
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of a few modules, one of them broken, one of them a test."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "__init__.py").write_text(_MODULE)
    (tmp_path / "books" / "copy.py").write_text(_MODULE)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "latin.py").write_bytes(b'"""\xe9t\xe9"""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "cases.py").write_text('def f():\n    """A docstring of a test of the library."""\n')
    return tmp_path


@pytest.fixture(scope="module")
def rows() -> data.Rows:
    """The rows of this Python's own library."""
    return data.build()


@pytest.fixture(scope="module")
def tokenizer(rows: data.Rows) -> Tokenizer:
    """The demo's tokenizer, trained on a part of them."""
    return base_model.train_tokenizer((text for row in rows.training[:800] for text in row.text.values()), 1000)


def test_a_chat_is_source_without_its_docstring_and_the_first_paragraph_of_it(library: Path) -> None:
    found = {one.name: one for one in data.documented(library)}

    take = found["books.Shelf.take"]
    assert take.source == "def take(self, title):\n    return self._books.pop(title)"
    assert take.docstring == "Take the book with this title."
    assert take.text["text"] == (
        'def take(self, title):\n    """Take the book with this title."""\n    return self._books.pop(title)'
    )
    read = found["books.read"]
    assert read.docstring == "Read some pages of a book."
    assert read.source == "async def read(book, pages=3):\n    for page in book:\n        await page"


def test_what_cannot_be_learned_from_is_left_out(library: Path) -> None:
    names = {one.name for one in data.documented(library)}

    assert names == {
        f"{module}.{name}" for module in ("books", "books.copy") for name in ("Shelf", "Shelf.take", "read")
    }


def test_nothing_occurs_twice(library: Path) -> None:
    built = data.build(library)

    assert sorted(one.name for one in [*built.training, *built.held_out]) == [
        "books.Shelf",
        "books.Shelf.take",
        "books.read",
    ]


def test_this_machines_library_gives_several_thousand_rows(rows: data.Rows) -> None:
    assert len(rows.training) > 3000
    assert 100 < len(rows.held_out) < 0.1 * len(rows.training)


def test_rows_are_the_same_every_time() -> None:
    part = Path(asyncio.__file__).parent
    first = data.build(part)
    assert len(first.training) > 100 and first == data.build(part)


def test_no_held_out_docstring_or_source_is_trained_on(rows: data.Rows) -> None:
    for part in ("source", "docstring"):
        trained = {getattr(one, part) for one in rows.training}
        assert trained.isdisjoint(getattr(one, part) for one in rows.held_out)


def test_every_row_is_a_chat_of_bounded_length(rows: data.Rows) -> None:
    lines = data.jsonl(row.chat for row in rows.held_out).decode().splitlines()

    assert len(lines) == len(rows.held_out)
    for line in lines:
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert 0 < len(messages[1]["content"]) <= data.MOST_SOURCE_CHARACTERS
        assert 0 < len(messages[2]["content"]) <= data.MOST_DOCSTRING_CHARACTERS


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "  zwei  Leerzeichen\t", "Grüße, 世界 🌍", ""])
def test_the_tokenizer_writes_any_text_and_reads_it_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_model_folder_loads_with_its_template_marks_and_has_no_weights(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    base_model.write_model(tmp_path, tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "Set x."}]
    encoded = loaded.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)

    learnt = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert loaded.decode(learnt) == "Set x.<|end|>"
    assert loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True).endswith(
        "<|assistant|>"
    )
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == tokenizer.get_vocab_size()
    assert not list(tmp_path.glob("*.safetensors"))
