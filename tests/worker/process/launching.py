"""Launching for tests: a launcher with cheap modules in its zygote, and everything that a process said."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.device import AssignedDevice
from app.config import Settings
from tests.worker.trainers import write_job
from worker.process.launcher import Launcher
from worker.process.training_process import Exit, TrainingProcess
from worker.wire.heartbeat import HEARTBEAT

CPU = AssignedDevice("cpu", 0, "cpu-0")
Launch = Callable[..., TrainingProcess]


def start_launcher(home: Path, mode: str, preload: tuple[str, ...] = ("tests.worker.trainers",)) -> Launcher:
    """A started launcher that would not make a launch wait."""
    launcher = Launcher(Settings(home=home, launch=mode), preload=preload)  # type: ignore[arg-type]
    launcher.start()
    assert launcher.wait_ready(300)
    assert launcher.mode == mode, launcher.reason
    return launcher


def launch(launcher: Launcher, folder: Path, name: str, **job: Any) -> TrainingProcess:
    """Start one of `tests.worker.trainers` on a job file in `folder`."""
    return launcher.launch(f"tests.worker.trainers:{name}", write_job(folder, **job), [CPU])


class Said:
    """What a process said, in order, and how it ended."""

    def __init__(self, process: TrainingProcess) -> None:
        self.process = process
        self.pieces: list[tuple[str, bytes]] = []

    def until(self, done: Callable[["Said"], object], timeout: float = 60) -> "Said":
        """Listen until `done` is true of what was said."""
        deadline = time.monotonic() + timeout
        while not done(self):
            assert time.monotonic() < deadline, self.pieces[-50:]
            self.process.wait(0.5)
            self._hear(self.process.channel.receive(0))
        return self

    def to_the_end(self, timeout: float = 60) -> Exit:
        """Listen until the process has ended and its queue is empty; close it."""
        self.until(lambda said: said.process.poll() is not None, timeout)
        self.process.kill()
        self._hear(self.process.channel.drain())
        return self.process.close()

    def _hear(self, pieces: Sequence[tuple[str, bytes]]) -> None:
        self.pieces += [piece for piece in pieces if piece != ("report", HEARTBEAT)]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(piece) for source, piece in self.pieces if source == "report"]

    def record(self, type: str) -> dict[str, Any]:
        """The first record of a type."""
        return next(record for record in self.records if record["type"] == type)

    def has(self, type: str) -> bool:
        return any(record["type"] == type for record in self.records)

    @property
    def text(self) -> str:
        """Output and messages, as one text in the order in which they came."""
        return b"".join(
            json.loads(piece).get("line", "").encode() + b"\n" if source == "report" else piece
            for source, piece in self.pieces
        ).decode()


def session_members(session: int) -> list[int]:
    """Living processes of a session."""
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(folder.name))
    return members


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
