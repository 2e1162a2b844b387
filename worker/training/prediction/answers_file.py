"""Answers of a prediction on the disk: a file in the order of the dataset, its checkpoints, and the output."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from app.infra.files.tree import remove_tree
from worker.checkpoint_files import manifest
from worker.training.checkpointing.saver import CheckpointFacts, commit_checkpoint
from worker.training.context import TrainingContext
from worker.training.failures import classify_error
from worker.training.output.export import OUTPUT

PREDICTIONS = "predictions.jsonl"
TABLE = "predictions.parquet"
_STATE = "prediction_state.json"
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
    """Answers so far: rows in the order of the dataset in a file, and those after them in memory.

    A checkpoint has both, and one of a later attempt starts with them.
    """

    def __init__(self, run: TrainingContext, total: int) -> None:
        self.ahead: dict[int, AnsweredRow] = {}
        """Answered rows of the part of the dataset that is being answered."""
        self.written = 0
        """Number of rows in the file."""
        self.batch_tokens: int | None = None
        """Maximum number of tokens of a batch so far, so that later attempts make the same batches."""
        self._run, self.total = run, total
        self._path = run.folder / PREDICTIONS
        self._began = self._saved_at = time.monotonic()
        self._save_seconds = 0.0
        self._restore()
        self._saved = self.answered

    @property
    def answered(self) -> int:
        """Number of rows that are answered."""
        return self.written + len(self.ahead)

    def append_rows(self, rows: Sequence[AnsweredRow]) -> None:
        """Append rows to the file, which are the next ones of the dataset."""
        with self._path.open("ab") as file:
            file.writelines(_encoded(row) for row in rows)
        self.written += len(rows)
        self.ahead.clear()

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
        )
        try:
            staging.mkdir()
            commit_checkpoint(run, staging, lambda: self._write_to(staging), about, run.report.alive)
        except Exception as error:
            raise classify_error(error) from error
        self._saved, self._saved_at = self.answered, time.monotonic()
        self._save_seconds = self._saved_at - began

    def read_rows(self) -> Iterator[AnsweredRow]:
        """Yield the rows in the file."""
        with self._path.open("rb") as file:
            for line in file:
                row: AnsweredRow = json.loads(line)
                yield row

    def write_output(self, scores: Sequence[str]) -> str:
        """Make the file the output, with a table of the same rows; return the folder's name."""
        run = self._run
        run.report.send({"type": "phase", "name": "saving"})
        staging = run.folder / f".{OUTPUT}.tmp"
        remove_tree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            shutil.copyfile(self._path, staging / PREDICTIONS)
            self._write_table(staging / TABLE, scores)
            run.history.copy_to(staging)
            manifest.commit(staging, run.folder / OUTPUT, run.report.alive)
            self._path.unlink()
        except Exception as error:
            remove_tree(staging, ignore_errors=True)
            raise classify_error(error) from error
        return OUTPUT

    def _write_to(self, folder: Path) -> None:
        shutil.copyfile(self._path, folder / PREDICTIONS)
        with (folder / PREDICTIONS).open("ab") as file:
            file.writelines(_encoded(row) for _, row in sorted(self.ahead.items()))
        usage = self._run.state.reward_usage
        state = {"written": self.written, "batch_tokens": self.batch_tokens, "reward_usage": usage}
        (folder / _STATE).write_text(json.dumps(state))
        self._run.history.copy_to(folder)

    def _restore(self) -> None:
        resume = self._run.resume_from
        self._run.history.start_from(None if resume is None else resume.path)
        self._path.write_bytes(b"")
        if resume is None:
            return
        state = json.loads((resume.path / _STATE).read_text())
        self.written, self.batch_tokens = state["written"], state["batch_tokens"]
        self._run.state.reward_usage = state.get("reward_usage", {})
        with (resume.path / PREDICTIONS).open("rb") as saved, self._path.open("wb") as file:
            for at, line in enumerate(saved):
                if at < self.written:
                    file.write(line)
                else:
                    row: AnsweredRow = json.loads(line)
                    self.ahead[row["row"]] = row

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
