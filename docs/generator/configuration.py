"""Page of the training configuration: every field with its type, default and description."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from anneal.contracts.methods import DEFAULT_METHOD, METHODS
from anneal.contracts.rewards import Reward
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig
from anneal.contracts.training_config.optimizers import OptimizerOptions, SchedulerOptions
from docs.generator import markdown

_COLUMNS = ("field", "type", "default", "meaning")
_INTRO = """\
`POST /v1/runs` takes these fields as `config`. Only `base_model` is required, and an unknown field is an error.
`POST /v1/runs/validate` reports every problem of a configuration, and its resolved values.

A value equal to the default counts as not given. So a client may send every field for every method: `validate` warns
(`equals_default`) about those that the method does not use, and any other value of them is an error. Such a value is used where
the method uses the field: a learning rate of 2e-4 for `dpo` is 40 times its default, and is warned about (`unusual_value`) like
other values far outside the usual range of their method. Warnings are in the answer to a create and on the run, too.

Counts may be written as `"10k"`, `"1.5M"`, `"8Ki"`, `"2^15"`, `"1e4"` or `"10_000"`, and durations as `"2h"`; they are stored as
numbers. Each method is described in [Methods](../guides/methods.md), rewards in [Rewards](../guides/rewards.md), and
plugins in [Plugins](../guides/plugins.md).

"""

_FIELDS = "Fields of a run"
_BY_METHOD = METHODS[DEFAULT_METHOD].default_fields(None).keys()
_RATES = """\
## Default learning rates

A run that gives no `learning_rate` has that of its method. `POST /v1/runs/validate` shows it in `effective_config`.

"""

Row = tuple[str, str, str, str]


def page() -> str:
    """Return the page."""
    text = markdown.header("Training configuration", "`anneal/contracts/training_config/fields.py`") + _INTRO
    for title, rows in sections():
        text += f"## {title}\n\n" + markdown.table(_COLUMNS, rows)
        if title == _FIELDS:
            text += _RATES + markdown.table(("method", "with an adapter", "all weights"), _learning_rates())
    return text.rstrip("\n") + "\n"


def sections() -> Iterator[tuple[str, list[Row]]]:
    """Yield the title and the rows of each section: fields of the run, groups, types of rewards, `extra`."""
    schema = TrainingConfig.model_json_schema()
    groups: dict[str, dict[str, Any]] = {}
    top: list[Row] = []
    for name, field in schema["properties"].items():
        target = schema["$defs"].get(_target(field), {})
        if name == "extra":
            groups[name] = TrainerOptions.model_json_schema()
        elif "properties" in target:
            groups[name] = {**target, "$defs": schema["$defs"]}
        else:
            top.append(_row(name, field, schema))
    yield _FIELDS, top
    for name, group in groups.items():
        yield f"`{name}`", list(_fields(group, f"{name}."))
        if name == "extra":
            for member, model in (("optim_args", OptimizerOptions), ("lr_scheduler_kwargs", SchedulerOptions)):
                yield f"`{name}.{member}`", list(_fields(model.model_json_schema(), f"{name}.{member}."))
        if "rewards" in group["properties"]:
            yield from _rewards(f"{name}.rewards[]")


def _learning_rates() -> Iterator[tuple[str, str, str]]:
    for method in METHODS.values():
        adapter = "" if method.adapter == "forbidden" else f"`{method.learning_rate.adapter:g}`"
        full = "" if method.adapter == "required" else f"`{method.learning_rate.full:g}`"
        yield f"`{method.name}`", adapter, full


def _target(field: dict[str, Any]) -> str:
    refs = [one.get("$ref", "") for one in (field, *field.get("anyOf", ()), *field.get("allOf", ()))]
    return next((markdown.reference(ref) for ref in refs if ref), "")


def _rewards(prefix: str) -> Iterator[tuple[str, list[Row]]]:
    kinds: tuple[type[BaseModel], ...] = get_args(get_args(Reward)[0])
    yield f"`{prefix}`, all types", [_row(f"{prefix}.weight", kinds[0].model_json_schema()["properties"]["weight"], {})]
    for kind in kinds:
        schema = kind.model_json_schema()
        name = schema["properties"].pop("type")["const"]
        del schema["properties"]["weight"]
        first = ("`type`", f"`{name}`", "", schema["description"])
        yield f"`{prefix}`, type `{name}`", [first, *_fields(schema, "")]


def _fields(schema: dict[str, Any], prefix: str) -> Iterator[Row]:
    for name, field in schema["properties"].items():
        yield _row(f"{prefix}{name}", field, schema)


def _row(name: str, field: dict[str, Any], schema: dict[str, Any]) -> Row:
    required = name.rpartition(".")[2] in schema.get("required", ())
    type_text = markdown.type_text(field, schema.get("$defs", {}))
    if name.endswith(".rewards"):
        type_text = "list of rewards"
    default = "by method" if name in _BY_METHOD else markdown.default_text(field, required)
    return f"`{name}`", type_text, default, markdown.escape(field["description"])
