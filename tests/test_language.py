"""Docstrings, comments, messages and documents are in plain technical English, without retired words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import ROOT

FOLDERS = ("app", "worker", "anneal", "docs/generator")
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md"]
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SOURCES += sorted((ROOT / "migrations").glob("*.py"))

RETIRED = re.compile(
    r"\b(told|tells?|telling|heed(s|ed)?|nobody|somebody|whoever|spoilt|mend(s|ed|ing)?|strangers?|leaps?|leapt|"
    r"lets? go|hands? back|handed back|takes? back|taken back|passed over|computed again|no number|seats?|learnt|"
    r"anew|begun|thereof|wherein|whence|lest|ought|last words|for good|in vain|stands still|stood still|spelt|whilst|"
    r"tokenis\w+|normalis\w+|quantis\w+|initialis\w+|optimis\w+|behaviour|colour\w*|licence|honour\w*)\b",
    re.IGNORECASE,
)
"""Words of earlier versions of this project, and British spellings."""

QUESTIONS = re.compile(r"(What|Whether|How|Who|Whose|Which|Where|When|Why)\b")
MOST_QUESTIONS = 0.01
"""Fraction of docstrings that may open like a question."""

VAGUE = {"found", "one", "asked", "given", "made", "kept", "wanted", "around", "wide"}
"""Names that do not say what they hold; `one` is for comprehensions."""

_CODE = re.compile(r"^```.*?^```$|(`+)[^\n]*?\1|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_BETWEEN = re.compile(r"""["'\s]+[a-z]{0,2}["']|\s+""")
"""Separators of two words in a text that is written as several strings."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield each docstring, those of attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def prose(path: Path) -> Iterator[str]:
    """Yield comments, docstrings and messages of a module: texts with a space, without code spans."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield _CODE.sub("", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield _CODE.sub("", token.string)


def findings(text: str) -> list[str]:
    """Return retired words with the text around them."""
    return [text[max(found.start() - 40, 0) : found.end() + 40] for found in RETIRED.finditer(text)]


def test_sources_have_no_retired_words() -> None:
    retired = [
        f"{path.relative_to(ROOT)}: {one!r}"
        for path in SOURCES
        if findings(_BETWEEN.sub(" ", path.read_text()))  # tokenizing takes long
        for text in prose(path)
        for one in findings(text)
    ]
    assert not retired, "\n".join(retired)


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of variables, parameters and functions with a vague name, those of comprehensions aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            for name in ast.walk(node.target):
                name.id = ""  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in VAGUE:
            yield node.lineno, node.name


def test_names_say_what_they_hold() -> None:
    folders = (*FOLDERS, "tests", "benchmarks")
    paths = sorted({path for folder in folders for path in (ROOT / folder).rglob("*.py")})
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        for line, name in vague_names(ast.parse(path.read_text()))
    ]
    assert not vague, "\n".join(vague)


def test_vague_names_are_reported_where_they_are_bound() -> None:
    source = (
        "def made(one, *, given=1):\n    wide: int = 1\n    for found in [one for one in x]:\n        a = kept = 2\n"
    )
    names = {name for _, name in vague_names(ast.parse(source))}
    assert names == {"made", "one", "given", "wide", "found", "kept"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_have_no_retired_words(path: Path) -> None:
    assert findings(_CODE.sub("", path.read_text())) == []


def test_docstrings_do_not_open_like_questions() -> None:
    texts = [text for path in SOURCES for text in docstrings(ast.parse(path.read_text()))]
    questions = [text.splitlines()[0] for text in texts if QUESTIONS.match(text)]
    assert len(texts) > 2000
    assert len(questions) < MOST_QUESTIONS * len(texts), questions


@pytest.mark.parametrize(
    "text", ["The worker is told.", "Nobody reads it.", "It hands back the run.", "Make it anew.", "tokenised rows"]
)
def test_retired_words_are_found(text: str) -> None:
    assert findings(text)
    assert not findings(_CODE.sub("", f"`{text}`"))
