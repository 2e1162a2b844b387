"""A record handler for each test."""

from collections.abc import Iterator

import pytest

from app.config import Settings
from app.infra.db import sync_engine
from tests.worker.ingest.record_handler.lab import Lab


@pytest.fixture
def lab(settings: Settings) -> Iterator[Lab]:
    engine = sync_engine(settings.database_url or "")
    lab = Lab(settings, engine)
    with lab.writer:
        yield lab
    engine.dispose()
