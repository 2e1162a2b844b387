"""`anneal up` on a disk that fills up: nothing ends, what would store something is refused, and it goes on."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anneal.contracts.run_status import TERMINAL
from tests.app.standalone.test_supervisor import Running
from tests.factories import make_run
from tests.small_disk import fill, small_disk
from tests.waiting import eventually

_MIB = 2**20
_RESERVE_BYTES = 150 * _MIB


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Running]:
    with small_disk(tmp_path / "disk", 360 * _MIB) as disk:
        running = Running(disk / "home", ANNEAL_DISK_RESERVE_BYTES=str(_RESERVE_BYTES))
        try:
            yield running.until_ready()
        finally:
            running.end()


def upload(client: httpx.Client, size: int) -> httpx.Response:
    line = json.dumps({"text": "x" * 999}).encode() + b"\n"
    content = line * (size // len(line))
    return client.post("/v1/datasets", files={"file": ("d.jsonl", content)})


@pytest.mark.needs("small disk")
def test_a_disk_that_fills_up_ends_neither_the_service_nor_a_run_and_all_go_on_once_there_is_room(up: Running) -> None:
    disk = up.home.parent
    with up.client as client:
        dataset = upload(client, _MIB).json()["id"]
        up.until_worker_is_online()
        printing = {"steps": 1_000_000, "step_seconds": 0.02, "log_lines_per_step": 20, "log_line": "x" * 2000}
        # The simulated trainer fails when a checkpoint finds no room, unlike a real one: none is due.
        run = make_run(client, dataset, config={"save_steps": 1_000_000, "extra": printing})["id"]
        eventually(lambda: client.get(f"/v1/runs/{run}").json()["current_step"], timeout=60)

        filler = fill(disk, free=_RESERVE_BYTES + 2 * _MIB)
        refused = upload(client, 8 * _MIB)
        assert (refused.status_code, refused.json()["code"]) == (507, "disk_full"), refused.text
        assert "ANNEAL_DISK_RESERVE_BYTES" in refused.json()["detail"]
        assert client.post("/v1/experiments", json={"name": "small"}).status_code == 201, "there is room for a row"
        filler.unlink()
        filler = fill(disk, free=_RESERVE_BYTES - 40 * _MIB)  # PostgreSQL takes and returns 16 MiB at a time

        def lines() -> str:
            return client.get(f"/v1/runs/{run}/logs", params={"tail": 50}).text

        eventually(lambda: "printed lines are not stored" in lines())

        def newest_printed() -> int:
            answer = client.get(f"/v1/runs/{run}/logs/lines", params={"limit": 1, "stream": "stdout"})
            return int(answer.json()["data"][-1]["seq"])

        newest = newest_printed()
        at = client.get(f"/v1/runs/{run}").json()["current_step"]
        eventually(lambda: client.get(f"/v1/runs/{run}").json()["current_step"] > at + 100, timeout=60)
        assert newest_printed() == newest, "2000 lines were printed in these steps"

        filler.unlink()
        filler = fill(disk)
        eventually(lambda: "are given back" in up.said or (up.home / "postgres" / "reserve").exists() is False)
        before = up.connection["pids"]
        os.kill(before["api"], signal.SIGKILL)
        eventually(up.answers, timeout=60)
        for call in (
            lambda: client.post("/v1/experiments", json={"name": "one more"}),
            lambda: upload(client, 1000),
            lambda: client.patch(f"/v1/runs/{run}", json={"name": "x"}),
        ):
            answer = call()
            assert (answer.status_code, answer.json()["code"]) == (507, "disk_full"), answer.text
        assert client.get(f"/v1/runs/{run}").json()["status"] == "running"
        assert client.delete(f"/v1/datasets/{upload_of_nobody(client)}").status_code == 404
        assert up.process.poll() is None

        filler.unlink()
        eventually(lambda: client.post("/v1/experiments", json={"name": "again"}).status_code == 201)
        eventually(lambda: up.connection["pids"].get("api", before["api"]) != before["api"])
        assert set(up.connection["pids"]) == {"up", "postgres", "valkey", "api", "worker"}
        stopped: dict[str, Any] = client.post(f"/v1/runs/{run}/stop").json()
        assert stopped["id"] == run
        eventually(lambda: client.get(f"/v1/runs/{run}").json()["status"] in TERMINAL, timeout=60)
        assert client.get(f"/v1/runs/{run}").json()["status"] == "cancelled"
    assert up.process.poll() is None and "Traceback" not in up.said


def upload_of_nobody(client: httpx.Client) -> str:
    """Return the id of a dataset that does not exist."""
    (known,) = (dataset["id"] for dataset in client.get("/v1/datasets").json()["data"])
    return f"{known[:-4]}0000"
