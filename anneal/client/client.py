"""Python client: `Anneal` for scripts and notebooks, `AsyncAnneal` for asyncio programs.

    from anneal.client.client import Anneal

    with Anneal() as client:  # the local service; or Anneal("http://host:8700", "anneal_…")
        dataset = client.datasets.upload("chats.jsonl")
        run = client.runs.create({"dataset_id": dataset.id, "config": {"base_model": "Qwen/Qwen3-0.6B"}})
        for event in client.runs.events(run.id):
            print(event.type, event.seq)

Both have the same methods. The request and response models are in `anneal/contracts/schemas/`.
"""

from pathlib import Path
from types import TracebackType

from anneal.client.actions import Actions
from anneal.client.chat import Chats
from anneal.client.connection import find_connection
from anneal.client.datasets import Datasets
from anneal.client.experiments import Experiments
from anneal.client.keys import Keys
from anneal.client.machines import Models, Queue, Service, Workers
from anneal.client.runs import Runs
from anneal.client.sync_async import Async, M, Sync
from anneal.client.transport import AsyncTransport, OnRetry, Session, SyncTransport
from anneal.client.webhooks import Webhooks
from anneal.settings import ClientSettings

PATIENCE = 15.0
"""Seconds during which a failed call is retried if that is safe; covers a restart of the service."""


class _Client(Chats[M]):
    def __init__(
        self, transport: SyncTransport | AsyncTransport, patience: float, on_retry: OnRetry | None = None
    ) -> None:
        session = Session(transport, patience, on_retry)
        is_async = isinstance(transport, AsyncTransport)
        super().__init__(session, is_async)
        self.url = transport.url
        self.actions: Actions[M] = Actions(session, is_async)
        self.datasets: Datasets[M] = Datasets(session, is_async)
        self.experiments: Experiments[M] = Experiments(session, is_async)
        self.models: Models[M] = Models(session, is_async)
        self.keys: Keys[M] = Keys(session, is_async)
        self.queue: Queue[M] = Queue(session, is_async)
        self.runs: Runs[M] = Runs(session, is_async)
        self.service: Service[M] = Service(session, is_async)
        self.webhooks: Webhooks[M] = Webhooks(session, is_async)
        self.workers: Workers[M] = Workers(session, is_async)


class Anneal(_Client[Sync]):
    """Synchronous client: calls block until they are done, streams are iterators."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca_file: str | Path | None = None,
        patience: float = PATIENCE,
        on_retry: OnRetry | None = None,
    ) -> None:
        """Connect to `url` with `api_key`; the defaults are ANNEAL_URL and ANNEAL_API_KEY, then the local service.

        `ca_file` has the certificates of the authorities to verify the service with; the default is ANNEAL_CA_FILE,
        then those of the system. `patience` is the number of seconds after its first failure during which a call is
        retried; `on_retry` is called with the error before each retry.
        """
        self._transport = SyncTransport(find_connection(ClientSettings(), url, api_key, ca_file))
        super().__init__(self._transport, patience, on_retry)

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
    """Asynchronous client: calls are awaited, streams are asynchronous iterators."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca_file: str | Path | None = None,
        patience: float = PATIENCE,
        on_retry: OnRetry | None = None,
    ) -> None:
        """Take the same arguments as `Anneal`."""
        self._transport = AsyncTransport(find_connection(ClientSettings(), url, api_key, ca_file))
        super().__init__(self._transport, patience, on_retry)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> "AsyncAnneal":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
