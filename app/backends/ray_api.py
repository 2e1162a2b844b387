"""Client of the Jobs REST API of a Ray cluster."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.infra.errors import EXIT_TRY_LATER
from app.infra.logs.redaction import redact_secrets
from app.infra.terminal_text import plain_line

if TYPE_CHECKING:  # an API without a cluster does not wait for this import
    import httpx

_CONNECT_SECONDS = 3.0
_CALL_SECONDS = 10.0
_MOST_CHARACTERS = 300
_MOST_NODES = 10_000
"""Limit of Ray, whose default is 100."""


class RayError(Exception):
    """The cluster did not respond to a call as Ray does; the message says how."""


class RayUnreachable(RayError):
    """No connection to the cluster is possible, so that no other call can succeed either."""


@dataclass(frozen=True)
class Job:
    """Job of the cluster."""

    status: str
    """`PENDING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `STOPPED`."""
    last_line: str
    """Last line of Ray's message about the job, which for a failure is the last one that the job has printed."""

    exit_code: int | None = None
    """Exit code of its driver; None if that has none: it runs, was not started, or died with its node."""

    @property
    def has_failed(self) -> bool:
        """True if its driver failed by itself: it was neither stopped nor killed, and did not end with "try later"."""
        return (
            self.status == "FAILED"
            and self.exit_code is not None
            and 0 < self.exit_code < 128
            and (self.exit_code != EXIT_TRY_LATER)
        )

    @property
    def has_ended(self) -> bool:
        """True if none of its processes runs any more."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Node:
    """Node of the cluster that is alive."""

    resources: dict[str, float]
    """All that it has, free or not."""
    labels: dict[str, str]


class RayApi:
    """Connection to the dashboard of a cluster; every call takes at most ten seconds."""

    def __init__(self, url: str, token: str | None) -> None:
        import httpx

        from app.infra.internal_http import internal_client

        self.url = url
        self._errors = (httpx.HTTPError, TimeoutError)
        self._no_connection = (httpx.ConnectError, httpx.ConnectTimeout)
        self._http = internal_client(url, token, httpx.Timeout(_CALL_SECONDS, connect=_CONNECT_SECONDS))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get_job(self, job_id: str) -> Job | None:
        """Return a job; None if the cluster does not have it."""
        response = await self._send_request("GET", f"/api/jobs/{job_id}")
        if response.status_code == 404:
            return None
        document = self._parse_json(response)
        code = document.get("driver_exit_code")
        message = last_line(str(document.get("message") or ""))
        return Job(str(document.get("status")), message, code if isinstance(code, int) else None)

    async def list_nodes(self) -> list[Node]:
        """Return the nodes that are alive, from the API behind `ray list nodes`."""
        response = await self._send_request("GET", "/api/v0/nodes", params={"limit": _MOST_NODES})
        try:
            rows = self._parse_json(response)["data"]["result"]["result"]
            return [Node(dict(row["resources_total"]), dict(row["labels"])) for row in rows if row["state"] == "ALIVE"]
        except (KeyError, TypeError, ValueError) as error:
            raise RayError(f"it lists its nodes in an unknown form: {type(error).__name__}") from error

    async def submit_job(self, job_id: str, entrypoint: str, environment: dict[str, str]) -> None:
        """Submit a job; a job that has this id already stays as it is.

        `environment` is visible to everyone who can read jobs.
        """
        body = {"submission_id": job_id, "entrypoint": entrypoint, "runtime_env": {"env_vars": environment}}
        response = await self._send_request("POST", "/api/jobs/", json=body)
        # Ray responds with 500 to an id that exists, which is also that of a request whose response was lost.
        if not response.is_success and await self.get_job(job_id) is None:
            raise self._unexpected_response(response)

    async def stop_job(self, job_id: str) -> None:
        """Send SIGTERM to a job, if it still runs."""
        response = await self._send_request("POST", f"/api/jobs/{job_id}/stop")
        if response.status_code != 404:
            self._parse_json(response)

    async def _send_request(self, method: str, path: str, **options: Any) -> "httpx.Response":
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return await self._http.request(method, path, **options)
        except self._errors as error:
            kind = RayUnreachable if isinstance(error, self._no_connection) else RayError
            raise kind(str(error) or type(error).__name__) from error

    def _parse_json(self, response: "httpx.Response") -> dict[str, Any]:
        try:
            document = response.json() if response.is_success else None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise self._unexpected_response(response)
        return document

    def _unexpected_response(self, response: "httpx.Response") -> RayError:
        if response.status_code in (401, 403):
            return RayError(f"it rejects the token ({response.status_code}): set ANNEAL_RAY_TOKEN to the cluster's")
        return RayError(f"it responds with status {response.status_code}: {last_line(response.text)}")


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty, short, and without credentials."""
    lines = [line for line in text.splitlines() if line.strip()]
    return plain_line(redact_secrets(lines[-1].strip()))[:_MOST_CHARACTERS] if lines else ""
