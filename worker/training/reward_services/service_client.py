"""HTTP client of rewards: it calls one URL on a host that the operator allows, and repeats failures that may pass.

Does not import torch.
"""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NoReturn, TypeVar

import httpx

from anneal.contracts.rewards import USAGE_METRICS, RewardHost, ServiceReward, join_address
from app.infra.guarded_http import AddressRefused, GuardedTransport
from app.infra.terminal_text import plain_line
from worker.training.failures import TrainingFailure

REWARD_UNAVAILABLE = "reward_unavailable"

_TRIES = 6
_FIRST_PAUSE_SECONDS = 2.0
_MOST_PAUSE_SECONDS = 120.0
"""Longest pause that a service can ask for."""
_BEAT_SECONDS = 0.5
_MOST_BYTES = 1024**2
"""Size limit of a response."""
_PASSING = frozenset({408, 425, 429})
"""Client errors that may pass; so may all server errors."""
_UNCHANGING = frozenset({401, 403, 404, 405})
"""Client errors that every call would have."""
_EXCERPT_CHARACTERS = 200

Item = TypeVar("Item")
Result = TypeVar("Result")
Post = Callable[[Any], Awaitable[Any]]
"""Posts a JSON value to the URL and returns that of the response; raises `CallFailed`."""


class CallFailed(Exception):
    """A call has no usable response; the message says why."""


class BadResponse(CallFailed):
    """The service has answered, but not as it should have."""


class _Passing(Exception):
    """Failure that may pass; the service asks for a pause of `pause_seconds` at least."""

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class CallContext:
    """Values and functions that all calls of a run share."""

    hosts: Sequence[RewardHost]
    """Hosts that may be called."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Keys of the hosts, by `RewardHost.key_variable`."""
    alive: Callable[[], None] = lambda: None
    """Called twice a second during calls, as a heartbeat; it may raise to end them."""
    warn: Callable[[str], None] = lambda _message: None
    is_stopping: Callable[[], bool] = lambda: False
    """Returns True once the run is to stop: failed calls are not repeated then."""


def take_keys(hosts: Sequence[RewardHost]) -> dict[str, str]:
    """Remove the keys of hosts from the environment, which processes that this one starts would inherit."""
    variables = {host.key_variable for host in hosts if host.key_variable is not None}
    return {name: key for name in variables if (key := os.environ.pop(name, None)) is not None}


