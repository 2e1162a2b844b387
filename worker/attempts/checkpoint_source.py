"""Checkpoints that an attempt starts from: which ones, and that they are whole in this worker's storage."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from worker.attempts.job_error import JobError, storage_unavailable
from worker.checkpoint_files import manifest
from worker.checkpoint_store.restore import RestoreControl, RestoreOutcome, RestoreResult, restore_checkpoint
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext

log = logging.getLogger(__name__)


class CheckpointSource:
    """Checkpoints for an attempt that is being prepared. Every method may raise what `obtain` raises."""

    def __init__(self, context: WorkerContext, run: ClaimedRun, control: RestoreControl) -> None:
        self._context, self._run, self._control = context, run, control

    def folder_of(self, checkpoint: Any) -> Path:
        """Return the folder of a checkpoint in this worker's storage."""
        return self._context.storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)

    def obtain(self, checkpoint: Any) -> RestoreResult:
        """Verify a checkpoint in its folder, and fetch it from the object store if it is missing or corrupt there.

        The only place where a worker fetches checkpoints. With a working copy the run keeps the folder, and no other
        run fetches it at the same time.

        Raises:
            TransferCancelled: The run is to end or to be released.
            TimeoutError: The preparation takes too long.
            OSError: This worker's own storage cannot be read, cannot take it or has no space for it.
        """
        place, check = self.folder_of(checkpoint), self._control.raise_if_ended
        with ExitStack() as held:
            if (copy := self._context.working_copy) is not None:
                copy.use_entry(self._run.id, place.parent, check)
                held.enter_context(copy.fetch_lock(place, check))
            wrong = manifest.verify(place, checkpoint.manifest_sha256, check)
            if not wrong:
                return RestoreResult(RestoreOutcome.WHOLE)
            return restore_checkpoint(self._context, self._run, checkpoint, place, wrong, self._control)

    def obtain_newest(self, remarks: list[str]) -> Any:
        """Return the furthest checkpoint that is whole; None means start from the beginning.

        `retention.retire_checkpoints` keeps every checkpoint that this may return: the furthest one, and
        those saved by an attempt that could not reach it. Adds lines for the run's log to `remarks`.

        Raises:
            JobError: A checkpoint is out of reach and no other one is whole, or the parent run has none.
        """
        in_engine: Any = None
        out_of_reach: str | None = None
        is_refused = False
        for checkpoint in self._resume_candidates():
            if self._is_in_engine(checkpoint):
                in_engine = in_engine or checkpoint
                continue
            obtained = self.obtain(checkpoint)
            about = f"checkpoint {checkpoint.id} (step {checkpoint.step})"
            if obtained.outcome is RestoreOutcome.WHOLE:
                if obtained.why:
                    remarks.append(f"{about} was missing or corrupt here: {obtained.why}")
                return checkpoint
            reason = f"{about} cannot be resumed from: {obtained.why}"
            log.warning("%s: %s", self._run.id, reason)
            remarks.append(reason + "; using the one before it")
            if obtained.outcome is RestoreOutcome.AWAY:
                out_of_reach = out_of_reach or reason
                is_refused = is_refused or obtained.is_refused
            self._mark_if_corrupt(checkpoint, obtained)
        if in_engine is not None:
            return in_engine
        if out_of_reach is not None:
            # Starting over because a store is temporarily unavailable would discard the progress it holds.
            raise storage_unavailable(self._context.engine, self._run, out_of_reach, is_refused=is_refused)
        if self._run.resume_checkpoint_id:
            raise JobError(
                "config_error",
                'the parent run has no intact checkpoint: resume it with {"from": "start"} to train from the beginning',
            )
        return None

    def obtain_chosen(self) -> Any:
        """Return the checkpoint that the run evaluates or exports; no other one can take its place.

        Raises:
            JobError: It no longer exists, or is not reachable now.
        """
        query = select(Checkpoint.__table__).where(Checkpoint.id == self._run.resume_checkpoint_id)
        checkpoint = self._fetch_rows(query)[0]
        is_export = self._run.task == RunTask.export
        why = "it was deleted" if checkpoint.deleted_at else checkpoint.bad_reason
        if why is None:
            if is_export and self._is_in_engine(checkpoint):
                return checkpoint
            obtained = self.obtain(checkpoint)
            if obtained.outcome is RestoreOutcome.WHOLE:
                return checkpoint
            why = obtained.why
            if obtained.outcome is RestoreOutcome.AWAY:
                reason = f"checkpoint {checkpoint.id} cannot be read: {why}"
                raise storage_unavailable(self._context.engine, self._run, reason, is_refused=obtained.is_refused)
            if is_export:
                self._mark_if_corrupt(checkpoint, obtained)
        done, again = ("exported", "export") if is_export else ("evaluated", "evaluate")
        raise JobError("config_error", f"checkpoint {checkpoint.id} cannot be {done}: {why}; {again} another one")

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
            obtained = self.obtain(best)
            if obtained.outcome is RestoreOutcome.AWAY:
                reason = f"the best checkpoint {best.id} cannot be read: {obtained.why}"
                error = storage_unavailable(self._context.engine, self._run, reason, is_refused=obtained.is_refused)
                if error.pause_seconds is not None:
                    raise error
                # After hours the run goes on, and exports the last weights with a warning.
        return EvaluatedCheckpoint(
            path=self.folder_of(best), step=step, manifest_sha256=best.manifest_sha256, metric=method.to_score(score)
        )

    def _is_in_engine(self, checkpoint: Any) -> bool:
        """Return True if the trainer fetches a checkpoint from the engine that the run's configuration names."""
        is_elsewhere = has_replicas(self._run.config) and checkpoint.replicated_at is None
        return is_elsewhere and not self.folder_of(checkpoint).exists()

    def _mark_if_corrupt(self, checkpoint: Any, obtained: RestoreResult) -> None:
        if obtained.outcome is RestoreOutcome.BAD:
            run = self._run
            with self._context.engine.begin() as connection:
                connection.execute(retention.mark_corrupt(checkpoint.id, obtained.why, run.id, run.lease_epoch))

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
            if chosen.deleted_at is None and chosen.bad_reason is None:
                yield chosen
            earlier = retention.select_restorable(chosen.run_id, below_step=chosen.step)
            yield from self._fetch_rows(earlier.with_only_columns(*table.c))  # type: ignore[attr-defined]
            parent = self._fetch_rows(select(Run.resume_checkpoint_id).where(Run.id == chosen.run_id))
            resumes = parent[0].resume_checkpoint_id if parent else None

    def _fetch_rows(self, statement: Executable) -> Sequence[Any]:
        with self._context.engine.connect() as connection:
            return connection.execute(statement).all()
