"""Files, modules, definitions and exceptions that docstrings name exist."""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.nodes import ROOT
from tests.test_language import docstrings

PACKAGES = ("app", "worker", "anneal")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))

_SPAN = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./*-]+\.py|(?:app|worker|anneal|migrations|tests|docs|benchmarks)/[\w./*-]+")
_DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_RAISES = re.compile(r"^Raises:\n((?:(?: .*)?(?:\n|\Z))+)", re.MULTILINE)
_INLINE = re.compile(r"\b[Rr]aises? `?((?:\w+\.)*[A-Z]\w+)")
_ENTRY = re.compile(r"^ {4}([\w.]+(?:, [\w.]+)*):", re.MULTILINE)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> dict[str, str]:
    """Return the names that a module imports anywhere, each with what it stands for."""
    imported = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imported |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return imported


def names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the classes, functions and variables that the body of a module or class defines."""
    defined: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return defined


@cache
def texts(path: Path) -> list[str]:
    return [inspect.cleandoc(text) for text in docstrings(tree(path))]


@cache
def strings() -> set[str]:
    """Return the strings in the code: a task and the groups of plugins have names that look like modules."""
    nodes = (node for path in SOURCES for node in ast.walk(tree(path)))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@cache
def reached(path: Path) -> set[Path]:
    """Return the modules of this project that a module imports, directly or through others, and itself."""
    seen, left = {path}, [path]
    while left:
        for name in imports(left.pop()).values():
            for module in (name, name.rpartition(".")[0]):
                if module in MODULES and MODULES[module] not in seen:
                    seen.add(MODULES[module])
                    left.append(MODULES[module])
    return seen


def resolves(dotted: str) -> bool:
    """Return True if a dotted name is a module of this project, or something that one defines or imports."""
    if dotted in MODULES:
        return True
    parts = dotted.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES), None)
    if module is None:
        return False
    inner = parts[module.count(".") + 1 :]
    path = MODULES[module]
    if inner[0] in imports(path):
        return len(inner) == 1
    body = tree(path).body
    for name in inner:
        node = names(body).get(name)
        if node is None:
            return False
        body = node.body if isinstance(node, ast.ClassDef) else []
    return True


def missing_files(path: Path, text: str) -> list[str]:
    """Return the files that a text names and that are neither in the repository's root nor beside the module."""
    named = [span for span in _SPAN.findall(text) if _FILE.fullmatch(span)]
    return [name for name in named if not any(any(folder.glob(name)) for folder in (ROOT, path.parent))]


def unresolved_names(text: str) -> list[str]:
    """Return the dotted names of a text that are neither defined nor strings in the code."""
    named = [span for span in _SPAN.findall(text) if _DOTTED.fullmatch(span)]
    return [name for name in named if not resolves(name) and name not in strings()]


def exceptions(text: str) -> Iterator[str]:
    """Yield the exceptions of a docstring's section `Raises`, and those in sentences such as "raises `OSError`"."""
    yield from _INLINE.findall(text)
    for section in _RAISES.findall(text):
        for entry in _ENTRY.findall(section):
            yield from entry.split(", ")


def unknown_exceptions(path: Path, text: str) -> list[str]:
    """Return the exceptions that a docstring lists and that its module cannot raise, neither itself nor by a call."""
    return [name for name in exceptions(text) if not is_known(path, name)]


def is_known(path: Path, name: str) -> bool:
    """Return True for an exception that is built in, imported, fully named or of a module that this one reaches."""
    if isinstance(getattr(builtins, name, None), type) or resolves(name):
        return True
    first, _, rest = name.partition(".")
    imported = imports(path).get(first)
    if imported is not None:
        full = f"{imported}.{rest}" if rest else imported
        return full.split(".")[0] not in PACKAGES or resolves(full)
    if rest:
        return any(full.startswith(f"{first}.") for full in imports(path).values())
    return is_exception(path, name)


def is_exception(path: Path, name: str) -> bool:
    """Return True for a class of a module that this one reaches, if a base of it is an exception by name or in turn."""
    definitions = (names(tree(module).body).get(name) for module in reached(path))
    bases = {ast.unparse(base) for node in definitions if isinstance(node, ast.ClassDef) for base in node.bases}
    return any(base.endswith(("Error", "Exception")) or is_exception(path, base.split(".")[-1]) for base in bases)


def test_files_that_docstrings_name_exist() -> None:
    missing = [
        (module, name) for module, path in MODULES.items() for text in texts(path) for name in missing_files(path, text)
    ]
    assert missing == []


def test_dotted_names_in_docstrings_resolve() -> None:
    unresolved = [
        (module, name) for module, path in MODULES.items() for text in texts(path) for name in unresolved_names(text)
    ]
    assert unresolved == []


def test_exceptions_in_docstrings_exist_and_are_reachable() -> None:
    listed = [(path, text) for path in SOURCES for text in texts(path) if "Raises:" in text]
    assert len(listed) > 50
    assert [text for _, text in listed if not list(exceptions(text))] == []
    missing = [
        (module_name(path), name) for path in SOURCES for text in texts(path) for name in unknown_exceptions(path, text)
    ]
    assert missing == []


MACHINE = ROOT / "app/runs/state/machine.py"


@pytest.mark.parametrize(
    "name", ["app/lifecycle.py", "lifecycle.py", "states/machine.py", "app/*/schemas.py", "docs/api.md"]
)
def test_missing_files_are_found(name: str) -> None:
    assert missing_files(MACHINE, f"See `{name}` and `transitions.py`, `app/config.py`.") == [name]


@pytest.mark.parametrize(
    "name", ["app.lifecycle", "app.runs.state.machine.Lifecycle", "app.config.Settings.colour", "worker.pump"]
)
def test_names_that_do_not_resolve_are_found(name: str) -> None:
    right = "`app.runs.state.machine.claim` `anneal.contracts.stop.StopRequest.mode` `app.audit` `anneal.run_next`"
    assert unresolved_names(f"`{name}` {right}") == [name]


def test_unknown_exceptions_are_found_in_sentences() -> None:
    text = "Raises `Gone` if there is none, raise KeyError else; raises the count."
    assert unknown_exceptions(MACHINE, text) == ["Gone"]


@pytest.mark.parametrize("name", ["session.StillAliveError", "Stopped", "machine.Gone"])
def test_unknown_exceptions_are_found(name: str) -> None:
    listed = f"Raises:\n    OSError, {name}: Why,\n        and: more.\n    ApiError: Why."
    text = f"Do, and raise ValueError if not.\n\nReturns:\n    Nothing: at all.\n\n{listed}"
    assert unknown_exceptions(ROOT / "app/runs/state/service.py", text) == [name]
