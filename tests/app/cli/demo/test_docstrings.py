"""What the demo promises of the data that it makes."""

import asyncio
import json
from pathlib import Path

import pytest

from app.cli.demo import docstrings
from app.cli.demo.docstrings import Split

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
def rows() -> Split:
    """The rows of a part of this Python's library."""
    return docstrings.read_split(Path(asyncio.__file__).parent)


def test_a_chat_is_code_without_its_docstring_and_the_first_paragraph_of_it(library: Path) -> None:
    definitions = {one.name: one for one in docstrings.read_definitions(library)}

    take = definitions["books.Shelf.take"]
    assert take.code == "def take(self, title):\n    return self._books.pop(title)"
    assert take.docstring == "Take the book with this title."
    assert take.text["text"] == (
        'def take(self, title):\n    """Take the book with this title."""\n    return self._books.pop(title)'
    )
    read = definitions["books.read"]
    assert read.docstring == "Read some pages of a book."
    assert read.code == "async def read(book, pages=3):\n    for page in book:\n        await page"


def test_unusable_docstrings_are_left_out(library: Path) -> None:
    names = {one.name for one in docstrings.read_definitions(library)}

    assert names == {
        f"{module}.{name}" for module in ("books", "books.copy") for name in ("Shelf", "Shelf.take", "read")
    }


def test_docstring_rows_are_distinct(library: Path) -> None:
    built = docstrings.read_split(library)

    assert sorted(one.name for one in [*built.training, *built.held_out]) == [
        "books.Shelf",
        "books.Shelf.take",
        "books.read",
    ]


@pytest.mark.full  # reads the whole library; the others read a part of it
def test_standard_library_gives_several_thousand_rows() -> None:
    rows = docstrings.read_split()
    assert len(rows.training) > 3000
    assert 100 < len(rows.held_out) < 0.1 * len(rows.training)


def test_rows_are_the_same_every_time(rows: Split) -> None:
    assert len(rows.training) > 100 and rows == docstrings.read_split(Path(asyncio.__file__).parent)


def test_no_held_out_docstring_or_code_is_trained_on(rows: Split) -> None:
    for part in ("code", "docstring"):
        trained = {getattr(one, part) for one in rows.training}
        assert trained.isdisjoint(getattr(one, part) for one in rows.held_out)


def test_every_row_is_a_chat_of_bounded_length(rows: Split) -> None:
    lines = docstrings.encode_jsonl(row.chat for row in rows.held_out).decode().splitlines()

    assert len(lines) == len(rows.held_out)
    for line in lines:
        messages = json.loads(line)["messages"]
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert 0 < len(messages[1]["content"]) <= docstrings.MOST_CODE_CHARACTERS
        assert len(messages[2]["content"]) in docstrings.DOCSTRING_CHARACTERS
