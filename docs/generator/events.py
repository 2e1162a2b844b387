"""Page of the event types: every model of `anneal/contracts/events.py` with its fields."""

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args

from anneal.contracts import events
from docs.generator import markdown

_INTRO = """\
`GET /v1/runs/{run_id}/events` streams the events of a run as `text/event-stream` or NDJSON. Events are numbered 1, 2, 3 …
without a gap or a duplicate; the guide [Stream events](../guides/events.md) shows how to follow them. `?types=` selects
types. `GET /v1/events` streams the types `status`, `progress` and `end` of all runs. Clients must ignore types and fields that they do not know.

"""


def page() -> str:
    """Return the page."""
    text = markdown.header("Events", "`anneal/contracts/events.py`") + _INTRO
    text += "## Fields of every event\n\n" + _fields(events.Event, ())
    shared = tuple(events.Event.model_fields)
    for name, model in models().items():
        text += f"## `{name}`\n\n{markdown.escape(inspect.getdoc(model) or '')}\n\n" + _fields(model, shared)
        if example := model.model_json_schema().get("example"):
            text += f"```json\n{json.dumps(example, ensure_ascii=False)}\n```\n\n"
    return text.rstrip("\n") + "\n"


def models() -> dict[str, type[events.Event]]:
    """Return every event model by the value of its `type` field, in the order of the source."""
    return {_type(model): model for model in _subclasses(events.Event) if _type(model)}


def _subclasses(model: type[events.Event]) -> Iterator[type[events.Event]]:
    for subclass in model.__subclasses__():
        if subclass.__module__ == events.__name__:
            yield subclass
        yield from _subclasses(subclass)


def _type(model: type[events.Event]) -> str:
    values: tuple[Any, ...] = get_args(model.model_fields["type"].annotation)
    return str(values[0]) if values else ""


def _fields(model: type[events.Event], without: tuple[str, ...]) -> str:
    schema = model.model_json_schema(by_alias=True)
    rows = [
        (
            f"`{name}`",
            markdown.type_text(field, schema.get("$defs", {})),
            markdown.escape(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
        if name not in without
    ]
    return markdown.table(("field", "type", "meaning"), rows)
