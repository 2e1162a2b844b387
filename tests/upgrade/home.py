"""Homes of released versions: `python -m tests.upgrade.home` writes one of this commit, for the tests of later ones.

It is made once for a release and never written again, since a later version would write later tables. The home is a
backup in the middle of a run, with the base model that the run trains.
"""

import json
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import text

from app.backup.create import BackupJob
from app.tables.migrate import VERSIONS
from tests.app.backup.conftest import Quiet
from tests.stack import Stack
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model

HOMES = Path(__file__).parent / "homes"
_CONFIG: dict[str, Any] = {
    "base_model": "tiny", "method": "lora", "lora_r": 2, "target_modules": ["q_proj", "v_proj"], "max_steps": 200,
    "save_steps": 4, "save_total_limit": 1, "logging_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1,
    "eval_steps": 4, "learning_rate": 1e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """What the home of a release contains, beside `<version>.tar.gz`, and the migrations of that release."""

    version: str
    migrations: dict[str, str]
    """SHA-256 by file name."""
    key: str
    completed_run: str
    live_run: str
    """Run that was training when the home was copied, after its first checkpoint."""
    dataset: str
    dataset_sha256: str
    event_types: list[str]
    """Types of the events of the completed run, in order of `seq`."""
    losses: list[tuple[int, float]]
    """Step and loss of each metric of the completed run."""

    @classmethod
    def read(cls, path: Path) -> "Release":
        """Read the description of a home."""
        return cls(**json.loads(path.read_text()))

    @property
    def archive(self) -> Path:
        """The home itself."""
        return HOMES / f"{self.version}.tar.gz"


def releases() -> list[Release]:
    """Return the released versions that have a home here, oldest first."""
    return sorted(map(Release.read, HOMES.glob("*.json")), key=lambda release: [*map(int, release.version.split("."))])


def migration_digests() -> dict[str, str]:
    """Return the SHA-256 of each migration of this version by file name."""
    return {
        file.name: sha256(file.read_bytes()).hexdigest() for folder in VERSIONS for file in folder.glob("[0-9]*.py")
    }


def _record(stack: Stack) -> Release:
    make_tiny_model(stack.settings.models_folder / "tiny", hidden=16, layers=1)
    dataset = stack.upload(make_chat_dataset(stack.home / "chats.jsonl", 40).read_bytes(), "chats.jsonl")
    held_out = stack.upload(make_chat_dataset(stack.home / "held-out.jsonl", 4).read_bytes(), "held-out.jsonl")
    stack.add_worker()
    data = {"backend": "celery", "dataset_id": dataset, "eval_dataset_id": held_out}
    completed = stack.create(config={**_CONFIG, "max_steps": 8}, tags=["kept"], **data)
    shown = stack.until(completed, "completed", "failed", timeout=600)
    assert shown["status"] == "completed", shown["error_message"]
    live = stack.create(config=_CONFIG, **data)
    stack.until_step(live, 6, timeout=600)
    events = stack.events(completed)
    return Release(
        version=version("anneal"),
        migrations=migration_digests(),
        key=stack.api.key,
        completed_run=completed,
        live_run=live,
        dataset=dataset,
        dataset_sha256=stack.client.get(f"/v1/datasets/{dataset}").json()["sha256"],
        event_types=[event["type"] for event in events],
        losses=[(event["step"], event["loss"]) for event in events if event["type"] == "metric"],
    )


def main() -> None:
    """Write the home of this commit; refuses to replace one."""
    archive = HOMES / f"{version('anneal')}.tar.gz"
    if archive.exists():
        sys.exit(f"{archive} exists: homes of released versions are kept as they are.")
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder) / "home")
        try:
            release = _record(stack)
            for worker in stack.workers:
                worker.freeze()  # the dump shows a run in training, whatever its speed
            with stack.engine.begin() as connection:
                connection.execute(text("UPDATE workers SET host = 'example'"))
            BackupJob(stack.settings, Path(folder) / "backup", Quiet()).run()
        finally:
            stack.close()
        with tarfile.open(archive, "w:gz") as tar:
            (backup,) = (Path(folder) / "backup").glob("[0-9]*")
            tar.add(backup, "backup")
            tar.add(stack.settings.models_folder, "models")
    (HOMES / f"{release.version}.json").write_text(json.dumps(asdict(release), indent=1) + "\n")
    print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
