"""Answers of a prediction on the disk: a file in the order of the dataset, its checkpoints, and the output."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from app.infra.files.file_manifest import MANIFEST
from app.infra.files.tree import remove_tree
from worker.checkpoint_files import manifest
from worker.training.checkpointing.saver import CheckpointFacts, commit_checkpoint
from worker.training.context import TrainingContext
from worker.training.failures import classify_error
from worker.training.output.export import OUTPUT

PREDICTIONS = "predictions.jsonl"
TABLE = "predictions.parquet"
_STATE = "prediction_state.json"
_AHEAD = "ahead.jsonl"
_COMPLETE_BYTES = 16 * 1024**2
"""Size from which a file of answers is complete. A checkpoint copies only the file that still grows."""
_ROWS_AT_ONCE = 1_000
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Line ends of Unicode, escaped: `str.splitlines` and others would divide a row at them."""
_MOST_SECONDS = 60.0
_PART_OF_TIME = 0.1
_SAVE_RATIO = 20.0
"""Time between two checkpoints: at most a minute, and earlier in an attempt a tenth of what it has taken, but so many
times what the last one took."""


class AnsweredRow(TypedDict):
    """Row of the output."""

    row: int
    prompt: Any
    reference: str | None
    prediction: str | None
    """None: the model could not answer."""
    finish_reason: str
    """`stop`, `length`, or `skipped`: the model could not answer."""
    problem: str | None
    prompt_tokens: int
    completion_tokens: int
    scores: dict[str, float | None]