class ServiceClient:
    """Client of the service of one reward."""

    def __init__(self, reward: ServiceReward, name: str, url: str, context: CallContext) -> None:
        """Prepare calls to `url`; `name` is the reward in messages.

        Raises:
            TrainingFailure: `config_error`: the operator does not allow the URL, or its key is missing.
        """
        self.usage = dict.fromkeys(USAGE_METRICS, 0)
        self._name, self._context = name, context
        self._concurrency, self._timeout = reward.concurrency, reward.timeout_seconds
        # The URL that is called is the one that is checked: the addresses of one text by two parsers may differ.
        try:
            self._url = httpx.URL(url)
            self._host = self._url.raw_host.decode("ascii")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise TrainingFailure("config_error", f"The URL of reward `{name}` is not valid: {error}.") from None
        address = (self._url.scheme, self._host, self._url.port)
        host = next((host for host in context.hosts if host.allows(*address)), None)
        if host is None:
            raise TrainingFailure(
                "config_error",
                f"Reward `{name}` calls {join_address(*address)}, which is not allowed: the operator can add it to "
                "ANNEAL_REWARD_HOSTS, or to ANNEAL_REWARD_PRIVATE_HOSTS.",
            )
        if self._url.scheme != "https" and not host.is_private:
            raise TrainingFailure("config_error", f"The URL of reward `{name}` is not encrypted: use https://.")
        self._secret, key = host.secret, context.keys.get(host.key_variable or "")
        if self._secret is not None and key is None:
            message = f"Reward `{name}` needs a key for {self._host}: an admin sets it with "
            raise TrainingFailure("config_error", f"{message}`anneal secrets set {self._secret}`.")
        self._key = key
        self._private_hosts = [host.name] if host.is_private else []
        self._resume_at = 0.0
        """Monotonic time before which the service wants no call."""
        # Not the generator of the process, whose numbers decide what is trained.
        self._random = random.Random()

    def map_calls(self, call: Callable[[Post, Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        """Return `call` of each item, in their order; several run at a time, and heartbeats are sent meanwhile.

        Raises:
            TrainingFailure: `reward_unavailable`: no call to the service can succeed.
        """
        return asyncio.run(self._map_calls(call, items))

    async def _map_calls(self, call: Callable[[Post, Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        limit = asyncio.Semaphore(self._concurrency)
        async with self._open() as http:
            post = partial(self._post, http)

            async def call_within_limit(item: Item) -> Result:
                async with limit:
                    return await call(post, item)

            tasks = [asyncio.create_task(call_within_limit(item)) for item in items]
            try:
                waiting = set(tasks)
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=_BEAT_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                    )
                    self._context.alive()
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in tasks]

    def _open(self) -> httpx.AsyncClient:
        headers = {"user-agent": "Anneal", "content-type": "application/json", "accept-encoding": "identity"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        return httpx.AsyncClient(
            transport=GuardedTransport(self._private_hosts), headers=headers, timeout=self._timeout
        )

    async def _post(self, http: httpx.AsyncClient, body: Any) -> Any:
        content, pause, tries = json.dumps(body).encode(), _FIRST_PAUSE_SECONDS, _TRIES
        while True:
            try:
                return await self._try_post(http, content)
            except _Passing as failure:
                tries -= 1
                if tries == 0 or self._context.is_stopping():
                    raise CallFailed(str(failure)) from None
                now = time.monotonic()
                # The calls of other rows wait too: each would be one too many.
                self._resume_at = max(self._resume_at, now + failure.pause_seconds)
                await self._pause_until(now + pause * self._random.uniform(0.5, 1))
            pause *= 2

    async def _pause_until(self, moment: float) -> None:
        """Pause until a monotonic time and until the service wants calls again, or until the run is to stop."""
        while (left := max(moment, self._resume_at) - time.monotonic()) > 0:
            if self._context.is_stopping():
                return
            await asyncio.sleep(min(left, _BEAT_SECONDS))

    async def _try_post(self, http: httpx.AsyncClient, content: bytes) -> Any:
        await self._pause_until(0.0)
        self.usage["reward_calls"] += 1
        try:
            async with (
                asyncio.timeout(self._timeout),
                http.stream("POST", self._url, content=content) as response,
            ):
                body = await _read_body(response)
        except (TimeoutError, httpx.TimeoutException):
            raise _Passing(f"{self._host} did not answer within {self._timeout:g} seconds") from None
        except AddressRefused as error:
            if "private" in error.problem:
                self._give_up(f"{error}: the operator can add it to ANNEAL_REWARD_PRIVATE_HOSTS")
            raise _Passing(str(error)) from None
        except (httpx.HTTPError, OSError) as error:
            reason = plain_line(str(error)) or type(error).__name__
            raise _Passing(f"{self._host} could not be reached: {reason}") from None
        if not response.is_success:
            self._raise_for_status(response, body)
        try:
            return json.loads(body or b"")
        except (ValueError, RecursionError):
            raise BadResponse(f"{self._host} did not answer with JSON, but with {self._excerpt(body)}") from None

    def _raise_for_status(self, response: httpx.Response, body: bytes | None) -> NoReturn:
        """Raise the error that a status other than 2xx means."""
        status = response.status_code
        reason = f"{self._host} answered with status {status}: {self._excerpt(body)}"
        if response.is_redirect:
            self._give_up(f"{self._host} redirects to another address, and redirects are not followed: correct `url`")
        if status in (401, 403) and self._secret is None:
            variables = "ANNEAL_REWARD_HOSTS or ANNEAL_REWARD_PRIVATE_HOSTS"
            self._give_up(f"{reason}. If it needs a key, the operator names its secret in {variables}")
        if status in (401, 403):
            self._give_up(f"{reason}. An admin sets another key with `anneal secrets set {self._secret}`")
        if status in _UNCHANGING:
            self._give_up(f"{reason}. Correct the reward")
        if status in _PASSING or status >= 500:
            raise _Passing(reason, _pause_seconds(response.headers.get("retry-after", "")))
        raise CallFailed(reason)

    def _give_up(self, reason: str) -> NoReturn:
        raise TrainingFailure(REWARD_UNAVAILABLE, f"Reward `{self._name}` cannot be computed: {reason}.")

    def _excerpt(self, body: bytes | None) -> str:
        """Return the beginning of a body, without the key."""
        if body is None:
            return f"more than {_MOST_BYTES:,} bytes"
        text = plain_line(body[: 8 * _EXCERPT_CHARACTERS].decode(errors="replace")).strip()
        if self._key is not None:
            text = text.replace(self._key, "[redacted]")
        return repr(text[:_EXCERPT_CHARACTERS])


async def _read_body(response: httpx.Response) -> bytes | None:
    """Return the body of a response; None: it is too large."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MOST_BYTES:
            return None
    return bytes(body)


def _pause_seconds(retry_after: str) -> float:
    """Return the pause that a header `Retry-After` asks for, within limits: a number of seconds, or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _MOST_PAUSE_SECONDS) if math.isfinite(seconds) else 0.0
