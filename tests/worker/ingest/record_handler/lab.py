"""A record handler on real tables, whose trainer is the test."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine

from app.config import Settings
from app.infra.files.disk_space import DatabaseReserve
from app.infra.storage import Storage
from tests.rows import add_run, add_worker, claim, events_of
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler


class Lab:
    """A claimed run and its record handler, on real tables; the trainer is what the test says."""

    def __init__(self, settings: Settings, engine: Engine, reserve: DatabaseReserve | None = None) -> None:
        self.engine = engine
        add_run(engine)
        self.run = claim(engine, add_worker(engine))
        # A lease that neither ends nor is lost unless the test says so: what is under test is what is stored.
        self.lease: Any = SimpleNamespace(fenced=False, expired=False, run_id=self.run.id)
        self.draining = threading.Event()
        context: Any = SimpleNamespace(
            engine=engine,
            publisher=SimpleNamespace(wake_streams=lambda _: None),
            storage=Storage(settings),
            settings=settings,
            draining=self.draining,
            uploader=None, database_reserve=reserve,
        )  # fmt: skip
        self.folder = context.storage.attempt_dir(self.run.id, self.run.attempt)
        self.folder.mkdir(parents=True)
        self.writer = EventWriter(context, self.run, self.lease)
        self.record_handler = RecordHandler(context, self.run, self.writer)

    def says(self, type: str, **fields: Any) -> None:
        record = {"type": type, "ts": time.time(), **fields}
        self.record_handler.handle_output([("report", json.dumps(record).encode())])

    def prints(self, text: str) -> None:
        self.record_handler.handle_output([("stdout", text.encode())])

    def events(self) -> list[tuple[str, Any]]:
        events = events_of(self.engine, self.run.id)
        assert [one.seq for one in events] == list(range(1, len(events) + 1))
        return [(one.type, one.data) for one in events]


def checkpoint(step: int) -> dict[str, Any]:
    return {
        "name": f"checkpoint-{step}", "step": step, "epoch": 0.5, "kind": "periodic", "bytes": 10,
        "manifest_sha256": "a" * 64, "metrics": {"loss": 1.0},
    }  # fmt: skip
