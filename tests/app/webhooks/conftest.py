"""An API that may call this machine, and a receiver on it."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.db import sync_engine
from tests.app.webhooks.receiver import Receiver
from tests.conftest import Services
from tests.server import ApiServer, ThreadServer


@pytest.fixture(scope="module")
def shared_api(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder, url = tmp_path_factory.mktemp("webhooks"), services.create_database()
    settings = Settings(
        home=folder / "home", storage=folder / "storage", database_url=url, redis_url=services.fresh_redis(),
        host="127.0.0.1", port=0, lease_seconds=1, webhook_private_hosts="127.0.0.1",
    )  # fmt: skip
    with ThreadServer(settings) as server:
        yield server
    services.drop_database(url)


@pytest.fixture(scope="module")
def shared_engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield receiver
        for held in receiver.held.values():
            held.set()
        receiver.shutdown()
        thread.join()
