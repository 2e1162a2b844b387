"""What counts as progress between two losses, which are bounded: a later step whose checkpoint is there."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from app.config import Settings
from app.infra.db import sync_engine
from tests.rows import run_row
from tests.worker.ingest.record_handler.lab import Lab, checkpoint
from worker.checkpoint_files.manifest import write_manifest


class Trainer(Lab):
    """A trainer that was lost twice before, and writes checkpoints."""

    def save(self, step: int) -> dict[str, Any]:
        """Write a checkpoint and return its record."""
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(f"weights of step {step}")
        return {**checkpoint(step), "manifest_sha256": write_manifest(folder, step, {})}

    def losses_after(self, record: dict[str, Any]) -> int:
        """Return the losses that still count after a checkpoint record, of two."""
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE runs SET lost_count = 2"))
        self.says("checkpoint", **record)
        self.writer.drain()
        row = run_row(self.engine, self.run.id)
        assert row.checkpoint_step == record["step"]
        return int(row.lost_count)


@pytest.fixture
def trainer(settings: Settings) -> Iterator[Trainer]:
    engine = sync_engine(settings.database_url or "")
    trainer = Trainer(settings, engine)
    with trainer.writer:
        yield trainer
    engine.dispose()


def test_a_checkpoint_of_a_later_step_is_progress(trainer: Trainer) -> None:
    assert [trainer.losses_after(trainer.save(step)) for step in (2, 4, 6)] == [0, 0, 0]


def test_a_step_that_an_earlier_attempt_has_saved_is_none_until_training_is_beyond_it(trainer: Trainer) -> None:
    assert trainer.losses_after(trainer.save(4)) == 0
    with trainer.engine.begin() as connection:  # the host is lost, and its checkpoint with it
        connection.execute(text("UPDATE checkpoints SET attempt = 0, bad_reason = 'it is missing'"))
    assert [trainer.losses_after(trainer.save(step)) for step in (2, 4, 6)] == [2, 2, 0]


@pytest.mark.parametrize("forged", ["no-folder", "other-digest", "other-step", "truncated", "no-files", "no-manifest"])
def test_a_record_without_its_checkpoint_is_none(trainer: Trainer, forged: str) -> None:
    record = trainer.save(2)
    folder = trainer.folder / "checkpoint-2"
    if forged == "no-folder":
        record = checkpoint(8)
    elif forged == "other-digest":
        record["manifest_sha256"] = "a" * 64
    elif forged == "other-step":
        folder.rename(trainer.folder / "checkpoint-8")
        record |= {"step": 8, "name": "checkpoint-8"}
    elif forged == "truncated":
        (folder / "weights").write_text("")
    elif forged == "no-files":
        (folder / "weights").unlink()
        (folder / "manifest.json").unlink()
        record["manifest_sha256"] = write_manifest(folder, 2, {})
    else:
        (folder / "manifest.json").write_text(json.dumps({"step": 2, "files": {"/etc/passwd": {}}}))
    assert trainer.losses_after(record) == 2
