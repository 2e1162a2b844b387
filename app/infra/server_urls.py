"""URLs of the database and the broker: given ones or those of the embedded servers."""

import redis
from sqlalchemy.exc import ArgumentError

from anneal.local_service import read_json
from app.config import Settings
from app.infra.db import driver_url
from app.infra.errors import SetupError


def resolve_urls(settings: Settings) -> Settings:
    """Return the settings with both URLs set, using the embedded servers of this home where none are configured.

    Raises `SetupError` if a URL is neither configured nor published by embedded servers.
    """
    check_urls(settings)
    if settings.database_url and settings.redis_url:
        return settings
    embedded = read_json(settings.home / "embedded.json") or {}
    database_url = settings.database_url or embedded.get("database_url")
    redis_url = settings.redis_url or embedded.get("redis_url")
    if not database_url or not redis_url:
        missing = "ANNEAL_DATABASE_URL" if not database_url else "ANNEAL_REDIS_URL"
        raise SetupError(f"No server is running for {settings.home}: start `anneal up` first or set {missing}.")
    return settings.model_copy(update={"database_url": database_url, "redis_url": redis_url})


def check_urls(settings: Settings) -> None:
    """Check the configured URLs before anything is started with them; raises `SetupError` for an invalid one."""
    try:
        if settings.database_url:
            driver_url(settings.database_url)
    except (ArgumentError, ValueError):
        # The value may contain a password, so the message does not repeat it.
        raise SetupError(
            "ANNEAL_DATABASE_URL is not a valid database URL: use postgresql://user:password@host/name."
        ) from None
    try:
        if settings.redis_url:
            redis.Redis.from_url(settings.redis_url).close()
    except ValueError as error:
        raise SetupError(f"ANNEAL_REDIS_URL is not a valid Redis URL: {error}") from None
