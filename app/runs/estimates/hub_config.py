"""Configuration of a hub model that is not on this machine, fetched for its estimate; a few kilobytes."""

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.api.errors import ApiError
from app.base_models import resolver
from app.config import Settings, hub_is_offline
from app.infra.storage import Storage
from app.secrets import service as secrets
from app.secrets.store import HF_TOKEN

MOST_BYTES = 2**20
_TIMEOUT_SECONDS = 10.0
_KEPT_SECONDS = 600.0
_MOST_KEPT = 64
_MOST_KEPT_BYTES = 2**16


@dataclass(frozen=True)
class HubConfig:
    """Content of a config.json, or the reason why there is none."""

    content: bytes | None
    reason: str = ""


_kept: OrderedDict[tuple[str, str | None], tuple[float, bytes]] = OrderedDict()
"""Newest contents with the monotonic time of their arrival, so that repeated estimates do not load the hub."""


def cached_path(name: str, revision: str | None) -> Path | None:
    """Return the path of a hub model's config.json in the hub cache of this machine; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # a slow import that only this call needs

    if resolver.is_hub_name(name) and ".." not in (revision or ""):
        with suppress(ValueError):  # not a valid repository name
            found = try_to_load_from_cache(name, "config.json", revision=revision)
            return Path(found) if isinstance(found, str) else None
    return None


async def fetch(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, name: str, revision: str | None
) -> HubConfig | None:
    """Fetch the config.json of a hub model; None if the model is on this machine, or the name is not one of the hub.

    Never raises for a hub that cannot be used.
    """
    if resolver.is_run(name):
        return None
    try:
        located = await asyncio.to_thread(resolver.locate, settings, storage, name, None, revision)
    except resolver.BaseModelError:
        return None
    hub = located["hub"]
    if hub is None or await asyncio.to_thread(cached_path, hub, revision) is not None:
        return None
    arrived, content = _kept.get((hub, revision), (0.0, b""))
    if content and time.monotonic() - arrived < _KEPT_SECONDS:
        return HubConfig(content)
    if hub_is_offline():
        return HubConfig(None, f"The configuration of {hub} is not on the API's machine, and HF_HUB_OFFLINE is set.")
    try:
        content = await asyncio.wait_for(_download(sessions, settings, hub, revision), _TIMEOUT_SECONDS)
    except ApiError as error:
        reason = error.errors[0].message if error.errors else error.detail
        return HubConfig(None, f"The configuration of {hub} cannot be fetched: {reason}".rstrip(".") + ".")
    except TimeoutError:
        return HubConfig(None, f"The hub did not send the configuration of {hub} within {_TIMEOUT_SECONDS:.0f} s.")
    if len(content) <= _MOST_KEPT_BYTES:
        _kept[hub, revision] = time.monotonic(), content
        _kept.move_to_end((hub, revision))
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return HubConfig(content)


async def _download(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, name: str, revision: str | None
) -> bytes:
    from app.datasets import hub  # loads an HTTP client

    async with sessions() as session:
        token = await secrets.find(session, settings, HF_TOKEN)
    async with hub.client(token) as client:
        return await hub.fetch_model_config(client, name, revision, MOST_BYTES)
