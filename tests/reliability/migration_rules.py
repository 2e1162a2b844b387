"""Which statements of a migration break replicas of the version before, read from its source."""

import ast
import re

MARKER = "BREAKS_OLD_REPLICAS"
_DROPS = {"drop_table", "drop_column", "rename_table"}
_SQL = re.compile(
    r"\b(DROP\s+(TABLE|COLUMN|TYPE|VIEW|FUNCTION)|RENAME\b|TRUNCATE\b|SET\s+NOT\s+NULL|(SET\s+DATA\s+)?TYPE\s+\w|"
    r"ADD\s+(COLUMN\s+)?(?!CONSTRAINT)\w+\s+(?!.*\bDEFAULT\b).*\bNOT\s+NULL|CREATE\s+(UNIQUE\s+)?INDEX\s+(?!CONCURRENTLY))",
    re.IGNORECASE,
)


def breaking(source: str) -> list[str]:
    """A sentence for each statement of `upgrade()` that old replicas, or those who write meanwhile, do not survive."""
    module = ast.parse(source)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name != "downgrade"]
    calls = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
    new_tables = {_text(call.args[0]) for call in calls if _name(call) == "create_table" and call.args}
    violations: list[str] = []
    for call in calls:
        table = _text(call.args[0]) if call.args else ""
        if table not in new_tables:
            violations += [f"line {call.lineno}: {what}" for what in _of_call(call, new_tables)]
    return violations


def reason(source: str) -> str:
    """Why the migration may break old replicas all the same; empty when it does not say."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == MARKER for to in node.targets):
            return _text(node.value)
    return ""


def _of_call(call: ast.Call, new_tables: set[str]) -> list[str]:
    name = _name(call)
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in _DROPS:
        return [f"{name} takes away what old replicas use"]
    if name == "alter_column":
        return [
            f"alter_column with {argument} changes what old replicas read or write"
            for argument in ("new_column_name", "type_")
            if argument in named
        ] + (["alter_column to NOT NULL refuses rows of old replicas"] if _is(named.get("nullable"), False) else [])
    if name == "add_column" and len(call.args) > 1 and isinstance(call.args[1], ast.Call):
        column = {keyword.arg: keyword.value for keyword in call.args[1].keywords}
        if _is(column.get("nullable"), False) and "server_default" not in column:
            return ["a column NOT NULL without server default refuses rows of old replicas"]
    if name == "create_index" and _owner(call) == "op" and len(call.args) > 1 and _text(call.args[1]) not in new_tables:
        return ["an index on a table in use keeps everybody from writing: use online.create_index"]
    if name == "execute" and call.args and (bad := _SQL.search(_text(call.args[0]))):
        return [f"{bad[0]!r} in SQL of its own"]
    return []


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.Call) -> str:
    return getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _text(node: ast.expr) -> str:
    """The text of a literal, an f-string's fixed parts, or what is in a call such as `sa.text(…)`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "?".join(_text(part) for part in node.values if isinstance(part, ast.Constant))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Call) and node.args:
        return _text(node.args[0])
    return ""
