"""What a power cut would leave of the files that a process writes, told from its own calls.

As a program, `python -m tests.worker.training.disk ENTRY job.json` runs a training process under this eye.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.messages import TrainerRecord
from worker.wire.reporter import Reporter


class Disk:
    """Watches fsync and rename: what was fsynced is on the disk as it was then, and a name once its folder was."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problems: list[str] = []
        """Renames of what was not on the disk."""
        self._durable: dict[Path, str] = {}
        self._unsure: set[Path] = set()
        self._fsync, self._rename = os.fsync, os.rename

    @contextmanager
    def watched(self) -> Iterator["Disk"]:
        """Take the place of the calls."""
        ours: dict[str, Any] = dict.fromkeys(("fsync", "fdatasync"), self._on_fsync)
        ours |= dict.fromkeys(("rename", "replace"), self._on_rename)
        before = {name: getattr(os, name) for name in ours}
        for name, call in ours.items():
            setattr(os, name, call)
        try:
            yield self
        finally:
            for name, call in before.items():
                setattr(os, name, call)

    def is_named(self, path: Path) -> bool:
        """Whether it would be there, by its name, after a power cut."""
        return path.exists() and path not in self._unsure

    def _on_fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.calls.append(f"fsync {path.name}")
        self._durable[path] = _content(path)
        self._unsure = {one for one in self._unsure if one.parent != path}

    def _on_rename(self, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        for path in (source, *sorted(source.rglob("*"))):
            if self._durable.get(path) != _content(path):
                name = path.relative_to(source.parent).as_posix()
                self.problems.append(f"{name} was not on the disk as it was when {source.name} became {target.name}")
        self._rename(source, target)
        self.calls.append(f"rename {source.name} {target.name}")
        self._unsure.add(target)


def _content(path: Path) -> str:
    """Of a file its digest, of a folder its names."""
    if path.is_dir():
        return " ".join(sorted(one.name for one in path.iterdir()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(train: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a training process in this one; its last record, `disk`, tells what a power cut would have taken."""
    folder = Path(arguments[0]).parent
    disk, reported, too_early = Disk(), [], []
    send = Reporter.send

    def watched_send(report: Reporter, record: TrainerRecord) -> None:
        if record["type"] == "checkpoint":
            reported.append(record["name"])
            if not disk.is_named(folder / record["name"]):
                too_early.append(record["name"])
        send(report, record)

    Reporter.send = watched_send  # type: ignore[method-assign]
    with disk.watched():
        code = train(arguments)
    has_output = disk.is_named(folder / "output")
    record = {"reported": reported, "too_early": too_early, "problems": disk.problems, "has_output": has_output}
    print(json.dumps({"type": "disk", **record}))
    return code


if __name__ == "__main__":
    sys.exit(main(importlib.import_module(sys.argv[1]).main, sys.argv[2:]))
