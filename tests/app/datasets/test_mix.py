"""Mixes: rows and order of `datasets.interleave_datasets`, rows weighted by a column, and what is refused."""

import json
import threading
from collections import Counter
from typing import Any

import datasets
import pytest

from tests.app.uploads import lines, upload
from tests.server import ApiServer


def upload_rows(api: ApiServer, *rows: dict[str, Any]) -> str:
    answer = upload(api, lines(*rows), "data.jsonl")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def texts(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} {number} ü"} for number in range(count)]


def mix(api: ApiServer, *sources: dict[str, Any], **more: Any) -> Any:
    return api.client.post("/v1/datasets/mix", json={"name": "mixed", "sources": list(sources), **more})


def rows_of(api: ApiServer, answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 201, answer.text
    content = api.client.get(f"/v1/datasets/{answer.json()['id']}/content").text
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize(("sizes", "weights"), [((3, 50, 7), (0.2, 0.5, 0.3)), ((1500, 900), (7, 3)), ((5,), (2,))])
def test_rows_and_order_are_those_of_interleave_datasets(
    shared_api: ApiServer, sizes: tuple[int, ...], weights: tuple[float, ...], strategy: Any
) -> None:
    sources = [texts(str(number), size) for number, size in enumerate(sizes)]
    ids = [upload_rows(shared_api, *rows) for rows in sources]
    request_sources = [{"dataset_id": id, "weight": weight} for id, weight in zip(ids, weights, strict=True)]
    answer = mix(shared_api, *request_sources, seed=7, stopping_strategy=strategy)
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_list(rows) for rows in sources],
        probabilities=[weight / sum(weights) for weight in weights],
        seed=7,
        stopping_strategy=strategy,
    ).to_list()
    assert rows_of(shared_api, answer) == expected
    shown = shared_api.client.get(f"/v1/datasets/{answer.json()['id']}").json()
    assert shown["rows"] == len(expected) and shown["preview"] == expected[:3]
    taken = Counter(row["text"].split()[0] for row in expected)
    assert [one["rows"] for one in shown["source"]["mixed_from"]] == [taken[str(n)] for n in range(len(sizes))]


def test_without_weights_the_sources_follow_each_other(shared_api: ApiServer) -> None:
    ids = [upload_rows(shared_api, *texts("a", 3)), upload_rows(shared_api, *texts("b", 2))]
    answer = mix(shared_api, *({"dataset_id": id} for id in ids))
    assert rows_of(shared_api, answer) == texts("a", 3) + texts("b", 2)


def test_a_column_says_how_often_a_row_is_used(shared_api: ApiServer) -> None:
    weights = [0, False, None, 1, True, 2, 0.0, 3.0, *[0.5] * 400]
    id = upload_rows(shared_api, *({"text": f"{number}", "w": weight} for number, weight in enumerate(weights)))
    answer = mix(shared_api, {"dataset_id": id, "weight_column": "w"})
    counts = Counter(int(row["text"]) for row in rows_of(shared_api, answer))
    assert [counts[number] for number in range(8)] == [0, 0, 0, 1, 1, 2, 0, 3]
    assert 150 < sum(counts[number] for number in range(8, 408)) < 250 and max(counts.values()) == 3
    again = mix(shared_api, {"dataset_id": id, "weight_column": "w"})
    assert again.json()["sha256"] == answer.json()["sha256"]


