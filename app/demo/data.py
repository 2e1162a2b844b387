"""Chats made from the docstrings of this machine's own Python standard library: source in, docstring out.

Nothing is downloaded and nothing is random: one Python version gives one data set, byte for byte.
"""

import ast
import hashlib
import inspect
import io
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM = "Write the docstring of this Python code."
MOST_SOURCE_CHARACTERS = 360
MOST_DOCSTRING_CHARACTERS = 220
_FEWEST_DOCSTRING_CHARACTERS = 20
_HELD_OUT_PERCENT = 5
_LEFT_OUT = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "turtledemo", "pydoc_data", "ensurepip",
}  # fmt: skip

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Documented:
    """A function, method or class with its docstring."""

    name: str
    """Module and qualified name: `json.decoder.JSONDecoder.decode`."""
    source: str
    """Signature and body without the docstring, at most `MOST_SOURCE_CHARACTERS`."""
    docstring: str
    """The first paragraph on one line, at most `MOST_DOCSTRING_CHARACTERS`."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept from training: the same on every machine, whatever else is in the data."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % 100 < _HELD_OUT_PERCENT

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The chat without its answer."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.source}]

    @property
    def row(self) -> dict[str, Any]:
        """The chat, as a row of the format `chat`."""
        return {"messages": [*self.prompt, {"role": "assistant", "content": self.docstring}]}


@dataclass(frozen=True)
class Rows:
    """What is trained on and what is held out of it, both in the order of their names."""

    training: list[Documented]
    held_out: list[Documented]


def build(stdlib: Path | None = None) -> Rows:
    """Read the modules below `stdlib` (None: of this Python); no source and no docstring occurs twice."""
    found = list(_unique(documented(stdlib or Path(sysconfig.get_paths()["stdlib"]))))
    return Rows(
        training=[one for one in found if not one.is_held_out],
        held_out=[one for one in found if one.is_held_out],
    )


def jsonl(rows: Sequence[Documented]) -> bytes:
    """The rows as a file to upload."""
    file = io.StringIO()
    for one in rows:
        file.write(json.dumps(one.row, ensure_ascii=False) + "\n")
    return file.getvalue().encode()


def documented(stdlib: Path) -> Iterator[Documented]:
    """Everything with a docstring that fits, module by module in the order of their names."""
    for path in sorted(stdlib.rglob("*.py")):
        place = path.relative_to(stdlib)
        if _LEFT_OUT.isdisjoint(place.parts[:-1]):
            module = ".".join(place.with_suffix("").parts)
            try:
                yield from _of_module(module.removesuffix(".__init__"), path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue  # some of the library's files are broken on purpose


def _of_module(module: str, text: str) -> Iterator[Documented]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings of the library are not ours to mend
        tree = ast.parse(text)
    lines = text.splitlines()
    for name, node in _definitions(tree, module):
        docstring = _first_paragraph(ast.get_docstring(node) or "")
        source = _without_docstring(node, lines)
        if docstring and source:
            yield Documented(name, source, docstring)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            qualified = f"{name}.{child.name}"
            yield qualified, child
            yield from _definitions(child, qualified)


def _first_paragraph(docstring: str) -> str:
    """The first paragraph on one line; empty when it is too short, too long, or no sentence."""
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    fits = _FEWEST_DOCSTRING_CHARACTERS <= len(text) <= MOST_DOCSTRING_CHARACTERS
    return text if fits and text.isprintable() and " " in text and ">>>" not in text else ""


def _without_docstring(node: Definition, lines: list[str]) -> str:
    first = node.body[0]
    start = node.lineno - 1
    signature = lines[start : max(first.lineno - 1, start + 1)]
    body = lines[first.end_lineno or first.lineno : node.end_lineno]
    kept: list[str] = []
    room = MOST_SOURCE_CHARACTERS
    for line in textwrap.dedent("\n".join([*signature, *body])).splitlines():
        line = line.rstrip()
        if not line or line.lstrip().startswith("#"):
            continue
        room -= len(line) + 1
        if room < 0:
            break  # cut between two lines, so that what is left still reads as code
        kept.append(line)
    return "\n".join(kept)


def _unique(found: Iterable[Documented]) -> Iterator[Documented]:
    """Without repetitions: a held-out docstring that was also trained on would measure memory."""
    seen: set[str] = set()
    for one in found:
        keys = {one.source, one.docstring.lower().rstrip(".")}
        if seen.isdisjoint(keys):
            seen |= keys
            yield one
