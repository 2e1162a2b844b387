"""Promises about lists."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from app.config import Settings
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def _make(api: ApiServer, count: int) -> list[str]:
    return [api.client.post("/v1/experiments", json={"name": f"e{n}"}).json()["id"] for n in range(count)]


def test_pages_are_newest_first_and_join_without_gap_or_overlap(api: ApiServer) -> None:
    ids = _make(api, 7)
    seen: list[str] = []
    query = "limit=3"
    while True:
        page = api.client.get(f"/v1/experiments?{query}").json()
        assert page.keys() == {"data", "has_more"}
        seen += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        query = f"limit=3&after={seen[-1]}"
    assert seen == ids[::-1]


def test_a_page_that_is_just_full_is_the_last(api: ApiServer) -> None:
    _make(api, 3)
    assert api.client.get("/v1/experiments?limit=3").json()["has_more"] is False


def test_a_page_has_fifty_unless_asked_otherwise(api: ApiServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: _make(api, 13), range(4)))
    page = api.client.get("/v1/experiments").json()
    assert (len(page["data"]), page["has_more"]) == (50, True)


def test_new_items_do_not_shift_the_pages_that_follow(api: ApiServer) -> None:
    ids = _make(api, 4)
    first = api.client.get("/v1/experiments?limit=2").json()["data"]
    _make(api, 3)
    second = api.client.get(f"/v1/experiments?limit=2&after={first[-1]['id']}").json()["data"]
    assert [item["id"] for item in first + second] == ids[::-1]


def test_behind_the_last_item_there_is_an_empty_page(api: ApiServer) -> None:
    ids = _make(api, 1)
    assert api.client.get(f"/v1/experiments?after={ids[0]}").json() == {"data": [], "has_more": False}


class TestSearch:
    @pytest.fixture(scope="class")
    def names(self) -> dict[str, str]:
        return {"Grüße 100%": "ä", "under_score": 'say "x"', 'back\\slash "quoted"': "b", "plain": "c"}

    @pytest.mark.parametrize(
        ("text", "matches"),
        [
            ("GRÜSSE", []),
            ("grüße", ["Grüße 100%"]),
            ("%", ["Grüße 100%"]),
            ("_", ["under_score"]),
            ('"', ['back\\slash "quoted"', "under_score"]),
            ("\\", ['back\\slash "quoted"']),
            ("Ä", ["Grüße 100%"]),
            ('Y "X', ["under_score"]),
            ('", "', []),
            ("[", []),
            (", ", []),
            ("nothing has this", []),
        ],
    )
    def test_search_matches_part_of_name_or_tag_literally(
        self, api: ApiServer, names: dict[str, str], text: str, matches: list[str]
    ) -> None:
        for name, tag in names.items():
            api.client.post("/v1/experiments", json={"name": name, "tags": [tag, "common"]})
        page = api.client.get("/v1/experiments", params={"search": text}).json()["data"]
        assert sorted(item["name"] for item in page) == sorted(matches)

    def test_search_matches_beginning_of_an_id(self, api: ApiServer) -> None:
        ids = _make(api, 3)
        for text in (ids[1], ids[1].removeprefix("exp_")):
            page = api.client.get("/v1/experiments", params={"search": text}).json()["data"]
            assert [item["id"] for item in page] == [ids[1]]

    def test_search_works_the_same_for_runs_and_datasets(self, api: ApiServer) -> None:
        rows = b'{"text": "a"}\n'
        stored = api.client.post("/v1/datasets", files={"file": ("Some rows.jsonl", rows)}).json()
        dataset = {"dataset_id": stored["id"], "backend": "fake"}
        run = {**dataset, "config": {"base_model": "any"}, "name": "Some run", "tags": ["Nightly"]}
        created = api.client.post("/v1/runs", json=run).json()
        for path, text, expected in (
            ("/v1/datasets", "me RO", stored["id"]),
            ("/v1/runs", "me RU", created["id"]),
            ("/v1/runs", "nIGHT", created["id"]),
            ("/v1/runs", created["id"][4:], created["id"]),
        ):
            assert [item["id"] for item in api.client.get(path, params={"search": text}).json()["data"]] == [expected]
            assert api.client.get(path, params={"search": "x" + text}).json()["data"] == []
