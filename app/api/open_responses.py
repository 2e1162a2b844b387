"""Limits on the responses that the callers with one API key have open at a time."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastapi import Depends, Request

from app.api.authorization import CurrentCaller
from app.api.errors import RETRY_SECONDS, ApiError

DOWNLOADS_PER_KEY = 16
"""Files and archives that one key may download at a time; each holds up to a megabyte, or ten of an object store."""


class OpenResponses(ABC):
    """Number of open responses of one kind of each key in this process, within a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    @contextmanager
    def count_open(self, key_id: str) -> Iterator[None]:
        """Count a response of this key during the block; raise ApiError 429 if the key has too many."""
        if self._open[key_id] >= self._limit:
            raise self._too_many_error(self._limit, {"Retry-After": str(RETRY_SECONDS)})
        self._open[key_id] += 1
        try:
            yield
        finally:
            self._open[key_id] -= 1
            if not self._open[key_id]:
                del self._open[key_id]

    @abstractmethod
    def _too_many_error(self, limit: int, headers: dict[str, str]) -> ApiError: ...


class OpenDownloads(OpenResponses):
    """Number of open downloads of each key."""

    def _too_many_error(self, limit: int, headers: dict[str, str]) -> ApiError:
        return ApiError(
            429,
            "too_many_downloads",
            f"This key has {limit:,} open downloads, which is the limit; wait until some have ended, or use another "
            "key.",
            headers=headers,
        )


async def _count_download(request: Request, caller: CurrentCaller) -> AsyncIterator[None]:
    open_downloads: OpenDownloads = request.app.state.open_downloads
    with open_downloads.count_open(caller.key_id):
        yield


DownloadLimit = Depends(_count_download, scope="request")
"""Dependency of endpoints that send files; counts the download until the response has been sent."""
