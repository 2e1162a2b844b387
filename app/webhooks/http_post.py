"""POST of one message to a receiver, of which only the status of the response is read."""

import asyncio
from collections.abc import Collection, Mapping

import httpx

from app.api.errors import to_printable
from app.infra.guarded_http import AddressRefused, GuardedTransport

TIMEOUT_SECONDS = 15.0
"""Time for an attempt, from the lookup of the name to the status of the response."""


class AttemptFailed(Exception):
    """Failed attempt; the message is a sentence for the owner of the webhook."""

    def __init__(self, message: str, response_status: int | None = None) -> None:
        super().__init__(to_printable(message, 500))
        self.response_status = response_status


async def post_message(url: str, headers: Mapping[str, str], body: bytes, private_hosts: Collection[str]) -> int:
    """Send a message and return the status of the response, which is 2xx.

    Raises:
        AttemptFailed: The receiver was not reached, may not be called, or did not accept the message.
    """
    target = httpx.URL(url)
    host = target.raw_host.decode("ascii")
    if target.scheme != "https" and host not in private_hosts:
        raise AttemptFailed(f"The URL is not encrypted, and the operator does not allow that for {host}: use https://.")
    try:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            httpx.AsyncClient(transport=GuardedTransport(private_hosts), timeout=TIMEOUT_SECONDS) as client,
            client.stream("POST", target, content=body, headers={"user-agent": "Anneal", **headers}) as response,
        ):
            status = response.status_code
    except (TimeoutError, httpx.TimeoutException):
        raise AttemptFailed(f"{host} did not answer within {TIMEOUT_SECONDS:.0f} seconds.") from None
    except AddressRefused as error:
        if "private" in error.problem:
            advice = "webhooks call only public ones: the operator can add it to ANNEAL_WEBHOOK_PRIVATE_HOSTS"
            raise AttemptFailed(f"{error}, and {advice}.") from None
        raise AttemptFailed(f"{error}: correct the host in the URL of the webhook, or the server's DNS.") from None
    except (httpx.HTTPError, OSError) as error:
        raise AttemptFailed(f"{host} could not be reached: {error or type(error).__name__}.") from None
    if 300 <= status < 400:
        advice = "redirects are not followed: set the URL to the address that it redirects to"
        raise AttemptFailed(f"{host} redirected with status {status}, and {advice}.", status)
    if not 200 <= status < 300:
        raise AttemptFailed(f"{host} answered with status {status}.", status)
    return status
