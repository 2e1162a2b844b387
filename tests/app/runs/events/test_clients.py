"""What people read streams with reads a run to its end: curl, httpie, httpx-sse, sseclient-py, Node's eventsource."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sseclient
from httpx_sse import connect_sse
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.factories import Trainer, make_dataset, make_run
from tests.nodes import ROOT
from tests.server import ApiServer

LINES = 60
NODE_MODULES = Path(sys.prefix) / "node" / "node_modules"
SECONDS = 60


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


def _command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _curl(url: str, key: str) -> list[int]:
    answer = _command("curl", "-sSN", "--fail-with-body", "-H", f"Authorization: Bearer {key}", url)
    return [int(id) for id in re.findall(r"^id: (\d+)$", answer, flags=re.MULTILINE)]


def _httpie(url: str, key: str) -> list[int]:
    command = (
        sys.executable,
        "-m",
        "httpie",
        "--stream",
        "--ignore-stdin",
        "--body",
        "--check-status",
        "--pretty=none",
    )
    answer = _command(*command, "GET", url, f"Authorization:Bearer {key}")
    return [int(id) for id in re.findall(r"^id: (\d+)$", answer, flags=re.MULTILINE)]


def _httpx_sse(url: str, key: str) -> list[int]:
    with (
        httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS) as client,
        connect_sse(client, "GET", url) as source,
    ):
        return [int(event.id) for event in source.iter_sse() if event.json()]


def _sseclient(url: str, key: str) -> list[int]:
    with httpx.stream("GET", url, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS) as answer:
        return [int(event.id) for event in sseclient.SSEClient(answer.iter_bytes()).events() if json.loads(event.data)]


def _eventsource(url: str, key: str) -> list[int]:
    assert NODE_MODULES.is_dir(), "`make test-all` installs Node and its eventsource"
    node = Path(sys.prefix) / "bin" / "node"
    *ids, closed = _command(str(node), str(ROOT / "tests" / "app" / "stream.mjs"), url, key, str(NODE_MODULES)).split(
        "\n"
    )[:-1]
    assert closed == "closed 204"
    return [int(id) for id in ids]


@pytest.mark.parametrize(
    "read",
    [_curl, _httpie, _httpx_sse, _sseclient, pytest.param(_eventsource, marks=pytest.mark.full)],
    ids=lambda read: read.__name__,
)
def test_reads_a_run_from_its_first_event_to_its_end(
    shared_api: ApiServer, engine: Engine, read: Callable[[str, str], list[int]]
) -> None:
    trainer = Trainer(engine, make_run(shared_api.client, make_dataset(engine))["id"]).begin()

    def train() -> None:
        for number in range(LINES):
            trainer.log(f"line {number}: ü \u2028 \\n data: id: 7")
            trainer.metric(number, loss=1.0)
        trainer.complete()

    training = threading.Thread(target=train)
    training.start()
    try:
        seen = read(f"{shared_api.url}/v1/runs/{trainer.run_id}/events", shared_api.key)
    finally:
        training.join()
    last = shared_api.client.get(f"/v1/runs/{trainer.run_id}").json()["last_seq"]
    assert last > 2 * LINES
    assert seen == list(range(1, last + 1))
