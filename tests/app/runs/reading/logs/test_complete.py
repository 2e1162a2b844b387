"""Promises about complete logs: served whole, searched where the stream left out lines, and never trusted."""

import gzip
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from anneal.client.client import Anneal
from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.tables.runs import Run
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer
from worker.ingest.log_file import LogFile

NOTE = {"line": "… 990 lines left out", "stream": "stderr", "level": "warning", "left_out": 990}


@pytest.fixture
def settings(shared_api: ApiServer) -> Settings:
    """Settings of the shared API, so that `engine` is on its database."""
    return shared_api.settings


@pytest.fixture
def trainer(emptied_api: ApiServer, engine: Engine) -> Trainer:
    return Trainer(engine, make_run(emptied_api.client, make_dataset(engine))["id"]).begin()


@pytest.fixture
def folder(trainer: Trainer, settings: Settings) -> Path:
    """Folder of the attempt."""
    folder = Storage(settings).attempt_dir(trainer.run_id, trainer.attempt)
    folder.mkdir(parents=True)
    return folder


def write_log(folder: Path, texts: list[str], name: str = "log", **values: str) -> LogFile:
    file = LogFile(folder, name, 0, lambda problem: pytest.fail(problem))
    for text in texts:
        file.add_line({"line": text, "stream": "stdout", "level": "info", **values}, time.time())
    file.flush()
    return file