class AnswersFile:
    """Answers so far: rows in the order of the dataset in files, and those after them in memory.

    A checkpoint has both, and one of a later attempt starts with them. A file that is complete is never changed,
    so that checkpoints share it.
    """

    def __init__(self, run: TrainingContext, total: int) -> None:
        self.ahead: dict[int, AnsweredRow] = {}
        """Answered rows of the part of the dataset that is being answered."""
        self.written = 0
        """Number of rows in the files."""
        self.batch_tokens: int | None = None
        """Maximum number of tokens of a batch so far, so that later attempts make the same batches."""
        self._run, self.total = run, total
        self._folder = run.folder / "answers"
        self._complete: list[Path] = []
        """Files in the order of their rows that are not written to any more; `_growing` follows them."""
        self._digests: dict[str, str] = {}
        """SHA-256 of the complete files that a checkpoint has."""
        self._began = self._saved_at = time.monotonic()
        self._save_seconds = 0.0
        self._restore()
        self._saved = self.answered

    @property
    def answered(self) -> int:
        """Number of rows that are answered."""
        return self.written + len(self.ahead)

    @property
    def _growing(self) -> Path:
        return self._folder / f"answers-{len(self._complete):05}.jsonl"

    def append_rows(self, rows: Sequence[AnsweredRow]) -> None:
        """Append rows to the last file, which are the next ones of the dataset."""
        path = self._growing
        with path.open("ab") as file:
            file.writelines(_encoded(row) for row in rows)
            size = file.tell()
        self.written += len(rows)
        self.ahead.clear()
        if size >= _COMPLETE_BYTES:
            self._complete.append(path)
            self._growing.touch()

    def save_if_due(self) -> None:
        """Save a checkpoint if the last one is long ago."""
        now = time.monotonic()
        seconds = min(_PART_OF_TIME * (now - self._began), _MOST_SECONDS)
        if now - self._saved_at >= max(seconds, _SAVE_RATIO * self._save_seconds):
            self.save("periodic")

    def save(self, kind: str) -> None:
        """Save a checkpoint of all answers, unless the last one has them.

        Raises:
            TrainingFailure: `disk_full`; no partial checkpoint remains.
        """
        run, began = self._run, time.monotonic()
        if self.answered == self._saved:
            return
        staging = run.folder / f".checkpoint-{self.answered}.tmp"
        remove_tree(staging, ignore_errors=True)
        about = CheckpointFacts(
            step=self.answered,
            facts={"run_id": run.job.run_id, "attempt": run.job.attempt},
            kind=kind,
            epoch=self.answered / self.total,
            digests=self._digests,
        )
        try:
            staging.mkdir()
            commit_checkpoint(run, staging, lambda: self._write_to(staging), about, run.report.alive)
        except Exception as error:
            raise classify_error(error) from error
        described = json.loads((run.folder / f"checkpoint-{about.step}" / MANIFEST).read_bytes())["files"]
        self._digests = {path.name: described[path.name]["sha256"] for path in self._complete}
        self._saved, self._saved_at = self.answered, time.monotonic()
        self._save_seconds = self._saved_at - began

    def read_rows(self) -> Iterator[AnsweredRow]:
        """Yield the rows in the files."""
        for path in (*self._complete, self._growing):
            with path.open("rb") as file:
                for line in file:
                    row: AnsweredRow = json.loads(line)
                    yield row

    def write_output(self, scores: Sequence[str]) -> str:
        """Make the files the output, with a table of the same rows; return the folder's name."""
        run = self._run
        run.report.send({"type": "phase", "name": "saving"})
        staging = run.folder / f".{OUTPUT}.tmp"
        remove_tree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            with (staging / PREDICTIONS).open("wb") as whole:
                for path in (*self._complete, self._growing):
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, whole)
                    run.report.alive()
            self._write_table(staging / TABLE, scores)
            run.history.copy_to(staging)
            manifest.commit(staging, run.folder / OUTPUT, run.report.alive)
            remove_tree(self._folder)
        except Exception as error:
            remove_tree(staging, ignore_errors=True)
            raise classify_error(error) from error
        return OUTPUT

    def _write_to(self, folder: Path) -> None:
        for path in self._complete:
            _share_file(path, folder / path.name)
        shutil.copyfile(self._growing, folder / self._growing.name)
        (folder / _AHEAD).write_bytes(b"".join(_encoded(row) for _, row in sorted(self.ahead.items())))
        usage = self._run.state.reward_usage
        state = {"written": self.written, "batch_tokens": self.batch_tokens, "reward_usage": usage}
        (folder / _STATE).write_text(json.dumps(state))
        self._run.history.copy_to(folder)

    def _restore(self) -> None:
        resume = self._run.resume_from
        self._run.history.start_from(None if resume is None else resume.path)
        remove_tree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        if resume is None:
            self._growing.touch()
            return
        state = json.loads((resume.path / _STATE).read_text())
        self.written, self.batch_tokens = state["written"], state["batch_tokens"]
        self._run.state.reward_usage = state.get("reward_usage", {})
        *complete, growing = sorted(resume.path.glob("answers-*.jsonl"))
        for path in complete:
            _share_file(path, self._folder / path.name)
            self._complete.append(self._folder / path.name)
        shutil.copyfile(growing, self._growing)
        with (resume.path / _AHEAD).open("rb") as lines:
            self.ahead = {row["row"]: row for row in map(json.loads, lines)}

    def _write_table(self, path: Path, scores: Sequence[str]) -> None:
        """Write the rows as Parquet; messages of chats are JSON, as their keys differ."""
        texts = [pa.field(name, pa.string()) for name in ("prompt", "reference", "prediction")]
        counts = [pa.field(name, pa.int32()) for name in ("prompt_tokens", "completion_tokens")]
        values = pa.struct([pa.field(name, pa.float64()) for name in scores])
        last = [pa.field("finish_reason", pa.string()), pa.field("problem", pa.string()), *counts]
        fields = [pa.field("row", pa.int64()), *texts, *last]
        schema = pa.schema([*fields, *([pa.field("scores", values)] if scores else [])])
        with pq.ParquetWriter(path, schema) as writer:
            batch: list[Mapping[str, Any]] = []
            for row in self.read_rows():
                prompt = row["prompt"] if isinstance(row["prompt"], str) else _json(row["prompt"])
                batch.append({**row, "prompt": prompt})
                if len(batch) == _ROWS_AT_ONCE:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                    self._run.report.alive()
                    batch = []
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))


def _encoded(row: AnsweredRow) -> bytes:
    return f"{_json(row)}\n".encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)


def _share_file(path: Path, target: Path) -> None:
    """Give a file that is not changed any more a second name; copy it where the file system allows none."""
    try:
        target.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, target)
