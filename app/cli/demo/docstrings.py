"""Dataset of the demo: documented code of the local Python library, the same on every machine with this Python."""

import ast
import inspect
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SYSTEM = "Write the docstring of this Python code."
MOST_CODE_CHARACTERS = 360
DOCSTRING_CHARACTERS = range(20, 221)
_HELD_OUT_EVERY = 20
_SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "turtledemo", "pydoc_data", "ensurepip",
}  # fmt: skip
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Documented:
    """Function, method or class with the first paragraph of its docstring, without comments and blank lines."""

    name: str
    """Module and qualified name: `json.decoder.JSONDecoder.decode`."""
    signature: str
    body: str
    """Code after the docstring, cut at a line end so that the code has at most `MOST_CODE_CHARACTERS`."""
    docstring: str

    @property
    def code(self) -> str:
        return f"{self.signature}\n{self.body}".strip()

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.code}]

    @property
    def chat(self) -> dict[str, Any]:
        return {"messages": [*self.prompt, {"role": "assistant", "content": self.docstring}]}

    @property
    def text(self) -> dict[str, Any]:
        """Row of the format `text`: the code with its docstring."""
        return {"text": f'{self.signature}\n    """{self.docstring}"""\n{self.body}'.strip()}


class Split(NamedTuple):
    """Rows to train on and held-out rows, each in the order of their modules."""

    training: list[Documented]
    held_out: list[Documented]


def read_split(library: Path | None = None) -> Split:
    """Read the modules below `library` (default: this Python's); no code and no docstring occurs twice."""
    rows: list[Documented] = []
    seen: set[str] = set()
    for row in read_definitions(library or Path(sysconfig.get_paths()["stdlib"])):
        keys = {row.code, row.docstring.lower().rstrip(".")}
        if seen.isdisjoint(keys):  # a held-out docstring that is also trained on would measure memorization
            seen |= keys
            rows.append(row)
    held_out = rows[::_HELD_OUT_EVERY]
    del rows[::_HELD_OUT_EVERY]
    return Split(rows, held_out)


def encode_jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    """Encode rows as a JSONL file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_definitions(library: Path) -> Iterator[Documented]:
    """Yield every definition whose signature and docstring fit, in the order of the modules."""
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if _SKIPPED_FOLDERS.isdisjoint(place.parts[:-1]):
            module = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
            try:
                text = path.read_text(encoding="utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes in strings of the library
                    tree = ast.parse(text)
            except (SyntaxError, ValueError):
                continue  # some files of the library are invalid on purpose
            yield from _find_documented(tree, module, text.splitlines())


def _find_documented(parent: ast.AST, parent_name: str, lines: list[str]) -> Iterator[Documented]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            name, docstring = f"{parent_name}.{node.name}", ast.get_docstring(node) or ""
            paragraph = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
            is_sentence = paragraph.isprintable() and " " in paragraph and ">>>" not in paragraph
            if is_sentence and len(paragraph) in DOCSTRING_CHARACTERS:
                first = node.body[0]
                begin = max(first.lineno - 1, node.lineno)
                signature = _code_of(lines[node.lineno - 1 : begin], node)
                body = _code_of(lines[first.end_lineno : node.end_lineno], node)
                if (room := MOST_CODE_CHARACTERS - len(signature) - 1) >= 0:
                    body = body if len(body) <= room else body[: room + 1].rpartition("\n")[0]
                    yield Documented(name, signature, body, paragraph)
            yield from _find_documented(node, name, lines)


def _code_of(lines: list[str], node: Definition) -> str:
    """Return lines of a definition without its indentation, comments and blank lines."""
    code = (line[node.col_offset :].rstrip() for line in lines if not line.lstrip().startswith("#"))
    return "\n".join(line for line in code if line)
