"""The demo's way to the service: plain HTTP with a key, as any client would."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

_SECONDS_TO_RECONNECT = 60.0
_TIMEOUT = httpx.Timeout(10.0, read=60.0, write=60.0)


class DemoError(Exception):
    """Something did not hold; the text says what, and where to look."""


@dataclass(frozen=True)
class Event:
    """One event of a run's stream."""

    seq: int
    type: str
    data: dict[str, Any]


class Client:
    """The calls that the demo needs; each raises `DemoError` with the service's own words when it is refused."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT, trust_env=False
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def upload(self, name: str, content: bytes) -> dict[str, Any]:
        """Upload a JSONL file as a data set."""
        files = {"file": (f"{name}.jsonl", content, "application/x-ndjson")}
        return self._json("POST", "/v1/datasets", data={"name": name}, files=files)

    def create_run(self, **body: Any) -> dict[str, Any]:
        """Ask for a run."""
        return self._json("POST", "/v1/runs", json=body)

    def run(self, run_id: str) -> dict[str, Any]:
        """A run as it stands."""
        return self._json("GET", f"/v1/runs/{run_id}")

    def stop(self, run_id: str, save_checkpoint: bool) -> None:
        """Ask a run to stop."""
        self._json("POST", f"/v1/runs/{run_id}/stop", json={"save_checkpoint": save_checkpoint})

    def resume(self, run_id: str) -> dict[str, Any]:
        """A new run that goes on from the newest checkpoint of this one."""
        return self._json("POST", f"/v1/runs/{run_id}/resume", json={})

    def follow(self, run_id: str) -> Iterator[Event]:
        """All events of a run until its end; a lost connection is taken up after the last event seen.

        Raises:
            DemoError: an event is missing or comes twice, or the service stays away for a minute.
        """
        seen = 0
        heard = time.monotonic()
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(seen)} if seen else {})
            try:
                with self._http.stream("GET", f"/v1/runs/{run_id}/events", headers=headers) as answer:
                    if answer.status_code == 204:
                        return
                    if answer.status_code >= 400:
                        answer.read()
                    _check(answer)
                    for event in parse_events(answer.iter_lines()):
                        if event.seq != seen + 1:
                            raise DemoError(f"The stream of {run_id} went from event {seen} to {event.seq}.")
                        seen, heard = event.seq, time.monotonic()
                        yield event
                        if event.type == "end":
                            return
            except httpx.TransportError as error:
                if time.monotonic() - heard > _SECONDS_TO_RECONNECT:
                    raise DemoError(f"The event stream of {run_id} cannot be reached any more: {error}.") from None
            time.sleep(0.5)

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise DemoError(f"The service does not answer {method} {path}: {error}.") from None
        _check(answer)
        body: dict[str, Any] = answer.json()
        return body


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """The events in the lines of a `text/event-stream`; comments and keep-alives carry none."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        else:
            if "data" in fields:
                yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}


def _check(answer: httpx.Response) -> None:
    if answer.status_code < 400:
        return
    try:
        problem = answer.json()
        told = [problem.get("detail") or problem.get("title") or ""]
        told += [f"{item.get('field')}: {item.get('message')}" for item in problem.get("errors") or []]
    except (ValueError, AttributeError):
        told = [answer.text[:300]]
    request = answer.request
    raise DemoError(f"{request.method} {request.url.path} answered {answer.status_code}: {' '.join(told)}")