def test_a_repeated_request_makes_one_mix(shared_api: ApiServer) -> None:
    body = {"name": "mixed", "sources": [{"dataset_id": upload_rows(shared_api, *texts("a", 3))}]}
    headers = {"Idempotency-Key": "mixed-once"}
    first, second = (shared_api.client.post("/v1/datasets/mix", json=body, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    other = shared_api.client.post("/v1/datasets/mix", json=body | {"seed": 3}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("sources", "field", "code"),
    [
        ([], "sources", "too_short"),
        ([{"dataset_id": "ds_none"}], "sources.0.dataset_id", "dataset_not_found"),
        ([{"dataset_id": "TEXT"}, {"dataset_id": "CHAT"}], "sources.1.dataset_id", "format_mismatch"),
        ([{"dataset_id": "TEXT", "weight": 1}, {"dataset_id": "TEXT"}], "", "missing_weights"),
        ([{"dataset_id": "TEXT", "weight": 0}], "sources.0.weight", "greater_than"),
        ([{"dataset_id": "TEXT", "weight": 1e400}], None, None),
        ([{"dataset_id": "TEXT", "weight_column": "none"}], "sources.0.weight_column", "unknown_column"),
        ([{"dataset_id": "TEXT", "weight_column": "text"}], "sources.0.weight_column", "bad_weight"),
        ([{"dataset_id": "TEXT", "weight_column": "zero"}], "sources.0.weight_column", "no_rows"),
        ([{"dataset_id": "TEXT", "weight_column": "huge"}], "sources.0.weight_column", "bad_weight"),
        ([{"dataset_id": "TEXT", "weight_column": "no_float"}], "sources.0.weight_column", "bad_weight"),
        (
            [{"dataset_id": "TEXT", "weight": 1e6}, {"dataset_id": "TEXT", "weight": 1e-6}],
            "sources",
            "too_many_rows",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_invalid_mix_is_refused(
    shared_api: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    sources: list[dict[str, Any]],
    field: str | None,
    code: str | None,
) -> None:
    monkeypatch.setattr("app.datasets.mix.MOST_ROWS", 5000)
    ids = {
        "TEXT": upload_rows(shared_api, {"text": "a", "zero": 0, "huge": 1e300, "no_float": 10**400}),
        "CHAT": upload_rows(
            shared_api, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        ),
    }
    request_sources = [{**one, "dataset_id": ids.get(one["dataset_id"], one["dataset_id"])} for one in sources]
    raw = json.dumps({"name": "mixed", "sources": request_sources, "stopping_strategy": "all_exhausted"})
    answer = shared_api.client.post("/v1/datasets/mix", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    if code is not None:
        assert (field, code) in [(error["field"], error["code"]) for error in answer.json()["errors"]], answer.text


def test_the_sources_together_are_limited(shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row and its copies take memory, and each column is in the database: a client decides about both."""
    monkeypatch.setattr("app.datasets.mix.MOST_ROWS", 100)
    monkeypatch.setattr("app.datasets.mix.MOST_COLUMNS", 3)
    source = {"dataset_id": upload_rows(shared_api, {"text": "a", "w": 60}), "weight_column": "w"}
    for more in ({}, {"weight": 1}):
        assert mix(shared_api, source | more).status_code == 201
        answer = mix(shared_api, source | more, source | more)
        assert answer.status_code == 422, answer.text
        assert [(error["field"], error["code"]) for error in answer.json()["errors"]] == [("sources", "too_many_rows")]
    wide_sources = [{"dataset_id": upload_rows(shared_api, {"text": "a", name: 1, f"{name}2": 1})} for name in "ab"]
    assert mix(shared_api, wide_sources[0], wide_sources[0]).status_code == 201
    answer = mix(shared_api, *wide_sources)
    assert answer.status_code == 422, answer.text
    assert [(error["field"], error["code"]) for error in answer.json()["errors"]] == [("sources", "too_many_columns")]


def test_number_of_mixes_written_at_a_time_is_limited(shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = threading.BoundedSemaphore(1)
    monkeypatch.setattr("app.datasets.mix._slots", slots)
    monkeypatch.setattr("app.datasets.importer.SLOT_TIMEOUT_SECONDS", 0.2)
    source = {"dataset_id": upload_rows(shared_api, *texts("a", 3))}
    with slots:
        answer = mix(shared_api, source)
    assert (answer.status_code, answer.json()["code"]) == (503, "too_many_uploads")
    assert int(answer.headers["Retry-After"]) > 0
    assert mix(shared_api, source).status_code == 201
