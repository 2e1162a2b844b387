"""Configuration of a hub model that is not on this machine, fetched before a run: a few kilobytes.

Validation learns from it whether the model can be had, and an estimate its architecture.
"""

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import release_connection
from app.api.errors import ApiError
from app.base_models import resolver
from app.config import Settings, hub_endpoint, hub_is_offline
from app.secrets import service as secrets
from app.secrets.store import HF_TOKEN

MOST_BYTES = 2**20
_TIMEOUT_SECONDS = 5.0
_KEPT_SECONDS = 600.0
_FAILURE_KEPT_SECONDS = 15.0
_MOST_KEPT = 64
_MOST_KEPT_BYTES = 2**16


@dataclass(frozen=True)
class HubConfig:
    """Content of a config.json, or the reason why there is none."""

    content: bytes | None
    reason: str = ""
    """Sentence that says why there is no content."""
    code: str = ""
    """Code of a reason that will be the same for every process that uses the hub as this one does; else empty."""
    message: str = ""
    """The reason without a subject, for the error of a field."""


Key = tuple[str | None, str | None, str, str | None]
"""Hub, token, model and revision."""

_answers: OrderedDict[Key, tuple[float, HubConfig]] = OrderedDict()
"""Newest answers with the monotonic time of their arrival, so that repeated requests do not load the hub."""
_downloads: dict[Key, asyncio.Task[HubConfig]] = {}
"""Downloads in progress: requests for one model at the same time share one."""


def cached_path(name: str, revision: str | None) -> Path | None:
    """Return the path of a hub model's config.json in the hub cache of this machine; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # a slow import that only this call needs

    if resolver.is_hub_name(name) and ".." not in (revision or ""):
        with suppress(ValueError):  # not a valid repository name
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
            return Path(cached) if isinstance(cached, str) else None
    return None


async def fetch_hub_config(
    session: AsyncSession, settings: Settings, name: str, revision: str | None
) -> HubConfig | None:
    """Fetch the config.json of a hub model; None if the hub's cache on this machine has it.

    Takes at most some seconds, and `session` has no connection meanwhile. Never raises for a hub that cannot be used.
    """
    if await asyncio.to_thread(cached_path, name, revision) is not None:
        return None
    if not settings.allow_hub:
        return HubConfig(
            None,
            f"The configuration of {name} is not on the API's machine, and this server does not load from the hub.",
            "hub_not_allowed",
            "this server does not load from the hub (ANNEAL_ALLOW_HUB)",
        )
    if hub_is_offline():
        return HubConfig(
            None,
            f"The configuration of {name} is not on the API's machine, and HF_HUB_OFFLINE is set.",
            "hub_offline",
            "the hub must not be used (HF_HUB_OFFLINE is set)",
        )
    try:
        token = await secrets.find_secret(session, settings, HF_TOKEN)
    except ApiError as error:
        return HubConfig(None, f"The configuration of {name} cannot be fetched: {error.detail}")
    finally:
        await release_connection(session)
    key = (hub_endpoint(), token, name, revision)
    arrived, answer = _answers.get(key, (0.0, None))
    if answer is not None and time.monotonic() - arrived < (_KEPT_SECONDS if answer.content else _FAILURE_KEPT_SECONDS):
        return answer
    if (download := _downloads.get(key)) is None or download.get_loop() is not asyncio.get_running_loop():
        download = _downloads[key] = asyncio.create_task(_ask_and_cache(key))
        download.add_done_callback(lambda _: _downloads.pop(key, None))
    # A caller that goes away must not end the download for the others.
    return await asyncio.shield(download)


async def _ask_and_cache(key: Key) -> HubConfig:
    """Ask the hub, and keep its answer."""
    answer = await _ask_hub(*key[1:])
    if len(answer.content or b"") <= _MOST_KEPT_BYTES:
        _answers[key] = time.monotonic(), answer
        _answers.move_to_end(key)
        while len(_answers) > _MOST_KEPT:
            _answers.popitem(last=False)
    return answer


async def _ask_hub(token: str | None, name: str, revision: str | None) -> HubConfig:
    from app.datasets import hub  # loads an HTTP client

    failed = f"The configuration of {name} cannot be fetched:"
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS), hub.open_client(token) as client:
            return HubConfig(await hub.fetch_model_config(client, name, revision, MOST_BYTES))
    except hub.ModelNotReadable as error:
        return HubConfig(None, f"{failed} {error.message}.", error.code, error.message)
    except hub.HubUnreachable as error:
        message = f"the hub cannot be reached ({error})"
        return HubConfig(None, f"{failed} {message}.", "hub_unreachable", message)
    except ApiError as error:
        return HubConfig(None, f"{failed} {error.detail.rstrip('.')}.")
    except TimeoutError:
        return HubConfig(None, f"The hub did not send the configuration of {name} within {_TIMEOUT_SECONDS:.0f} s.")
