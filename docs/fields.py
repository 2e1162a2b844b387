"""The table of all fields of a training configuration in the README, made from the code: `make docs` writes it anew."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from app.contracts.rewards import Reward
from app.contracts.training_config.fields import TrainerOptions, TrainingConfig

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- fields -->\n", "<!-- /fields -->\n"
_TYPES = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number", "object": "object"}


def written(readme: str) -> str:
    """The README with the table as it has to be."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def table() -> str:
    """Every field: those of a group behind its name, those of a type of reward behind that."""
    rows = [("field", "type", "default", "meaning"), ("---",) * 4, *_config()]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def _config() -> Iterator[tuple[str, str, str, str]]:
    schema = TrainingConfig.model_json_schema()
    for name, field in schema["properties"].items():
        group = schema["$defs"].get(str(field.get("$ref", "")).rpartition("/")[2], {})
        if name == "extra":
            yield from _fields(TrainerOptions.model_json_schema(), "extra.")
        elif "properties" in group:
            yield from _fields({**group, "$defs": schema["$defs"]}, f"{name}.")
        else:
            yield _row(name, field, schema)
        if "rewards" in group.get("properties", {}):
            yield from _rewards(f"{name}.rewards[]")


def _rewards(field: str) -> Iterator[tuple[str, str, str, str]]:
    kinds: tuple[type[BaseModel], ...] = get_args(get_args(Reward)[0])
    yield _row(f"{field}.weight", kinds[0].model_json_schema()["properties"]["weight"], {})
    for kind in kinds:
        schema = kind.model_json_schema()
        name = schema["properties"].pop("type")["const"]
        del schema["properties"]["weight"]
        yield f"`{field}.type`", f"`{name}`", "", schema["description"]
        yield from _fields(schema, f"… {name}.")


def _fields(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema["properties"].items():
        yield _row(f"{prefix}{name}", field, schema)


def _row(name: str, field: dict[str, Any], schema: dict[str, Any]) -> tuple[str, str, str, str]:
    if name.rpartition(".")[2] in schema.get("required", ()):
        default = "required"
    else:
        default = f"`{json.dumps(field.get('default', {} if field.get('type') == 'object' else []))}`"
    return (
        f"`{name}`",
        _type(field, schema),
        default,
        field["description"].replace("; None:", "; null:").replace("None:", "Null:"),
    )


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in field:
        return _type(schema["$defs"][field["$ref"].rpartition("/")[2]], schema)
    if "anyOf" in field:
        return " or ".join(_type(one, schema) for one in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {'rewards' if 'oneOf' in field['items'] else _type(field['items'], schema)}"
    if field.get("type") == "null":
        return "null"
    if field["type"] == "string" and "examples" in field:
        return f'`"{field["examples"][0]}"`'
    return ", ".join([_TYPES[field["type"]], *_bounds(field)])


def _bounds(field: dict[str, Any]) -> Iterator[str]:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    told = {
        key: f"{int(field[key]) if field[key] == int(field[key]) else field[key]:,}" for key in words if key in field
    }
    if told.keys() == {"minimum", "maximum"}:
        yield f"{told['minimum']} to {told['maximum']}"
    else:
        yield from (f"{words[key]} {number}" for key, number in told.items())


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
