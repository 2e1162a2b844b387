"""Templates of rewards: texts with `{{ item.column }}` and `{{ sample.output_text }}`, as those of OpenAI's graders.

`item` is the row of the dataset. `sample.output_text` is the completion, and `sample.output_json` the value that the
completion is as JSON. A path such as `item.answer.value` or `item.answers.0` leads into objects and lists.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError

COMPLETION = "{{ sample.output_text }}"
MESSAGES = "messages"
"""Column that templates can refer to in every dataset of prompts, which has its content as `prompt`."""
_MOST_CHARACTERS = 20_000
# Without nested repetition, so that a text of many braces is read in linear time.
_PLACEHOLDER = re.compile(r"\{\{([^{}]*)\}\}")
_PATH = re.compile(r"item(?:\.[\w-]+)+|sample\.output_text|sample\.output_json(?:\.[\w-]+)*")
_INDEX = re.compile(r"[0-9]{1,9}", re.ASCII)


class MissingValue(Exception):
    """A path leads to no value: the row has no such column, or the completion is not JSON with such a member."""


def _checked_template(template: str) -> str:
    """Return the template unchanged if all that it refers to is known."""
    for path in _paths([template]):
        if _PATH.fullmatch(path) is None:
            message = (
                "refers to `{path}`; a template can refer to columns of the row, as `{{ item.column }}`, and to the "
                "completion, as `{{ sample.output_text }}` or `{{ sample.output_json.member }}`"
            )
            raise PydanticCustomError("bad_template", message, {"path": path[:60]})
    if "{{" in _PLACEHOLDER.sub("", template):
        message = "has `{{` without `}}` after what it refers to; write for example `{{ item.answer }}`"
        raise PydanticCustomError("bad_template", message)
    return template


Template = Annotated[
    str, StringConstraints(min_length=1, max_length=_MOST_CHARACTERS), AfterValidator(_checked_template)
]


def _paths(templates: Iterable[str]) -> Iterator[str]:
    for template in templates:
        yield from (path.strip() for path in _PLACEHOLDER.findall(template))


def template_columns(templates: Iterable[str]) -> Iterator[str]:
    """Yield the columns of the row that templates refer to."""
    for path in _paths(templates):
        source, *parts = path.split(".")
        if source == "item":
            yield parts[0]


def row_item(row: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Return the columns of a row that templates refer to; null for those that it does not have."""
    return {name: row.get("prompt") if name == MESSAGES and name not in row else row.get(name) for name in columns}


def missing_path(templates: Iterable[str], item: Mapping[str, Any]) -> str | None:
    """Return the first path into the row that leads to no value; None if all lead to one."""
    for path in _paths(templates):
        if path.startswith("item."):
            try:
                _find_value(path, item, "")
            except MissingValue:
                return path
    return None


def render_template(template: str, item: Mapping[str, Any], completion: str) -> str:
    """Return the text of a template for a row and a completion; values that are no texts are written as JSON.

    Raises:
        MissingValue: A path leads to no value.
    """
    return _PLACEHOLDER.sub(lambda match: _as_text(_find_value(match[1].strip(), item, completion)), template)


def _find_value(path: str, item: Mapping[str, Any], completion: str) -> Any:
    source, *parts = path.split(".")
    value: Any = item
    if source == "sample":
        if parts.pop(0) == "output_text":
            return completion
        try:
            value = json.loads(completion)
        except (ValueError, RecursionError):
            raise MissingValue from None
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and _INDEX.fullmatch(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            raise MissingValue
    if value is None:
        raise MissingValue
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
