"""Promises about datasets of the hub, against a server on loopback that speaks the few calls which are used."""

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from app.api.errors import ApiError
from app.config import Settings
from app.datasets.hub import HubFile, download_file, open_client
from tests.app import hub_server
from tests.app.hub_server import COMMIT, Hub
from tests.app.uploads import lines, parquet
from tests.server import ApiServer, ThreadServer

QA = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(5)]
WORDS = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def _import(api: ApiServer, **body: Any) -> Any:
    return api.client.post("/v1/datasets", json={"hub": "ada/words", **body})


def _rows(api: ApiServer, answer: Any) -> list[Any]:
    assert answer.status_code == 201, answer.text
    content = api.client.get(f"/v1/datasets/{answer.json()['id']}/content").content
    return [json.loads(line) for line in content.splitlines()]


def test_the_files_of_a_split_become_one_dataset(shared_api: ApiServer, hub: Hub) -> None:
    hub.serve(
        {
            "data/train-00000-of-00002.parquet": parquet(QA[:2]),
            "data/train-00001-of-00002.parquet": parquet(QA[2:]),
            "data/test-00000-of-00001.parquet": parquet(QA[:1]),
            "README.md": b"# train",
        }
    )
    columns = {"prompt": "question", "completion": "answer"}
    answer = _import(shared_api, columns=columns)
    assert _rows(shared_api, answer) == [{"prompt": row["question"], "completion": row["answer"]} for row in QA]
    assert (answer.json()["name"], answer.json()["format"]) == ("ada/words train", "prompt_completion")
    assert sum("resolve" in path for path in hub.asked) == 2
    held_out = _import(shared_api, split="test", columns=columns, name="held out")
    assert held_out.json()["rows"] == 1 and held_out.json()["name"] == "held out"


@pytest.mark.parametrize("path", ["train.jsonl", "train.json", "train.csv", "train/part-1.jsonl", "main/train.jsonl",
                                  "words_train.jsonl", "all.jsonl"])  # fmt: skip
def test_files_of_other_types_and_folders_are_imported(shared_api: ApiServer, hub: Hub, path: str) -> None:
    text = {"text": "a b"}
    content = {"json": json.dumps([text]).encode(), "csv": b"text\na b\n"}.get(path.rpartition(".")[2], lines(text))
    hub.serve({path: content, "training_notes.txt": b"x"})
    assert _rows(shared_api, _import(shared_api)) == [text]


def test_compressed_files_are_read_where_there_are_no_others(shared_api: ApiServer, hub: Hub) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    hub.serve(
        {f"data/train-{number}.jsonl.gz": gzip.compress(lines(row)) for number, row in enumerate(rows)}
        | {"data/test.jsonl.gz": gzip.compress(lines(rows[0])), "data/valid.jsonl.gz": lines(rows[0])}
    )
    answer = _import(shared_api)
    assert _rows(shared_api, answer) == rows and answer.json()["source"]["gzip"] is True
    assert _rows(shared_api, _import(shared_api, split="valid")) == rows[:1], "the hub may name a plain file so"
    hub.serve({"train.csv.gz": gzip.compress(b"text\nz\n"), "train.csv": b"text\na\n"})
    assert _rows(shared_api, _import(shared_api)) == rows[:1], "the same rows must not be read twice"
    hub.serve({"train.jsonl.gz": gzip.compress(lines(rows[0]) * 100)[:-9]})
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "unreadable_gzip")


def test_a_split_is_not_taken_for_another_that_begins_like_it(shared_api: ApiServer, hub: Hub) -> None:
    hub.serve({"data/train-0.jsonl": lines({"text": "a"}), "data/train_sft-0.jsonl": lines({"text": "b"})})
    assert _rows(shared_api, _import(shared_api)) == [{"text": "a"}]
    assert _rows(shared_api, _import(shared_api, split="train_sft")) == [{"text": "b"}]


def test_a_subset_is_asked_for_where_there_are_several(shared_api: ApiServer, hub: Hub) -> None:
    hub.serve({"main/train.jsonl": lines({"text": "a"}), "socratic/train.jsonl": lines({"text": "b"})})
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (422, "subset_needed")
    assert "`main`, `socratic`" in answer.json()["detail"]
    assert _rows(shared_api, _import(shared_api, subset="socratic")) == [{"text": "b"}]


