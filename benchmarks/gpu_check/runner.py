"""Runs the stages: each in a process of its own with a time limit, its rows on disk before the next one starts."""

import json
import os
import platform
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.config import get_settings
from benchmarks.gpu_check import markdown, processes
from benchmarks.gpu_check.report import Report, Row, Status, read_rows
from worker import devices

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 480.0
"""Time limit of a whole check."""
_LEAST_SECONDS = 5.0
_END_SECONDS = 5.0
_READY_SECONDS = 120.0
"""Time limit of the imports, which take longest on a machine that has not read the libraries yet."""
_POLL_SECONDS = 0.2
_MOST_OUTPUT = 4000
"""Characters of the output of each process that are in the log."""
_WEIGHTS_BYTES = 24 * 2**30
"""Free memory file system from which the large weights are read: 16.4 GB in bf16, and room."""


@dataclass(frozen=True)
class Stage:
    """Part of a check; its module has a function `run(check)`."""

    name: str
    seconds: float
    """Time limit on a GPU."""
    reserved: float
    """Seconds that the stages before it leave it: what it is expected to take, or the least that is of use."""
    module: str = ""

    @property
    def path(self) -> str:
        """Name of its module."""
        return self.module or f"benchmarks.gpu_check.stages.{self.name}"


STAGES = (
    Stage("facts", 90, 20),
    Stage("device", 90, 20),
    Stage("launch", 100, 40),
    Stage("methods", 100, 35),
    Stage("parity", 75, 30),
    Stage("resume", 75, 35),
    Stage("memory", 75, 30),
    Stage("checkpoint", 60, 30),
    Stage("throughput", 1800, 90),
    Stage("profile", 75, 40),
    Stage("demo", 150, 90),
)
CPU_FACTOR = 8
"""Factor of all time limits on a CPU."""


