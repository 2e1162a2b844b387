"""Checkpoints that an attempt starts from: which ones, and that they are whole in this worker's storage."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Executable, select

from anneal.contracts.attempt.job import EvaluatedCheckpoint
from anneal.contracts.methods import method_of
from anneal.contracts.plugins import has_replicas
from anneal.contracts.run_task import RunTask
from app.runs.state.checkpoints import retention
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from worker.attempts.job_error import STORAGE_UNAVAILABLE, JobError, storage_unavailable
from worker.checkpoint_files import manifest
from worker.checkpoint_store.restore import RestoreControl, RestoreOutcome, RestoreResult, restore_checkpoint
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class CheckpointSource:
    """Checkpoints for an attempt that is being prepared. Every method may raise what `obtain` raises."""

    def __init__(
        self, context: WorkerContext, run: ClaimedRun, control: RestoreControl, *, marks_corrupt: bool = True
    ) -> None:
        """Obtain checkpoints for `run`; `marks_corrupt` is False where another worker may have an intact one."""
        self._context, self._run, self._control, self._marks_corrupt = context, run, control, marks_corrupt

    def folder_of(self, checkpoint: Any) -> Path:
        """Return the folder of a checkpoint in this worker's storage."""
        return self._context.storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)

    def obtain(self, checkpoint: Any, *, raise_if_away: bool = True) -> RestoreResult:
        """Verify a checkpoint in its folder, and fetch it from the object store if it is missing or corrupt there.

        The only place where a worker fetches checkpoints. With a working copy the run keeps the folder, and no other
        run fetches it at the same time. A checkpoint from which no run can resume any more is marked as corrupt.

        Raises:
            JobError: It is out of reach now, so the run has to wait; without `raise_if_away` the result says so.
            TransferCancelled: The run is to end or to be released.
            TimeoutError: The preparation takes too long.
            OSError: This worker's own storage cannot be read, cannot take it or has no space for it.
        """
        place, check, run = self.folder_of(checkpoint), self._control.raise_if_ended, self._run
        with ExitStack() as held:
            if (copy := self._context.working_copy) is not None:
                copy.use_entry(run.id, place.parent, check)
                held.enter_context(copy.fetch_lock(place, check))
            problems = manifest.verify(place, checkpoint.manifest_sha256, check)
            if not problems:
                return RestoreResult(RestoreOutcome.WHOLE)
            result = restore_checkpoint(self._context, run, checkpoint, place, problems, self._control)
        # The configuration of an evaluation or prediction does not name the engine that may have a checkpoint without a
        # folder.
        may_be_in_engine = RunTask(run.task).is_inference and not place.exists()
        if result.outcome is RestoreOutcome.BAD and self._marks_corrupt and not may_be_in_engine:
            with self._context.engine.begin() as connection:
                connection.execute(retention.mark_corrupt(checkpoint.id, result.why, run.id, run.lease_epoch))
        if result.outcome is RestoreOutcome.AWAY and raise_if_away:
            raise self._out_of_reach(checkpoint, result)
        return result

    def obtain_newest(self, remarks: list[str]) -> Any:
        """Return the furthest checkpoint that is whole; None means start from the beginning.

        `retention.retire_checkpoints` keeps every checkpoint that this may return: the furthest one, and
        those saved by an attempt that could not reach it. Adds lines for the run's log to `remarks`.

        Raises:
            JobError: A checkpoint is out of reach and no other one is whole, or the parent run has none.
        """
        in_engine: Any = None
        away: list[tuple[Any, RestoreResult]] = []
        for checkpoint in self._resume_candidates():
            if self._is_in_engine(checkpoint):
                in_engine = in_engine or checkpoint
                continue
            result = self.obtain(checkpoint, raise_if_away=False)
            about = f"checkpoint {checkpoint.id} (step {checkpoint.step})"
            if result.outcome is RestoreOutcome.WHOLE:
                if result.why:
                    remarks.append(f"{about} was missing or corrupt here: {result.why}")
                return checkpoint
            reason = f"{about} cannot be resumed from: {result.why}"
            log.warning("%s: %s", self._run.id, reason)
            remarks.append(reason + "; using the one before it")
            if result.outcome is RestoreOutcome.AWAY:
                away.append((checkpoint, result))
        if in_engine is None and away:
            # Starting over because a store is temporarily unavailable would discard the progress it holds.
            is_refused = any(result.is_refused for _, result in away)
            checkpoint, result = away[0]
            raise self._out_of_reach(checkpoint, replace(result, is_refused=is_refused))
        # A prediction has the same answers from the start.
        if in_engine is None and self._run.resume_checkpoint_id and self._run.task != RunTask.predict:
            raise JobError(
                "config_error",
                'the parent run has no intact checkpoint: resume it with {"from": "start"} to train from the beginning',
            )
        return in_engine

    def obtain_weights(self) -> Any:
        """Return the checkpoint whose weights the run evaluates or predicts with, also if it resumes a prediction.

        None: it uses other weights. Raises as `obtain_chosen` does.
        """
        checkpoint_id = self._run.resume_checkpoint_id
        while checkpoint_id is not None:
            owner = select(Run.task, Run.resume_checkpoint_id).join(Checkpoint, Checkpoint.run_id == Run.id)
            saved_by = self._fetch_rows(owner.where(Checkpoint.id == checkpoint_id))[0]
            if saved_by.task != RunTask.predict:
                return self.obtain_chosen(checkpoint_id)
            checkpoint_id = saved_by.resume_checkpoint_id
        return None

    def obtain_chosen(self, checkpoint_id: str | None) -> Any:
        """Return the checkpoint that the run uses or exports; no other one can take its place.

        Raises:
            JobError: It no longer exists, or is not reachable now.
        """
        query = select(Checkpoint.__table__).where(Checkpoint.id == checkpoint_id)
        checkpoint = self._fetch_rows(query)[0]
        is_export = self._run.task == RunTask.export
        why = "it was deleted" if checkpoint.deleted_at else checkpoint.bad_reason
        if why is None and not (is_export and self._is_in_engine(checkpoint)):
            result = self.obtain(checkpoint)
            why = None if result.outcome is RestoreOutcome.WHOLE else result.why
        if why is not None:
            done, again = ("exported", "export") if is_export else ("used", "use")
            raise JobError("config_error", f"checkpoint {checkpoint.id} cannot be {done}: {why}; {again} another one")
        return checkpoint

    def obtain_best_evaluated(self) -> EvaluatedCheckpoint | None:
        """Return the checkpoint with the best evaluation, the earliest of several, of this run and those it resumes.

        Raises:
            JobError: Its weights are to be exported, and it is not reachable now.
        """
        method = method_of(self._run.config)
        evaluated = [
            (method.to_score(metric), checkpoint.step, checkpoint)
            for checkpoint in self._resume_candidates()
            if isinstance(metric := checkpoint.metrics.get(method.eval_metric), int | float)
        ]
        if not evaluated:
            return None
        score, step, best = min(evaluated, key=lambda candidate: candidate[:2])
        is_exported = self._run.task == RunTask.train and self._run.config.get("export") != "last"
        if self._context.working_copy is not None and is_exported:
            try:
                self.obtain(best)
            except JobError as error:
                if error.pause_seconds is not None:
                    raise
                # After hours the run goes on, and exports the last weights with a warning.
        return EvaluatedCheckpoint(
            path=self.folder_of(best), step=step, manifest_sha256=best.manifest_sha256, metric=method.to_score(score)
        )

    def obtain_from_lead(self, place: Path) -> None:
        """Fetch a checkpoint of the lead, which may still be about to send it, to its folder here.

        Raises:
            JobError: It cannot be fetched.
        """
        run_id, attempt = place.parents[1].name, int(place.parent.name.removeprefix("a"))
        query = select(Checkpoint.__table__).where(
            Checkpoint.run_id == run_id, Checkpoint.attempt == attempt, Checkpoint.name == place.name
        )
        until = time.monotonic() + self._context.settings.hang_seconds
        while True:
            checkpoint = self._fetch_rows(query)[0]
            result = self.obtain(checkpoint, raise_if_away=False)
            if result.outcome is RestoreOutcome.WHOLE:
                return
            if checkpoint.replicated_at is not None or time.monotonic() >= until:
                message = f"checkpoint {checkpoint.id}, from which the run continues, cannot be fetched: {result.why}"
                raise JobError(STORAGE_UNAVAILABLE, message, is_transient=True)
            self._control.raise_if_ended()
            time.sleep(_LOOK_SECONDS)

    def _out_of_reach(self, checkpoint: Any, result: RestoreResult) -> JobError:
        reason = f"checkpoint {checkpoint.id} (step {checkpoint.step}) cannot be read: {result.why}"
        return storage_unavailable(self._context.engine, self._run, reason, is_refused=result.is_refused)

    def _is_in_engine(self, checkpoint: Any) -> bool:
        """Return True if the trainer fetches a checkpoint from the engine that the run's configuration names."""
        is_elsewhere = has_replicas(self._run.config) and checkpoint.replicated_at is None
        return is_elsewhere and not self.folder_of(checkpoint).exists()

    def _resume_candidates(self) -> Iterator[Any]:
        """Yield this run's checkpoints, then the one it was created to resume and those before it, of all ancestors.

        Each query ends before its rows are verified: reading gigabytes must not keep a transaction open.
        """
        table = Checkpoint.__table__
        yield from self._fetch_rows(retention.select_restorable(self._run.id).with_only_columns(*table.c))  # type: ignore[attr-defined]
        resumes = self._run.resume_checkpoint_id
        while resumes:
            chosen = next(iter(self._fetch_rows(select(table).where(table.c.id == resumes))), None)
            if chosen is None:
                return
            (saved_by,) = self._fetch_rows(select(Run.task, Run.resume_checkpoint_id).where(Run.id == chosen.run_id))
            if self._run.task == RunTask.predict != saved_by.task:
                return  # it has the weights
            if chosen.deleted_at is None and chosen.bad_reason is None:
                yield chosen
            earlier = retention.select_restorable(chosen.run_id, below_step=chosen.step)
            yield from self._fetch_rows(earlier.with_only_columns(*table.c))  # type: ignore[attr-defined]
            resumes = saved_by.resume_checkpoint_id

    def _fetch_rows(self, statement: Executable) -> Sequence[Any]:
        with self._context.engine.connect() as connection:
            return connection.execute(statement).all()
