"""A service with files, an empty place to restore it to, and the commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.storage import Storage
from tests.conftest import Services
from tests.factories import Trainer, make_run
from tests.server import ThreadServer
from worker.checkpoint_files import manifest

ROWS = b'{"text": "a row"}\n' * 50


class Service:
    """A service with a dataset, and a run in training with two checkpoints and records."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings, self.engine, self.storage = settings, engine, Storage(settings)
        with ThreadServer(settings) as api:
            self.dataset = api.client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)}).json()["id"]
            self.trainer = Trainer(engine, make_run(api.client, self.dataset)["id"]).begin()
            self.key = api.key
        self.run_id = self.trainer.run_id
        self.checkpoints = {step: self.save(step) for step in (5, 10)}
        (self.storage.attempt_dir(self.run_id, 1) / "metrics.jsonl").write_text("{}\n")
        self.storage.journal_path(self.run_id).write_text('{"event": "start"}\n')

    def save(self, step: int) -> str:
        """Save a checkpoint and return its id."""
        folder = self.storage.checkpoint_dir(self.run_id, 1, step)
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes([step]) * 3000)
        return self.trainer.checkpoint(step, manifest_sha256=manifest.write_manifest(folder, step, {}))


class Quiet:
    """Progress that remembers what was said and calls `during` at each report of a step."""

    def __init__(self, during: Callable[[str], None] = lambda _: None) -> None:
        self.said: list[str] = []
        self._during = during

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def step(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        self.said.append(label)
        self._during(label)
        yield lambda done: None


@pytest.fixture
def service(settings: Settings, engine: Engine) -> Service:
    return Service(settings, engine)


@pytest.fixture
def empty(settings: Settings, services: Services, tmp_path: Path) -> Iterator[Settings]:
    """Settings of a service that has nothing yet."""
    url = services.create_database(template="template1")
    place = {"home": tmp_path / "new-home", "storage": tmp_path / "new-storage", "database_url": url}
    yield settings.model_copy(update=place)
    services.drop_database(url)
