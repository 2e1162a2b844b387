"""The reference pages equal those that the code generates, and cover every field, setting, event and endpoint."""

from typing import get_args

import pytest
from pydantic import BaseModel

from anneal.contracts.events import EVENT_TYPES
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig
from anneal.settings import ClientSettings
from app.config import Settings
from docs.generator import configuration, events, http_api
from docs.generator.pages import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run `make reference`"


def test_every_page_is_generated() -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


def test_configuration_names_every_field_once() -> None:
    rows = [row[0].strip("`") for _, rows in configuration.sections() for row in rows]
    groups = {"extra": TrainerOptions} | {
        name: one
        for name, field in TrainingConfig.model_fields.items()
        for one in (field.annotation, *get_args(field.annotation))
        if isinstance(one, type) and issubclass(one, BaseModel)
    }
    assert {"dpo", "rlhf"} < set(groups)
    fields = {name for name in TrainingConfig.model_fields if name not in groups}
    fields |= {f"{group}.{name}" for group, model in groups.items() for name in model.model_fields}
    assert fields <= set(rows)
    assert all(rows.count(name) == 1 for name in fields)


def test_settings_name_every_variable() -> None:
    page = PAGES["settings.md"]()
    assert all(
        f"| `ANNEAL_{name.upper()}` |" in page for name in {*Settings.model_fields, *ClientSettings.model_fields}
    )


def test_events_cover_every_type() -> None:
    assert set(events.models()) >= set(EVENT_TYPES)


def test_http_lists_every_endpoint() -> None:
    page = PAGES["http.md"]()
    paths = http_api.document()["paths"]
    assert len(paths) > 30
    assert all(f"### `{method.upper()} {path}`\n" in page for path, item in paths.items() for method in item)


def test_no_reference_of_the_openapi_document_dangles() -> None:
    document = http_api.document()
    defined = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    used: set[str] = set()
    nodes: list[object] = [document]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            used |= {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    assert used <= defined