def test_tokens_are_counted_with_a_tokenizer_of_the_hub(shared_api: ApiServer, hub: Hub) -> None:
    hub.serve({"train.jsonl": lines({"text": "a"})})
    assert _import(shared_api, tokenizer="ada/model").json()["code"] == "tokenizer_not_found"
    hub.files["/ada/model/resolve/main/tokenizer.json"] = WORDS.encode()
    assert _import(shared_api, tokenizer="ada/model").json()["token_statistics"]["tokenizer"] == "ada/model"


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({"split": "validation"}, "split", "split_not_found"),
        ({"revision": "v9"}, "hub", "hub_dataset_not_found"),
        ({"hub": "ada/none"}, "hub", "hub_dataset_not_found"),
        ({"hub": "../../x"}, "hub", "string_pattern_mismatch"),
        ({"hub": "ada/words/../x"}, "hub", "string_pattern_mismatch"),
        ({"split": "../x"}, "split", "string_pattern_mismatch"),
        ({"file": "x"}, "file", "extra_forbidden"),
        ({"columns": {}}, "columns", "wrong_type"),
        ({"format": "chat"}, "train.jsonl line 1", "missing_column"),
    ],
)
def test_unavailable_hub_dataset_is_refused_with_the_reason(
    shared_api: ApiServer, hub: Hub, body: dict[str, Any], field: str, code: str
) -> None:
    hub.serve({"train.jsonl": lines({"text": "a"}), "train-2.jsonl": lines({"text": "a"})})
    answer = _import(shared_api, **body)
    assert answer.status_code == 422, answer.text
    assert (field, code) in [(it["field"], it["code"]) for it in answer.json()["errors"]]


@pytest.mark.parametrize("listing", [b"<html>", b"[]", b"{}", b'{"sha": "../..", "siblings": []}', b"[" * 100_000])
def test_a_hub_that_answers_nonsense_is_502(shared_api: ApiServer, hub: Hub, listing: bytes) -> None:
    hub.files["/api/datasets/ada/words/revision/main"] = listing
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (502, "hub_unusable")


def test_a_gated_dataset_names_the_secret_that_opens_it(shared_api: ApiServer, hub: Hub) -> None:
    """Its list of files is open to everybody, its files are not."""
    hub.serve({"train.jsonl": lines({"text": "a"})})
    del hub.files[f"/datasets/ada/words/resolve/{COMMIT}/train.jsonl"]
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (422, "hub_dataset_not_found")
    assert "hf_token" in answer.json()["detail"] + str(answer.json()["errors"])


