"""What API and workers log: lines that a program or a person can read, with the ids that they belong to, no secrets."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from structlog.contextvars import bound_contextvars, get_contextvars

from app.config import Settings
from app.infra.ids import new_id
from app.infra.logs.log_setup import run_context
from tests import programs
from tests.nodes import ROOT
from tests.server import ApiServer
from tests.waiting import eventually


class LoggingServer(ApiServer):
    """`anneal api` as users start it, its log in a file."""

    def __init__(self, settings: Settings, log: Path, **variables: str) -> None:
        super().__init__(settings)
        self.log = log
        self._variables = variables

    def start(self) -> None:
        environment = self.settings.child_environment() | self._variables
        self.process = programs.start("app.cli.main", ["api", "--port", str(self.port)], environment, self.log)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0

    def records(self) -> list[dict[str, Any]]:
        """What it logged so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def record_of(self, answer: httpx.Response) -> dict[str, Any]:
        """The one line of this request."""
        mine = {"logger": "app.api.middleware.request_metrics", "request_id": answer.headers["x-request-id"]}
        matching = eventually(lambda: [one for one in self.records() if mine.items() <= one.items()])
        assert len(matching) == 1
        return matching[0]


@pytest.fixture
def api(settings: Settings, tmp_path: Path) -> Iterator[LoggingServer]:
    with LoggingServer(settings, tmp_path / "api.log") as server:
        yield server


def test_every_request_has_one_line_with_its_ids_and_without_what_it_asked_for(api: LoggingServer) -> None:
    run = new_id("run")
    leaked = "anneal_" + secrets.token_urlsafe(32)
    response = api.client.get(f"/v1/runs/{run}/logs", params={"grep": leaked})
    record = api.record_of(response)
    assert record["method"] == "GET" and record["route"] == "/v1/runs/{run_id}/logs" and record["status"] == 404
    assert record["run_id"] == run and record["level"] == "info" and 0 < record["ms"] < 30_000
    assert re.fullmatch(r"key_[0-9a-z]{26}", record["key_id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", record["timestamp"])
    with api.client_with(leaked) as untrusted:
        refused = api.record_of(untrusted.get("/v1/runs"))
    assert (refused["status"], refused["key_id"], refused["route"]) == (401, None, "unmatched")
    public = api.record_of(api.client_with(None).get("/healthz"))
    assert (public["status"], public["route"]) == (200, "/healthz")
    said = api.log.read_text()
    assert leaked not in said and api.key not in said and "grep=" not in said
    assert list(record)[:4] == ["timestamp", "level", "logger", "event"]


def test_no_log_has_a_link_a_session_or_a_ticket(api: LoggingServer) -> None:
    link = api.client.post("/v1/session/links").json()["url"].partition("#")[2]
    ticket = api.client.post("/v1/stream-tickets").json()["ticket"]
    with api.client_with(None) as browser:
        cookie = browser.post("/v1/session", json={"link": link}).cookies[f"anneal_session_{api.port}"]
        api.record_of(browser.get("/v1/events", params={"follow": "false", "ticket": ticket}))
        api.record_of(browser.get("/v1/events", params={"ticket": ticket + "x"}))
        api.record_of(browser.delete("/v1/session", headers={"Origin": api.url}))
    said = api.log.read_text()
    assert [token for token in (link, ticket, cookie) if token in said or token[-43:] in said] == []


def test_library_logs_have_the_same_format(api: LoggingServer) -> None:
    """uvicorn's own lines too: all of the file but what `anneal api` prints for people."""
    api.record_of(api.client.get("/healthz"))
    loggers = {one["logger"] for one in api.records()}
    assert "uvicorn.error" in loggers
    assert {key for one in api.records() for key in one if one["logger"] == "uvicorn.error"} == {
        "timestamp", "level", "logger", "event",
    }  # fmt: skip
    others = [line for line in api.log.read_text().splitlines() if not line.startswith("{")]
    assert others == [f"API on {api.url}"]


def test_a_failure_in_a_request_carries_its_id_and_its_traceback_no_secret(settings: Settings, tmp_path: Path) -> None:
    """Here the database answers, but nobody may read from it: what the driver says goes into the log."""
    with LoggingServer(settings, tmp_path / "api.log", ANNEAL_LOG_FORMAT="json") as api:
        assert api.client.get("/v1/runs").status_code == 200
        with psycopg.connect(settings.database_url or "", autocommit=True) as connection:
            connection.execute("ALTER TABLE runs RENAME TO runs_elsewhere")
        answer = api.client.get("/v1/runs")
        assert answer.status_code == 500
        id = answer.headers["x-request-id"]
        # The loop that works beside the requests meets the same trouble.
        failure = eventually(
            lambda: [one for one in api.records() if one.get("exception") and one.get("request_id") == id]
        )[0]
        assert failure["request_id"] == id and failure["level"] == "error"
        assert "UndefinedTable" in failure["exception"]
    assert (settings.database_url or "").split(":")[2].partition("@")[0] not in api.log.read_text()


def test_console_lines_are_for_people_and_carry_the_same(settings: Settings, tmp_path: Path) -> None:
    with LoggingServer(settings, tmp_path / "api.log", ANNEAL_LOG_FORMAT="console") as api:
        id = api.client.get("/v1/nowhere").headers["x-request-id"]
        line = eventually(lambda: [one for one in api.log.read_text().splitlines() if f"request_id={id}" in one])[0]
    said = "INFO app.api.middleware.request_metrics: GET unmatched answered with 404"
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z " + said, line)


_PROGRAM = """
import logging, sys
from app.infra.logs import log_setup
log_setup.set_up(sys.argv[1] or None)
log = logging.getLogger("some.library")
log.debug("unheard")
log.warning("one %s", "value", extra={"run_id": "run_1"})
try:
    raise ValueError("cannot reach postgresql://user:s3cret@host/db with anneal_" + "k" * 43)
except ValueError:
    log.exception("two\\nlines")
logging.getLogger("httpx").info("GET http://host/?key=1")
"""


def _logged(chosen: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _PROGRAM, chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("chosen", ["json", ""])
def test_logs_outside_a_terminal_are_json_lines(chosen: str) -> None:
    first, second = (json.loads(line) for line in _logged(chosen).splitlines())
    assert (first["event"], first["run_id"], first["level"]) == ("one value", "run_1", "warning")
    assert second["event"] == "two\nlines"
    assert "ValueError: cannot reach postgresql://user:" in second["exception"]
    assert "s3cret" not in second["exception"] and "k" * 43 not in second["exception"]
    assert "anneal_[redacted]" in second["exception"]


def test_console_log_has_traceback_after_its_line_without_secrets() -> None:
    said = _logged("console")
    assert "ERROR some.library: two\nlines\nTraceback" in said
    assert "s3cret" not in said and "k" * 43 not in said


def test_a_tail_that_a_request_began_does_not_log_as_that_request() -> None:
    with bound_contextvars(request_id="req_1"):
        assert run_context("run_1").run(get_contextvars) == {"run_id": "run_1"}
