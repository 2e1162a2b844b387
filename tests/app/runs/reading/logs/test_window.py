"""Promises about parts of a log: no line is missing or doubled, and a search finds every line."""

from typing import Any

import pytest
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer

LINES = 700


@pytest.fixture
def settings(shared_api: ApiServer) -> Settings:
    """Settings of the shared API, so that `engine` is on its database."""
    return shared_api.settings


@pytest.fixture
def trainer(emptied_api: ApiServer, engine: Engine) -> Trainer:
    """A run with lines, and other events between them."""
    trainer = Trainer(engine, make_run(emptied_api.client, make_dataset(engine))["id"]).begin()
    batch: list[tuple[str, dict[str, Any]]] = []
    for number in range(1, LINES + 1):
        level = "error" if number % 100 == 0 else "info"
        batch.append(("log", {"line": f"line {number} 100% a_b 'q'", "stream": "stdout", "level": level}))
        if number % 3 == 0:
            batch.append(("metric", {"step": number, "loss": 1.0}))
    trainer.mixed(batch)
    return trainer


def read(api: ApiServer, trainer: Trainer, call: str = "lines", **query: Any) -> dict[str, Any]:
    answer = api.client.get(f"/v1/runs/{trainer.run_id}/logs/{call}", params=query)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def numbers(page: dict[str, Any]) -> list[int]:
    return [int(line["line"].split()[1]) for line in page["data"]]


def test_the_newest_lines_come_first_and_older_ones_before_them(emptied_api: ApiServer, trainer: Trainer) -> None:
    page = read(emptied_api, trainer, limit=300)
    assert numbers(page) == list(range(401, 701)) and page["has_more"]
    seen = numbers(page)
    while page["has_more"]:
        page = read(emptied_api, trainer, limit=300, before=page["data"][0]["seq"])
        seen = numbers(page) + seen
    assert seen == list(range(1, LINES + 1))


def test_lines_after_a_seq_follow_without_a_gap(emptied_api: ApiServer, trainer: Trainer) -> None:
    seen: list[int] = []
    after = 0
    while True:
        page = read(emptied_api, trainer, limit=300, after=after)
        seen += numbers(page)
        after = page["data"][-1]["seq"]
        if not page["has_more"]:
            break
    assert seen == list(range(1, LINES + 1))


def test_lines_are_filtered_by_level_stream_and_attempt(emptied_api: ApiServer, trainer: Trainer) -> None:
    trainer.events("log", {"line": "line 0 of the service", "stream": "anneal", "level": "warning"})
    assert numbers(read(emptied_api, trainer, level="error")) == [100, 200, 300, 400, 500, 600, 700]
    assert numbers(read(emptied_api, trainer, level="warning"))[-1] == 0, "with errors"
    assert numbers(read(emptied_api, trainer, stream="anneal")) == [0]
    assert numbers(read(emptied_api, trainer, attempt=2)) == []
    both = emptied_api.client.get(f"/v1/runs/{trainer.run_id}/logs/lines", params={"before": 5, "after": 1})
    assert both.status_code == 422 and both.json()["errors"][0]["field"] == "after"


@pytest.mark.parametrize(
    ("phrase", "count"), [("line 7", 12), ("100%", LINES), ("a_b", LINES), ("axb", 0), ("'q'", LINES), ("LINE", 0)]
)
def test_a_search_finds_every_line_that_contains_the_text(
    emptied_api: ApiServer, trainer: Trainer, phrase: str, count: int
) -> None:
    hits = read(emptied_api, trainer, "search", q=phrase)
    assert len(hits["data"]) == count and hits["data"] == sorted(hits["data"]) and not hits["has_more"]
    if hits["data"]:
        first = read(emptied_api, trainer, after=hits["data"][0] - 1, limit=1)["data"][0]
        assert phrase in first["line"]
    few = read(emptied_api, trainer, "search", q=phrase, limit=5)
    assert few["data"] == hits["data"][-5:] and few["has_more"] is (count > 5)
