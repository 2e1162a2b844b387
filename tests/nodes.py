"""Whether a test that is named somewhere exists, told from its source: nothing is imported for it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def is_test(node_id: str) -> bool:
    """Whether `path::Class::test` is there; the parameters of `test[…]` are not looked at."""
    path, *names = node_id.partition("[")[0].split("::")
    return bool(names) and (ROOT / path).is_file() and tuple(names) in _tests(ROOT / path)


@cache
def _tests(path: Path) -> frozenset[tuple[str, ...]]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(path.read_text()).body
    found = {(node.name,) for node in body if isinstance(node, functions)}
    for group in body:
        if isinstance(group, ast.ClassDef):
            found |= {(group.name, node.name) for node in group.body if isinstance(node, functions)}
    return frozenset(names for names in found if names[-1].startswith("test"))
