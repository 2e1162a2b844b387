"""Generator of tables.md: the tables of the database, and which of them refer to which."""

import inspect

from app.tables.base import Base
from app.tables.registry import all_models
from docs.generator import markdown

_INTRODUCTION = """\
Tables of PostgreSQL, as `app/tables` defines them. [State machine](../internals/state-machine.md) and
[Event log](../internals/event-log.md) describe the two most important ones.

## References

Below each table are the columns of others that refer to it; `*`: the row is deleted with the one that it refers to.

"""


def page() -> str:
    """Return the text of tables.md."""
    tables, contents = all_models().sorted_tables, _contents()
    rows = [
        [f"`{table.name}`", ", ".join(f"`{column.name}`" for column in table.primary_key), contents[table.name]]
        for table in sorted(tables, key=lambda table: table.name)
    ]
    diagram = f"```text\n{_references()}```\n\n## Tables\n\n"
    text = markdown.header("Tables", "`app/tables`") + _INTRODUCTION + diagram
    return text + markdown.table(["table", "primary key", "content"], rows)


def _references() -> str:
    """Return the diagram: each table that others refer to, with the columns that do."""
    referring: dict[str, list[str]] = {}
    for table in all_models().sorted_tables:
        for key in table.foreign_keys:
            mark = " *" if key.ondelete == "CASCADE" else ""
            referring.setdefault(key.column.table.name, []).append(f"{table.name}.{key.parent.name}{mark}")
    return "".join(
        f"{name}\n" + "".join(f"  ← {column}\n" for column in sorted(columns))
        for name, columns in sorted(referring.items())
    )


def _contents() -> dict[str, str]:
    """Return the first line of the docstring of each table's class."""
    return {
        mapper.local_table.name: (inspect.getdoc(mapper.class_) or "").partition("\n")[0]  # type: ignore[attr-defined]
        for mapper in Base.registry.mappers
    }
