"""The Python client: `Anneal` for scripts and notebooks, `AsyncAnneal` for programs with an event loop.

    from app.client import Anneal

    with Anneal() as client:  # the local service; or Anneal("http://host:8700", "anneal_…")
        dataset = client.datasets.upload("chats.jsonl")
        run = client.runs.create({"dataset_id": dataset.id, "config": {"base_model": "Qwen/Qwen3-0.6B"}})
        for event in client.runs.events(run.id):
            print(event.type, event.seq)

Both have the same calls; what goes over the wire is in `app/*/schemas.py`.
"""

from types import TracebackType
from typing import Generic

from app.client import events
from app.client.actions import Actions
from app.client.connection import Connection, find_connection
from app.client.datasets import Datasets
from app.client.errors import AnnealError
from app.client.experiments import Experiments
from app.client.modes import Async, M, Sync
from app.client.runs import Runs
from app.client.transport import AsyncTransport, Session, SyncTransport
from app.client.workers import Workers
from app.config import ClientSettings

__all__ = ["Anneal", "AnnealError", "AsyncAnneal", "Connection", "events"]

PATIENCE = 15.0
"""Seconds for which a call that can be repeated is repeated: what a restart of the service takes."""


class _Client(Generic[M]):
    def __init__(self, transport: SyncTransport | AsyncTransport, patience: float) -> None:
        session = Session(transport, patience)
        is_async = isinstance(transport, AsyncTransport)
        self.url = transport.url
        self.actions: Actions[M] = Actions(session, is_async)
        self.datasets: Datasets[M] = Datasets(session, is_async)
        self.experiments: Experiments[M] = Experiments(session, is_async)
        self.runs: Runs[M] = Runs(session, is_async)
        self.workers: Workers[M] = Workers(session, is_async)


class Anneal(_Client[Sync]):
    """A client whose calls answer when they are done; streams are iterators."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        """By default the service that ANNEAL_URL and ANNEAL_API_KEY name, else the one of this machine.

        `patience` is how many seconds after its first failure a call may still be tried again.
        """
        connection = find_connection(ClientSettings(), url, key)
        self._transport = SyncTransport(connection.url, connection.key)
        super().__init__(self._transport, patience)

    def close(self) -> None:
        """Close all connections."""
        self._transport.http.close()

    def __enter__(self) -> "Anneal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncAnneal(_Client[Async]):
    """A client whose calls are awaited; streams are asynchronous iterators."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        """As for `Anneal`."""
        connection = find_connection(ClientSettings(), url, key)
        self._transport = AsyncTransport(connection.url, connection.key)
        super().__init__(self._transport, patience)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> "AsyncAnneal":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
