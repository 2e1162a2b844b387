"""Every event type has one model, which documents its fields; every type that the code writes is registered."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import ValidationError

from anneal.contracts.attempt.messages import TrainerRecord
from anneal.contracts.events import EVENT_TYPES, EVENTS, TRAINER_RECORDS, Event, TrainerEvent

_ROOT = Path(__file__).parents[3]


def _models(base: type[Event] = Event) -> Iterator[type[Event]]:
    for model in base.__subclasses__():
        yield from _models(model)
        if model is not TrainerEvent:
            yield model


def _written_types() -> Iterator[tuple[str, str]]:
    """Yield (place, type) of each `NewEvent.from_payload(…)` with a constant type."""
    for path in sorted([*(_ROOT / "app").rglob("*.py"), *(_ROOT / "worker").rglob("*.py")]):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "NewEvent.from_payload" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "NewEvent.from_payload":
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    yield f"{path.relative_to(_ROOT)}:{node.lineno}", kind.value


def test_every_model_is_registered_once() -> None:
    assert sorted(EVENTS.values(), key=repr) == sorted(_models(), key=repr)
    assert set(EVENTS) - set(EVENT_TYPES) == {"truncated", "cursor"}


def test_every_written_type_is_registered() -> None:
    written = dict(_written_types())
    assert len(set(written.values())) > 5
    assert {place: kind for place, kind in written.items() if kind not in EVENT_TYPES} == {}


def test_the_trainer_can_send_every_record_that_becomes_an_event_unchanged() -> None:
    sent = {get_args(get_type_hints(record)["type"])[0]: record for record in get_args(TrainerRecord)}
    assert sorted(TRAINER_RECORDS - sent.keys()) == []
    for kind in sorted(TRAINER_RECORDS):
        assert sorted(get_type_hints(sent[kind]).keys() - EVENTS[kind].model_fields.keys()) == [], kind


@pytest.mark.parametrize("model", EVENTS.values(), ids=lambda model: model.__name__)
class TestModel:
    def test_documents_every_field(self, model: type[Event]) -> None:
        assert [name for name, field in model.model_fields.items() if name != "type" and not field.description] == []

    def test_event_example_has_every_required_field_and_no_unknown_one(self, model: type[Event]) -> None:
        example: Any = model.model_json_schema()["example"]
        event = model.model_validate(example)
        assert EVENTS[event.type] is model and not event.model_extra
        assert set(example) <= set(event.model_dump(by_alias=True))

    def test_rejects_another_type(self, model: type[Event]) -> None:
        with pytest.raises(ValidationError):
            model.model_validate({**model.model_json_schema()["example"], "type": "other"})