class Runner:
    """Check whose results are in `output`: `gpu-check.json`, `gpu-check.md` and `gpu-check.log`."""

    def __init__(
        self,
        output: Path,
        seconds: float,
        tiny: bool,
        commit: str | None = None,
        preloaded: Sequence[str] = processes.PRELOADED,
    ) -> None:
        output.mkdir(parents=True, exist_ok=True)
        gpus = devices.list_gpus()
        factor = 1 if gpus else CPU_FACTOR
        self.report = Report(
            date=datetime.now(UTC).isoformat(timespec="seconds"), commit=commit or _commit(),
            device=gpus[0].name if gpus else platform.processor() or platform.machine(),
            kind="cuda" if gpus else "cpu", tiny=tiny or not gpus, command=shlex.join(["gpu-check", *sys.argv[1:]]),
        )  # fmt: skip
        self._output, self._log, self._factor = output, output / "gpu-check.log", factor
        self._preloaded = preloaded
        self._server: Server | None = None
        self._deadline = time.monotonic() + seconds * factor

    def run(self, stages: Sequence[Stage]) -> Report:
        """Run the stages in order; return the report, which is also on disk."""
        with _scratch() as (work, weights), self._serving():
            for number, stage in enumerate(stages):
                is_ready = time.monotonic() >= self._deadline or self._start_server()
                later = sum(other.reserved for other in stages[number + 1 :]) * self._factor
                left = self._deadline - time.monotonic()
                seconds = min(stage.seconds * self._factor, max(left - later, min(left, stage.reserved)))
                if not is_ready:
                    self._end_without_result(stage, "failed", f"the imports failed; see {self._log.name}")
                elif left < _LEAST_SECONDS:
                    self._end_without_result(stage, "skipped", "the time limit of the check is used up")
                else:
                    self._run_stage(stage, seconds, work, weights)
                print(markdown.stage_text(self.report, stage.name), flush=True)
        return self.report

    @contextmanager
    def _serving(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._server is not None:
                self._server.kill()
                self._server = None

    def _start_server(self) -> bool:
        """Start the server unless it runs; return False if its imports failed."""
        self._server = self._server or Server(self._preloaded, self._log)
        if self._server.wait_ready(_READY_SECONDS * self._factor):
            return True
        self._server.kill()
        self._server = None
        return False

    def _end_without_result(self, stage: Stage, status: Status, text: str) -> None:
        self.report.stages[stage.name] = 0.0
        self.report.rows.append(Row(stage.name, "stage", status, text))
        self._save()

    def _run_stage(self, stage: Stage, seconds: float, work: Path, weights: Path) -> None:
        server = self._server
        assert server is not None
        before, began = self.report.rows, time.monotonic()
        rows = work / f"rows-{stage.name}.jsonl"
        with self._log.open("a") as file:
            file.write(f"\n===== {stage.name} =====\n")
        request = {
            "stage": stage.name, "module": stage.path, "work": str(work), "weights": str(weights), "rows": str(rows),
            "tiny": self.report.tiny, "deadline": began + seconds,
        }  # fmt: skip
        code: int | None = None
        try:
            for answer in server.run(request, began + seconds):
                code = answer
                self._keep(stage, [*before, *read_rows(rows)], began)
        finally:
            if code is None or not server.is_alive:
                server.kill()
                self._server = None
        with self._log.open("a") as file:
            file.writelines(f"\n--- {name}\n{text}\n" for name, text in _outputs(work / stage.name))
        stage_rows = read_rows(rows)
        if code is None:
            stage_rows.append(Row(stage.name, "stage", "timeout", f"ended after its time limit of {seconds:.0f} s"))
        elif code != 0 and all(row.status != "failed" for row in stage_rows):
            stage_rows.append(
                Row(stage.name, "stage", "failed", f"its process ended with {code}; see {self._log.name}")
            )
        self._keep(stage, [*before, *stage_rows], began)
        self._save()

    def _keep(self, stage: Stage, rows: list[Row], began: float) -> None:
        """Store the rows so far, if there are new ones."""
        self.report.stages[stage.name] = round(time.monotonic() - began, 1)
        if rows != self.report.rows:
            self.report.rows = rows
            self._save()

    def _save(self) -> None:
        self.report.save(self._output / "gpu-check.json")
        (self._output / "gpu-check.md").write_text(markdown.page_part(self.report))


@contextmanager
def _scratch() -> Iterator[tuple[Path, Path]]:
    """Create the scratch folders and delete them after the block."""
    memory = Path("/dev/shm")
    is_large = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _WEIGHTS_BYTES
    work = Path(tempfile.mkdtemp(prefix="anneal-gpu-check-"))
    weights = Path(tempfile.mkdtemp(prefix="anneal-weights-", dir=memory if is_large else work))
    try:
        yield work, weights
    finally:
        shutil.rmtree(weights, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return the environment of training processes, in which no stage reaches a network."""
    return get_settings().trainer_environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Server:
    """Process from which stages are forked (`benchmarks.gpu_check.stage`), and the stage that runs."""

    def __init__(self, preloaded: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_check.stage", *preloaded], cwd=ROOT, env=_environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        self._stage: int | None = None
        self._unfinished = b""
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        """True if it can fork another stage."""
        return self._process.poll() is None

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it has imported the libraries; return False if it ended or the time is over."""
        deadline = time.monotonic() + seconds
        while not self._is_ready and time.monotonic() < deadline:
            numbers = self._answers()
            if numbers is None:
                return False
            self._is_ready = bool(numbers)
        return self._is_ready

    def run(self, request: dict[str, Any], deadline: float) -> Iterator[int | None]:
        """Run a stage: yield None several times a second, and its exit code at the end; stop at the deadline."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        while time.monotonic() < deadline:
            numbers = self._answers()
            if numbers is None:
                yield self._process.wait(_END_SECONDS) or 1
                return
            for number in numbers:
                if self._stage is not None:
                    _end_session(self._stage)
                    self._stage = None
                    yield number
                    return
                self._stage = number
            yield None

    def _answers(self) -> list[int] | None:
        """Wait for a moment; return the numbers that the server has written meanwhile, None if it has ended."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _POLL_SECONDS)
        if not readable:
            return []
        data = os.read(self._process.stdout.fileno(), 4096)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [int(line) for line in lines] if data else None

    def kill(self) -> None:
        """Kill the server, and the stage with everything that it has started."""
        if self._stage is not None:
            _end_session(self._stage)
        self._process.kill()
        self._process.wait(_END_SECONDS)


def _end_session(leader: int) -> None:
    """End what is left of a stage: SIGTERM, after which a service stops its servers, then SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)


def _outputs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and end of the output of each process of a stage."""
    for path in sorted((*folder.rglob("stderr"), *folder.rglob("stdout"))) if folder.is_dir() else ():
        text = path.read_text(errors="replace").strip()
        if text:
            yield str(path.relative_to(folder)), text[-_MOST_OUTPUT:]


def _commit() -> str:
    """Return the commit of the source, with a mark if files differ from it; `unknown` without a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()
