"""Reference model of the methods that compare with it: when its log-probabilities are computed, and the progress."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset, concatenate_datasets
from datasets.table import InMemoryTable

from worker.training.context import TrainingContext
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import preparation
from worker.training.overrides import ReferenceOverrides

_DIGEST = b"digest"
"""Key in a file's metadata; its value names the data that the log-probabilities belong to."""
_ROWS_AT_ONCE = 10_000


def is_precomputed(run: TrainingContext) -> bool:
    """Return True if the reference log-probabilities are computed once, before the first step.

    Without an adapter the alternative is a second copy of the model. With an adapter it is a forward pass in every
    step, which is more work from the second epoch on, and the only way if the model is sharded.
    """
    if run.is_sharded:
        return False
    trains_again = not run.is_inference and preparation.configured_steps(run) > run.steps_per_epoch
    return run.config.lora_r is None or trains_again


class ReferenceMixin(ReferenceOverrides, ServiceTrainerMixin):
    """Mixin for TRL's trainers with reference log-probabilities on tokenized rows.

    It reports their progress, and keeps those computed before the first step in each checkpoint.
    """

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        self._reference_files: dict[str, bytes] = {}
        super().__init__(run, **options)

    def has_reference_pass(self) -> bool:
        return not self.precompute_ref_logps

    def compute_reference(
        self, dataset: Dataset, name: str, batch_size: int, original: Callable[[], Dataset]
    ) -> Dataset:
        """Return the rows with their reference log-probabilities, those of the checkpoint where it has them."""
        file, digest = f"reference_{name}.arrow", _digest_rows(dataset, batch_size)
        stored = self._kept_reference(file, digest)
        if stored is not None:
            self._reference_files[file] = _to_bytes(stored, digest)
            return concatenate_datasets([dataset, Dataset(InMemoryTable(stored))], axis=1)
        self._reference_done, self._reference_rows = 0, len(dataset)
        rows = f"{len(dataset)} {self.run.method.row_noun}"
        self.run.report.message(f"Computing the reference log-probabilities of {rows} ({name}).")
        with self.run.ranks.alone():  # every rank needs those of all rows
            done = original()
        added = [column for column in done.column_names if column not in dataset.column_names]
        self._reference_files[file] = _to_bytes(done.select_columns(added).with_format("arrow")[:], digest)
        return done

    def _kept_reference(self, file: str, digest: str) -> pa.Table | None:
        """Return the log-probabilities in the checkpoint to resume from; None without any for exactly this data."""
        path = self.run.resume_from.path / file if self.run.resume_from else None
        if path is None or not path.is_file():
            return None
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        return table if table.schema.metadata[_DIGEST] == digest.encode() else None

    def save_constant_files(self, folder: Path) -> None:
        super().save_constant_files(folder)
        for name, content in self._reference_files.items():
            (folder / name).write_bytes(content)

    def compute_ref_log_probs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        self._reference_done += len(inputs["input_ids"]) // (2 if self.run.method.has_pairs else 1)
        self.run.report.alive()
        self.run.report_progress("loading", self._reference_done, self._reference_rows)
        return super().compute_ref_log_probs(model, inputs)


def _digest_rows(dataset: Dataset, batch_size: int) -> str:
    """Digest the rows and the size of the batches, whose padding affects how log-probabilities are rounded."""
    digest, rows = hashlib.sha256(str(batch_size).encode()), dataset.with_format("arrow")
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        for batch in rows[start : start + _ROWS_AT_ONCE].combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _to_bytes(table: pa.Table, digest: str) -> bytes:
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _DIGEST: digest.encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