def texts_of(api: ApiServer, trainer: Trainer, **query: Any) -> list[str]:
    answer = api.client.get(f"/v1/runs/{trainer.run_id}/logs/complete", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return [line.split(" ", 3)[-1] for line in answer.text.splitlines()]


def search(api: ApiServer, trainer: Trainer, **query: Any) -> dict[str, Any]:
    answer = api.client.get(f"/v1/runs/{trainer.run_id}/logs/search", params=query)
    assert answer.status_code == 200, answer.text
    hits: dict[str, Any] = answer.json()
    return hits


def test_complete_log_is_served_while_the_run_trains_and_by_the_client(
    emptied_api: ApiServer, trainer: Trainer, folder: Path
) -> None:
    texts = [f"line {number} ä" for number in range(30_000)]
    file = write_log(folder, texts)
    assert texts_of(emptied_api, trainer) == texts_of(emptied_api, trainer, attempt=1) == texts
    assert texts_of(emptied_api, trainer, grep="line 2999") == [text for text in texts if "line 2999" in text]
    assert texts_of(emptied_api, trainer, grep="stdout") == [], "only the text of a line is searched"
    file.close()
    with Anneal(emptied_api.url, emptied_api.key) as client:
        assert [line.split(" ", 3)[-1] for line in client.runs.complete_log(trainer.run_id)] == texts
    raw = emptied_api.client.get(f"/v1/runs/{trainer.run_id}/attempts/1/artifacts/log.txt.gz")
    assert len(gzip.decompress(raw.content).splitlines()) == len(texts)


def test_files_of_other_hosts_follow_and_each_older_one_comes_first(
    emptied_api: ApiServer, trainer: Trainer, folder: Path
) -> None:
    write_log(folder, ["oldest"]).close()
    (folder / "log.txt.gz").rename(folder / "log.1.txt.gz")
    write_log(folder, ["newest"])
    write_log(folder, ["rank 16"], "log-rank-16")
    write_log(folder, ["rank 8"], "log-rank-8")
    assert texts_of(emptied_api, trainer) == ["oldest", "newest", "rank 8", "rank 16"]


def test_a_search_looks_into_it_only_where_the_stream_left_out_lines(
    emptied_api: ApiServer, trainer: Trainer, folder: Path
) -> None:
    write_log(folder, [*(f"line {number}" for number in range(1000)), "loss is nan here"])
    write_log(folder, ["loss is nan there"], "log-rank-8", stream="stderr", level="error")
    trainer.log("line 0")
    assert search(emptied_api, trainer, q="nan") == {"data": [], "has_more": False, "complete": []}
    trainer.events("log", NOTE)
    (complete,) = search(emptied_api, trainer, q="nan")["complete"]
    assert (complete["attempt"], complete["left_out"], complete["matches"], complete["problem"]) == (1, 990, 2, None)
    assert [hit["line"] for hit in complete["data"]] == ["loss is nan here", "loss is nan there"]
    assert emptied_api.client.get(complete["complete_log"], params={"grep": "nan"}).status_code == 200
    (errors,) = search(emptied_api, trainer, q="nan", level="warning", attempt=1)["complete"]
    assert [hit["line"] for hit in errors["data"]] == ["loss is nan there"]
    (printed,) = search(emptied_api, trainer, q="nan", stream="stdout")["complete"]
    assert [hit["line"] for hit in printed["data"]] == ["loss is nan here"]
    assert search(emptied_api, trainer, q="nan", attempt=2)["complete"] == []
    (many,) = search(emptied_api, trainer, q="line")["complete"]
    assert many["matches"] == 1000 and [hit["line"] for hit in many["data"]] == [f"line {n}" for n in range(900, 1000)]


def test_a_missing_one_says_so(emptied_api: ApiServer, trainer: Trainer, folder: Path) -> None:
    trainer.events("log", NOTE)
    path = f"/v1/runs/{trainer.run_id}/logs/complete"
    for query in ({}, {"attempt": 1}):
        answer = emptied_api.client.get(path, params=query)
        assert (answer.status_code, answer.json()["code"]) == (404, "complete_log_missing")
    assert emptied_api.client.get(path, params={"attempt": 2}).json()["code"] == "attempt_not_found"
    assert emptied_api.client.get(f"/v1/runs/{new_id('run')}/logs/complete").json()["code"] == "run_not_found"
    assert emptied_api.client.get(path, params={"attempt": 0}).status_code == 422
    (complete,) = search(emptied_api, trainer, q="x")["complete"]
    assert complete["matches"] is None and "no complete log" in complete["problem"]


def test_search_in_many_attempts_reads_and_returns_no_more_than_in_one(
    emptied_api: ApiServer, engine: Engine, trainer: Trainer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.reading.logs.complete.MOST_SEARCHED_BYTES", 2**20)
    for attempt, count in ((1, 10), (2, 10_000), (3, 80)):
        values = {"attempt": attempt, "lease_epoch": attempt, "attempt_event_count": 0}
        with engine.begin() as connection:
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(values))
        trainer.attempt, trainer.lease_epoch, trainer._sent = attempt, attempt, 0
        trainer.events("log", NOTE)
        folder = Storage(settings).attempt_dir(trainer.run_id, attempt)
        folder.mkdir(parents=True)
        write_log(folder, [f"nan {number} {'x' * 200}" for number in range(count)]).close()
    first, second, third = search(emptied_api, trainer, q="nan")["complete"]
    assert third["matches"] == len(third["data"]) == 80 and third["problem"] is None
    assert second["matches"] > len(second["data"]) == 20 and "more than 1 MiB" in second["problem"]
    assert first["matches"] is None and "later attempts" in first["problem"]
    (alone,) = search(emptied_api, trainer, q="nan", attempt=1)["complete"]
    assert alone["matches"] == len(alone["data"]) == 10


def test_whatever_a_trainer_puts_in_its_place_neither_fails_a_search_nor_leads_elsewhere(
    emptied_api: ApiServer, trainer: Trainer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.reading.logs.complete.MOST_SEARCHED_BYTES", 32 * 2**20)
    trainer.events("log", NOTE)
    path = folder / "log.txt.gz"
    path.write_bytes(gzip.compress(b"x\n\xff\nwithout a head nan\n" + b"y" * 200_000 + b" nan\n") + b"damage")
    (complete,) = search(emptied_api, trainer, q="nan")["complete"]
    assert complete["matches"] == 2 and "damaged" in complete["problem"]
    path.write_bytes(gzip.compress(b"0001-01-01T00:00:00+23:00 stdout info nan\n"))
    (complete,) = search(emptied_api, trainer, q="nan")["complete"]
    assert complete["matches"] == 1 and complete["problem"] is None, "a time that no clock shows"
    for endless in (gzip.compress(b"nan\n") * 2, zlib.compressobj(9, 8, 31).flush(2) + b"\0\0\0\xff\xff" * 2**18):
        path.write_bytes(endless)
        (complete,) = search(emptied_api, trainer, q="nan")["complete"]
        assert "damaged" in complete["problem"]
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        for _ in range(40):
            file.write(compressor.compress(bytes(2**20)))
    (complete,) = search(emptied_api, trainer, q="nan")["complete"]
    assert complete["matches"] == 0 and "more than 32 MiB" in complete["problem"]
    path.unlink()
    (tmp_path / "secret.gz").write_bytes(gzip.compress(b"a secret\n"))
    path.symlink_to(tmp_path / "secret.gz")
    assert emptied_api.client.get(f"/v1/runs/{trainer.run_id}/logs/complete").status_code == 404
