"""Recorder of checkpoints and of the actions that are done with them."""

from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, case, exists, select, update

from anneal.contracts.attempt.messages import ActionRecord, CheckpointRecord
from anneal.contracts.run_status import LIVE
from app.infra.ids import new_id
from app.infra.storage import checkpoint_name
from app.runs.events.log import NewEvent
from app.runs.state.checkpoints import retention
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from worker.checkpoint_files import manifest
from worker.checkpoint_store.cleanup import remove_folders
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.action_results import ActionResult, action_result
from worker.ingest.record_parser import validate_record
from worker.ingest.recorders.metrics import MetricRecorder, checked_count
from worker.ingest.sink import EventSink
from worker.ingest.spool import RunUpdate


class CheckpointRecorder:
    """Recorder of the checkpoints and actions of one attempt."""

    def __init__(self, context: WorkerContext, run: ClaimedRun, sink: EventSink, metrics: MetricRecorder) -> None:
        self._context, self._run, self._sink, self._metrics = context, run, sink, metrics

    def record_action(self, received: dict[str, Any], ts: float) -> None:
        """Store the result of an action that needs no checkpoint."""
        record = validate_record(ActionRecord, received)
        answered = action_result(self._run, record, ts)
        if record.get("total_steps"):
            self._metrics.set_total_steps(record["total_steps"])
            self._metrics.set_progress(checked_count(record["step"], "step"), float(record.get("epoch") or 0))

        def store_result(connection: Connection) -> None:
            connection.execute(answered.change)

        self._sink.enqueue_item(RunUpdate(store_result, answered.event))

    def record_checkpoint(self, received: dict[str, Any], ts: float) -> None:
        """Store a checkpoint that is on disk, retire older ones, and have it sent to the object store."""
        record = validate_record(CheckpointRecord, received)
        step = checked_count(record["step"], "step")
        # The name becomes the path of a folder that is removed later.
        if record["name"] != checkpoint_name(step):
            raise ValueError(f"a checkpoint at step {step} must be named {checkpoint_name(step)}")
        row = self._row_of(record)
        retired: list[tuple[int, str]] = []
        answered = self._results_of_actions(record, row, ts)
        folder = self._context.storage.checkpoint_dir(self._run.id, self._run.attempt, step)
        is_in_place = manifest.is_in_place(folder, record["manifest_sha256"], step)

        def store_checkpoint(connection: Connection) -> None:
            if connection.scalar(select(Checkpoint.id).where(Checkpoint.id == row["id"])):
                return
            retired[:] = self._insert_row(connection, row, is_in_place)
            # One transaction: an action is done when its checkpoint exists, and it does not exist without the action.
            for result in answered:
                connection.execute(result.change)

        def after_storing() -> None:
            remove_folders(self._context, self._run.id, retired)
            if self._context.uploader:
                self._context.uploader.queue_checkpoint(SimpleNamespace(**row))
                self._context.uploader.schedule_sweep()

        if self._sink.progress is None or self._sink.progress.step < step:
            # It is reported once it is on disk, and training may have continued meanwhile.
            self._metrics.set_progress(step, row["epoch"])
        data = {"checkpoint_id": row["id"], "step": step, "kind": row["kind"], "bytes": row["bytes"]}
        event = NewEvent.from_payload("checkpoint", ts, data)
        more = tuple(result.event for result in answered)
        self._sink.enqueue_item(RunUpdate(store_checkpoint, event, after_storing, more))

    def _row_of(self, record: CheckpointRecord) -> dict[str, Any]:
        step, metrics = record["step"], record.get("metrics") or {}
        return {
            "id": new_id("ckpt"),
            "run_id": self._run.id,
            "attempt": self._run.attempt,
            "name": record["name"],
            "step": step,
            "epoch": record.get("epoch") or 0.0,
            "kind": record["kind"],
            "bytes": record["bytes"],
            "manifest_sha256": record["manifest_sha256"],
            "save_seconds": record.get("seconds"),
            "pinned": bool(record.get("pinned")),
            "metrics": {
                **{name: value for name, value in metrics.items() if isinstance(value, int | float)},
                "best_loss": self._metrics.best_loss_at(step),
            },
        }

    def _results_of_actions(self, record: CheckpointRecord, row: dict[str, Any], ts: float) -> list[ActionResult]:
        """Return the results of the actions that have asked for the checkpoint."""
        result: dict[str, object] = {"checkpoint_id": row["id"], "pinned": row["pinned"]}
        return [
            action_result(
                self._run,
                {
                    "type": "action",
                    "id": action["id"],
                    "action": action["action"],
                    "step": row["step"],
                    "status": "done",
                    "result": result,
                },
                ts,
            )
            for action in record.get("actions", ())
        ]

    def _insert_row(self, connection: Connection, row: dict[str, Any], is_in_place: bool) -> list[tuple[int, str]]:
        """Insert the checkpoint, and return the attempt and the name of those that are retired."""
        run, step = self._run, row["step"]
        connection.execute(Checkpoint.__table__.insert().values(row))  # type: ignore[attr-defined]
        # A run that makes progress between two losses may be lost any number of times. To save a step again is
        # none: the checkpoint of the earlier attempt was lost, and that of this one may be too.
        other = exists().where(Checkpoint.run_id == run.id, Checkpoint.step >= step, Checkpoint.id != row["id"])
        losses = case((~other, 0), else_=Run.lost_count) if is_in_place else Run.lost_count
        connection.execute(
            update(Run)
            .where(Run.id == run.id, Run.lease_epoch == run.lease_epoch, Run.status.in_(LIVE))
            .values(lost_count=losses, checkpoint_step=step)
        )
        keep_last = run.config.get("save_total_limit")
        return retention.retire_checkpoints(connection, run.id, keep_last) if keep_last else []
