"""The part of a worker that its checkpoint store uses."""

import threading
from typing import Protocol

from sqlalchemy import Engine

from app.config import Settings
from app.infra.storage import Storage
from worker.checkpoint_store.replicator import Replicator


class StoreOwner(Protocol):
    """A worker with a storage, a database engine and, if configured, a replicator."""

    id: str
    settings: Settings
    storage: Storage
    engine: Engine
    draining: threading.Event
    replicator: Replicator | None