def test_a_split_of_too_many_files_is_refused_and_never_cut(
    shared_api: ApiServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.datasets.hub._MAX_FILES", 3)
    hub.serve({f"audio/{number}.jsonl": b"" for number in range(9)} | {"train.jsonl": lines({"text": "a"})})
    assert _rows(shared_api, _import(shared_api)) == [{"text": "a"}]
    hub.serve({f"train-{number}.jsonl": lines({"text": "a"}) for number in range(4)})
    assert _import(shared_api).json()["code"] == "too_many_files"


def test_a_hub_that_is_away_is_502(shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (502, "hub_unusable")


def test_a_redirect_into_the_private_network_is_not_read(shared_api: ApiServer, hub: Hub) -> None:
    """The hub itself may be anywhere, as its operator says; where it sends us to may not."""
    hub.serve({"train.jsonl": lines({"text": "a"})})
    path = f"/datasets/ada/words/resolve/{COMMIT}/train.jsonl"
    elsewhere = hub.url.replace("127.0.0.1", "localhost")
    hub.files["/secret"] = lines({"text": "the secret"})
    hub.redirects[path] = f"{elsewhere}/secret"
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (502, "hub_unusable")
    assert "private network" in answer.json()["detail"]
    assert "/secret" not in hub.asked
    hub.redirects[path] = "/secret"
    assert _rows(shared_api, _import(shared_api)) == [{"text": "the secret"}]


@pytest.mark.parametrize("coding", ["gzip, gzip", "GZIP", "identity, deflate"])
def test_a_compressed_answer_is_not_expanded(shared_api: ApiServer, hub: Hub, coding: str) -> None:
    """A kilobyte of it may become gigabytes."""
    hub.serve({"train.jsonl": gzip.compress(gzip.compress(bytes(2**24)))})
    hub.headers["Content-Encoding"] = coding
    answer = _import(shared_api)
    assert (answer.status_code, answer.json()["code"]) == (502, "hub_unusable")
    assert "compressed" in answer.json()["detail"]


def test_the_body_of_a_redirect_is_not_read(shared_api: ApiServer, hub: Hub) -> None:
    hub.serve({"train.jsonl": lines({"text": "t"})})
    path = f"/datasets/ada/words/resolve/{COMMIT}/train.jsonl"
    hub.files["/blob"] = hub.files.pop(path)
    hub.redirects[path] = "/blob"
    hub.redirect_megabytes = 64
    assert _rows(shared_api, _import(shared_api)) == [{"text": "t"}]
    assert hub.sent_megabytes < 64


def test_the_token_goes_to_the_hub_and_nowhere_else(api: ApiServer, hub: Hub) -> None:
    """A redirect to another port of the same machine is another origin."""
    hub.serve({"train.jsonl": lines({"text": "a"})})
    path = f"/datasets/ada/words/resolve/{COMMIT}/train.jsonl"
    assert _rows(api, _import(api)) == [{"text": "a"}]
    assert set(hub.tokens.values()) == {None}
    api.client.put("/v1/secrets/hf_token", json={"value": "hf_" + "x" * 34}).raise_for_status()
    with Hub() as elsewhere:
        elsewhere.files["/blob"] = lines({"text": "b"})
        threading.Thread(target=elsewhere.serve_forever).start()
        hub.redirects[path] = f"{elsewhere.url}/blob"
        assert _rows(api, _import(api)) == [{"text": "b"}]
        elsewhere.shutdown()
    assert hub.tokens[path] == "Bearer hf_" + "x" * 34
    assert elsewhere.tokens == {"/blob": None}


def test_without_leave_of_the_operator_no_one_asks_the_hub(settings: Settings, hub: Hub) -> None:
    with ThreadServer(settings.model_copy(update={"allow_hub": False})) as api:
        answer = _import(api)
        assert (answer.status_code, answer.json()["code"]) == (422, "hub_not_allowed")
    assert hub.asked == []


def test_hub_files_larger_than_an_upload_are_413(settings: Settings, hub: Hub) -> None:
    hub.serve({"train.jsonl": lines({"text": "x" * 1000}) * 200})
    with ThreadServer(settings.model_copy(update={"max_upload_bytes": 100_000})) as api:
        answer = _import(api)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert list(settings.storage_root.glob("staging/*")) == []


async def test_a_name_that_changes_its_address_in_between_is_sent_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner answers the first question with an address of the internet, and the second with one of this machine."""
    real, lookups, reached = socket.getaddrinfo, [], []

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("rebound.example", b"rebound.example"):
            return real(host, port, *args, **kwargs)
        lookups.append(host)
        return real("8.8.8.8" if len(lookups) == 1 else "127.0.0.1", port, *args, **kwargs)

    connect = anyio.connect_tcp

    async def connect_tcp(remote_host: str, *args: Any, **kwargs: Any) -> Any:
        reached.append(remote_host)
        if remote_host == "8.8.8.8":
            raise OSError("no way out of here")
        return await connect(remote_host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(anyio, "connect_tcp", connect_tcp)
    path = f"/datasets/ada/words/resolve/{COMMIT}/train.jsonl"
    hub.redirects[path] = hub.url.replace("127.0.0.1", "rebound.example") + "/secret"
    with pytest.raises(ApiError, match="could not be used"):
        await _bytes(path)
    assert reached == ["127.0.0.1", "8.8.8.8"]
    assert hub.asked == [path]


async def _bytes(path: str) -> bytes:
    async with open_client() as opened:
        return b"".join([piece async for piece in download_file(opened, HubFile("train.jsonl", path))])


@pytest.mark.parametrize("environment", [
    {"NO_PROXY": "example.org"},
    {"NO_PROXY": "localhost,127.0.0.1", "HTTP_PROXY": "http://127.0.0.1:9"},
    {"NO_PROXY": "*", "ALL_PROXY": "http://127.0.0.1:9"},
])  # fmt: skip
async def test_what_goes_past_the_proxy_is_judged_as_without_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hub.files["/secret"] = b"the secret"
    hub.redirects["/file"] = hub.url.replace("127.0.0.1", "localhost") + "/secret"
    with pytest.raises(ApiError, match="private network"):
        await _bytes("/file")
    assert hub.asked == ["/file"]


async def test_a_proxy_is_asked_where_the_environment_names_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides who can be reached: nothing is looked up here, as names of the internet may not be known."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removeprefix("http://"))
        threading.Thread(target=proxy.serve_forever, args=(0.02,)).start()
        proxy.files["http://elsewhere.invalid/blob"] = b"the blob"
        hub.redirects["/file"] = "http://elsewhere.invalid/blob"
        assert await _bytes("/file") == b"the blob"
        proxy.shutdown()
    assert hub.asked == ["/file"]


async def test_clients_share_the_authorities_which_take_long_to_read() -> None:
    began = time.process_time()
    for _ in range(100):
        async with open_client():
            pass
    assert time.process_time() - began < 1.5, "30 ms for each, in which the event loop serves no request"
