"""Datasets of the demo, built from the local Python standard library: code with docstrings, and code to docstring.

The build is deterministic and needs no download: one Python version gives one dataset, byte for byte.
"""

import ast
import hashlib
import inspect
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
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
    """Function, method or class with its docstring."""

    name: str
    """Module and qualified name: `json.decoder.JSONDecoder.decode`."""
    signature: str
    body: str
    """Code after the docstring, truncated so that signature and body fit into `MOST_SOURCE_CHARACTERS`."""
    docstring: str
    """First paragraph on one line, at most `MOST_DOCSTRING_CHARACTERS`."""

    @property
    def source(self) -> str:
        """Code without its docstring."""
        return f"{self.signature}\n{self.body}" if self.body else self.signature

    @property
    def is_held_out(self) -> bool:
        """True if the row is held out from training; depends only on the name, so it is the same on every machine."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % 100 < _HELD_OUT_PERCENT

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Chat messages without the answer."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.source}]

    @property
    def chat(self) -> dict[str, Any]:
        """Row of the format `chat`: the user message is the code, the answer is the docstring."""
        return {"messages": [*self.prompt, {"role": "assistant", "content": self.docstring}]}

    @property
    def text(self) -> dict[str, Any]:
        """Row of the format `text`: the code with its docstring."""
        lines = [self.signature, f'    """{self.docstring}"""', self.body]
        return {"text": "\n".join(line for line in lines if line)}


@dataclass(frozen=True)
class Rows:
    """Training rows and held-out rows, each sorted by name."""

    training: list[Documented]
    held_out: list[Documented]


def build(stdlib: Path | None = None) -> Rows:
    """Read the modules below `stdlib` (default: this Python's); no source and no docstring occurs twice."""
    found = list(_unique(documented(stdlib or Path(sysconfig.get_paths()["stdlib"]))))
    return Rows(
        training=[one for one in found if not one.is_held_out],
        held_out=[one for one in found if one.is_held_out],
    )


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    """Encode the rows as a JSONL file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def documented(stdlib: Path) -> Iterator[Documented]:
    """Yield every definition whose docstring fits, in the order of the module names."""
    for path in sorted(stdlib.rglob("*.py")):
        place = path.relative_to(stdlib)
        if _LEFT_OUT.isdisjoint(place.parts[:-1]):
            module = ".".join(place.with_suffix("").parts)
            try:
                yield from _of_module(module.removesuffix(".__init__"), path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue  # some files of the library are invalid on purpose


def _of_module(module: str, text: str) -> Iterator[Documented]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings of the library
        tree = ast.parse(text)
    lines = text.splitlines()
    for name, node in _definitions(tree, module):
        docstring = _first_paragraph(ast.get_docstring(node) or "")
        if docstring:
            yield Documented(name, *_code(node, lines), docstring)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            qualified = f"{name}.{child.name}"
            yield qualified, child
            yield from _definitions(child, qualified)


def _first_paragraph(docstring: str) -> str:
    """Return the first paragraph on one line; empty if it is too short, too long or not a sentence."""
    text = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    fits = _FEWEST_DOCSTRING_CHARACTERS <= len(text) <= MOST_DOCSTRING_CHARACTERS
    return text if fits and text.isprintable() and " " in text and ">>>" not in text else ""


def _code(node: Definition, lines: list[str]) -> tuple[str, str]:
    """Return signature and body without docstring, comments and blank lines, truncated at a line end."""
    start, first = node.lineno - 1, node.body[0]
    begin = max(first.lineno - 1, start + 1)
    dedented = textwrap.dedent(
        "\n".join([*lines[start:begin], *lines[first.end_lineno : node.end_lineno]])
    ).splitlines()
    kept: list[str] = []
    room = MOST_SOURCE_CHARACTERS
    in_signature = 0
    for number, line in enumerate(dedented, start=1):
        line = line.rstrip()
        if not line or line.lstrip().startswith("#"):
            continue
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
        in_signature += number <= begin - start
    return "\n".join(kept[:in_signature]), "\n".join(kept[in_signature:])


def _unique(found: Iterable[Documented]) -> Iterator[Documented]:
    """Skip duplicates: a held-out docstring that is also in the training rows would measure memorization."""
    seen: set[str] = set()
    for one in found:
        if not one.signature:
            continue  # the signature alone is too long
        keys = {one.source, one.docstring.lower().rstrip(".")}
        if seen.isdisjoint(keys):
            seen |= keys
            yield one
