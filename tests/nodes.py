"""Lookup of tests by node id in the source files, without importing them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def is_test(node_id: str) -> bool:
    """Return True if `path::Class::test` exists; the parameters of `test[…]` are ignored."""
    path, names = _parts(node_id)
    return path.is_file() and names in _tests(path)


def is_parametrized(node_id: str) -> bool:
    """Return True if an existing test or its class is parametrized."""
    path, names = _parts(node_id)
    return _tests(path)[names]


def is_left_out(node_id: str) -> bool:
    """Return whether `make test` leaves out every case of a test that exists: it, its class or its file is `full`."""
    path, names = _parts(node_id)
    tree = ast.parse(path.read_text())
    if any("pytestmark" in ast.dump(node) and _is_full(node) for node in tree.body if isinstance(node, ast.Assign)):
        return True
    nodes: list[ast.stmt] = tree.body
    for name in names:
        (node,) = (one for one in nodes if getattr(one, "name", None) == name)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if any(_is_full(decorator) for decorator in node.decorator_list):
            return True
        nodes = node.body
    return False


def _is_full(node: ast.AST) -> bool:
    """Return whether `pytest.mark.full` applies to what is decorated, and not to some of its parameters."""
    text = ast.unparse(node)
    return "mark.full" in text and "parametrize" not in text


def _parts(node_id: str) -> tuple[Path, tuple[str, ...]]:
    path, *names = node_id.partition("[")[0].split("::")
    return ROOT / path, tuple(names)


@cache
def _tests(path: Path) -> dict[tuple[str, ...], bool]:
    """Map the names of the tests in a file to True if the test is parametrized."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tests = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions):
            tests[(node.name,)] = _has_parameters(node)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, functions):
                    tests[(node.name, child.name)] = _has_parameters(child) or _has_parameters(node)
    return {names: several for names, several in tests.items() if names[-1].startswith("test")}


def _has_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any("parametrize" in ast.dump(decorator) for decorator in node.decorator_list)
