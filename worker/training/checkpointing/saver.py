"""Checkpoints of a trainer: written completely or not at all, and restored so that training continues exactly."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit as BnbOptimizer

from anneal.contracts.attempt.job import EvaluatedCheckpoint
from anneal.contracts.attempt.messages import AnsweredSaves
from app.infra.files.tree import bytes_below, remove_tree
from worker.checkpoint_files import manifest, resume_fidelity
from worker.training.checkpointing import fidelity_check
from worker.training.checkpointing.async_writer import AsyncWriter
from worker.training.checkpointing.disk_full import CheckpointDiskSpace, disk_full_failure, missing_checkpoint_warning
from worker.training.checkpointing.pinned_memory import InsufficientHostMemory, PinnedMemory
from worker.training.checkpointing.snapshot import Snapshot, SnapshotBuilder, expected_bytes
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure, classify_error
from worker.training.model.parallel.sharding import PartNotWritten
from worker.training.plugins.checkpoint_engines import EngineCopier
from worker.training.plugins.hooks import set_learning_rate
from worker.training.trainer_protocol import ServiceTrainer
from worker.wire.heartbeat import HeartbeatCallback, heartbeat_while_growing, no_heartbeat

_KINDS_DURING_TRAINING = {"periodic", "best"}

_BNB_STATES = {"state1", "state2"}
"""State tensors that bitsandbytes pages."""


class SavingTrainer(ServiceTrainer, Protocol):
    """A trainer that saves checkpoints."""

    saving: "CheckpointSaver"


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Facts about a checkpoint, for its manifest and for the supervisor."""

    step: int
    facts: dict[str, Any]
    kind: str
    epoch: float | None
    answered_saves: AnsweredSaves = field(default_factory=AnsweredSaves)
    metrics: dict[str, float | None] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of files that earlier checkpoints have too, which are not read again."""


def save_checkpoint(trainer: SavingTrainer) -> bool:
    """Save `checkpoint-<step>` in the attempt's folder, and report it once it is durably on disk.

    A checkpoint during training (periodic, best) is copied to host memory, and a thread writes it while training goes
    on. One at an end (final, stop, drain), or one for which there is too little memory, is written before this returns.
    One that is still being written is waited for first. One that does not fit on the disk is skipped with a warning;
    only a finished run cannot do without its last one. Returns True if training waited for the disk.

    Every rank of a sharded run calls this: rank 0 decides, and the others write their parts.

    Raises:
        TrainingFailure: `disk_full`, for this checkpoint or the one before it; no partial checkpoint remains.
    """
    run, saving = trainer.run, trainer.saving
    if not run.ranks.is_first:
        return _follow_save(trainer)
    during_training = run.save_kind in _KINDS_DURING_TRAINING and not trainer.control.should_training_stop
    waits = not during_training or saving.in_flight.is_under_way
    if waits:
        run.report.send({"type": "phase", "name": "saving"})
    try:
        writes = False
        try:
            saving.in_flight.wait(run.report.alive, saving.warn_slow_disk)
            saving.requeue_actions(trainer)
            is_on_disk = saving.in_flight.step == trainer.state.global_step  # exactly this state
            writes = not is_on_disk and saving.has_room(trainer, during_training)
        finally:
            if run.is_sharded:
                run.ranks.broadcast_value((writes, during_training))
        if writes:
            waits |= _write_checkpoint(trainer, during_training)
    except Exception as error:
        failure = classify_error(error)
        if failure.code != "disk_full" or during_training or run.save_kind == "final":
            if failure is error:
                raise
            raise failure from error
        saving.leave_out(trainer, failure.message)
    return waits


def _follow_save(trainer: SavingTrainer) -> bool:
    """Write this rank's part of the checkpoint that rank 0 writes, if it writes one; return False."""
    # First, as rank 0 does: it may wait for what this rank has failed to write.
    trainer.saving.in_flight.wait(no_heartbeat)
    writes, during_training = trainer.run.ranks.broadcast_value((False, False))
    if writes:
        with suppress(TrainingFailure):  # rank 0 has it too, and decides what follows
            _write_checkpoint(trainer, during_training)
    trainer.saved_step = trainer.state.global_step
    return False


def _write_checkpoint(trainer: SavingTrainer, during_training: bool) -> bool:
    """Write the checkpoint, or start to; return True if training waited for the disk."""
    run, step, saving = trainer.run, trainer.state.global_step, trainer.saving
    staging = run.folder / f".checkpoint-{step}.tmp"
    waits = False
    try:
        snapshot, copy = _gather_state(trainer, staging, during_training)
        if copy is None:
            pinned = {
                resume_fidelity.FIDELITY_CHECK: fidelity_check.fidelity_value(trainer, trainer.pinned_text()).hex()
            }
            _complete_checkpoint(
                saving, run, snapshot, staging, _describe_checkpoint(trainer, pinned), run.report.alive
            )
            waits = True
        else:
            about = _describe_checkpoint(trainer, {})
            saving.in_flight.begin_write(
                lambda alive: _complete_checkpoint(saving, run, copy, staging, about, alive), step
            )
    except Exception:
        if run.ranks.is_first:
            remove_tree(staging, ignore_errors=True)
        raise
    trainer.saved_step = step
    return waits


def _gather_state(trainer: SavingTrainer, staging: Path, during_training: bool) -> tuple[Snapshot, Snapshot | None]:
    """Return the state to write, and a copy of it that training does not change, if there is to be one.

    Raises:
        OSError: the disk is full.
        TrainingFailure: another rank failed.
    """
    saving, ranks, sharding = trainer.saving, trainer.run.ranks, trainer.sharding
    alive = trainer.run.report.alive
    whole = None if sharding is None else sharding.full_weights(ranks.is_first, alive)
    snapshot: Snapshot | None = None
    copy: Snapshot | None = None
    error: Exception | None = None
    try:
        if ranks.is_first:
            remove_tree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        snapshot = saving.gatherer.gather_state(trainer, staging, whole)
        copy = saving.copy_to_host(snapshot) if during_training else None
    except Exception as problem:
        if sharding is None:
            raise
        error = classify_error(problem)
    if sharding is not None and ranks.agree_on(error, stopped=copy is None):
        copy = None
    assert snapshot is not None  # noqa: S101 - else an error was raised
    return snapshot, copy


class CheckpointSaver:
    """State shared by the checkpoints of one trainer."""

    def __init__(self, run: TrainingContext) -> None:
        self.in_flight = AsyncWriter(self._on_too_little_memory)
        self.gatherer = SnapshotBuilder()
        self.engine_copier = EngineCopier(run)
        self.kept_step = run.job.resume_from.step if run.job.resume_from else 0
        """Step of the last checkpoint that is durably on disk; 0 if there is none."""
        self._run = run
        self._disk_space = CheckpointDiskSpace(run.folder, run.job.disk_reserve_bytes)
        self._memory = PinnedMemory(run.ranks.on_host if run.is_sharded else 1)
        self._is_prepared = run.is_probe  # a probe saves nothing
        self._wait_reported = self._memory_reported = False
        self._writes_in_the_loop = self._has_failed_requests = False

    def handle_step(self, trainer: ServiceTrainer) -> None:
        """Handle a completed optimizer step: prepare memory after the first one, and raise failures of the writer.

        Raises:
            TrainingFailure: the checkpoint that was being written failed.
        """
        if self._run.stop_requested is None:  # else the end of training handles it, and may do without the checkpoint
            self.in_flight.raise_failure()
            self.requeue_actions(trainer)
        self.engine_copier.raise_failure()
        if not self._is_prepared and trainer.sharding is None:
            self._is_prepared = True
            run, left = self._run, trainer.state.max_steps - trainer.state.global_step
            if min(run.save_every, run.eval_every or run.save_every) <= left:
                self._memory.prepare_memory(expected_bytes(trainer))

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Ensure that after the block, however it ends, nothing is being written and no checkpoint copy is awaited.

        Raises:
            TrainingFailure: the checkpoint that was being written failed, and the block itself did not.
        """
        report = self._run.report
        try:
            with self.in_flight.settled_after(report.alive, lambda line: report.message(line, "warning")):
                yield
                if self._run.ended_by in ("stop", "drain"):
                    self._wait_for_last()
        finally:
            self.engine_copier.wait_for_copies()
        self.engine_copier.raise_failure()

    def _wait_for_last(self) -> None:
        """Wait for the checkpoint being written; a full disk must not turn a stop into a failure."""
        try:
            self.in_flight.wait(self._run.report.alive, self.warn_slow_disk)
        except TrainingFailure as failure:
            if failure.code != "disk_full":
                raise
            line = f"The checkpoint of step {self.in_flight.step} could not be written. {failure.message}"
            self._run.report.message(line, "warning")

    def _on_too_little_memory(self, step: int | None, why: str) -> None:
        """Handle too little memory for a write in the background: from now on, training waits for checkpoints."""
        self._writes_in_the_loop = self._has_failed_requests = True
        self._memory.release()
        line = (
            f"The checkpoint of step {step} could not be written during training: the machine is short of memory "
            f"({why.partition('. ')[0]}). It is skipped, and training waits while the next ones are written."
        )
        self._run.report.message(line, "warning")
        if step is not None:
            self._run.state.left_out(step)

    def requeue_actions(self, trainer: ServiceTrainer) -> None:
        """Let the next checkpoint answer the requests of one that could not be written."""
        if self._has_failed_requests:
            self._has_failed_requests = False
            trainer.actions.requeue_saves()

    def has_room(self, trainer: ServiceTrainer, during_training: bool) -> bool:
        """Return True if the disk has room for a checkpoint now; if not, skip one during training with a warning.

        Raises:
            TrainingFailure: `disk_full`, if too many in a row did not fit, or if it is the last one of the run.
        """
        run, step = self._run, trainer.state.global_step
        why = self._disk_space.shortage_reason(expected_bytes(trainer) + self.gatherer.same_bytes)
        if why is None:
            return True
        if run.save_kind == "final":
            raise disk_full_failure(step, why)
        if not during_training:
            self.leave_out(trainer, f"it does not fit on the disk: {why}")
            return False
        every = run.save_every
        is_due = run.save_kind == "periodic" and step % every == 0
        next_step = min((step // every + 1) * every, trainer.state.max_steps)
        line = self._disk_space.skip_checkpoint(step, why, next_step, is_due)
        run.report.message(line, "warning")
        run.state.left_out(step)
        trainer.actions.fail_saves(line)
        return False

    def leave_out(self, trainer: ServiceTrainer, why: str) -> None:
        """Warn that training ends early without the checkpoint of its last step, and what that costs."""
        line = missing_checkpoint_warning(trainer.state.global_step, why, self.kept_step, self._run.ended_by == "drain")
        self._run.report.message(line, "warning")
        trainer.actions.fail_saves(line)

    def copy_to_host(self, snapshot: Snapshot) -> Snapshot | None:
        """Return a copy in host memory; None if there is too little memory, which is reported once."""
        if self._writes_in_the_loop:
            self._run.report.send({"type": "phase", "name": "saving"})
            return None
        try:
            return snapshot.copied_to(self._memory)
        except InsufficientHostMemory as error:
            if not self._memory_reported:
                self._memory_reported = True
                line = f"Training waits while checkpoints are written: {error}."
                self._run.report.message(line, "warning")
            self._run.report.send({"type": "phase", "name": "saving"})
            return None

    def warn_slow_disk(self, seconds: float) -> None:
        """Warn, once per process, that checkpoints come faster than the disk can write them."""
        if not self._wait_reported:
            self._wait_reported = True
            line = (
                f"Training waits for the previous checkpoint, which has been written for {seconds:.0f} s so far: raise "
                "`save_steps`, or use a faster disk."
            )
            self._run.report.message(line, "warning")


def _describe_checkpoint(trainer: ServiceTrainer, facts: dict[str, Any]) -> CheckpointFacts:
    """Describe a checkpoint of the current state, for its manifest and for the supervisor."""
    run, step = trainer.run, trainer.state.global_step
    return CheckpointFacts(
        step=step,
        facts={
            "run_id": run.job.run_id,
            "attempt": run.job.attempt,
            resume_fidelity.FINGERPRINT: run.fingerprint,
            **facts,
            "sampler": {"epoch": trainer.state.epoch, "samples": run.state.samples, "seed": run.config.seed},
        },
        kind=run.save_kind,
        epoch=trainer.state.epoch,
        answered_saves=trainer.actions.take_answered_saves(),
        metrics={
            # Both are means as logged: the loss of a single step may well be below the best of those.
            "loss": run.state.last_metric.get("loss", run.state.loss),
            "best_loss": run.state.best_loss,
            # Only if measured with exactly these weights: it decides which checkpoint is the best.
            run.method.eval_metric: run.state.objective if run.state.eval_step == step else None,
            f"best_{run.method.eval_metric}": run.state.best_objective,
        },
    )


def _complete_checkpoint(
    saving: CheckpointSaver,
    run: TrainingContext,
    snapshot: Snapshot,
    staging: Path,
    about: CheckpointFacts,
    alive: HeartbeatCallback,
) -> None:
    """Write what is not in the folder yet, commit the folder, and report it; no partial checkpoint remains.

    Raises:
        OSError, RuntimeError: the disk is full.
    """
    if not run.ranks.is_first:
        with suppress(PartNotWritten):  # rank 0 has it too, and decides what follows
            snapshot.write(staging, alive)  # its part; rank 0 does the rest
        return
    sha256 = commit_checkpoint(run, staging, lambda: snapshot.write(staging, alive), about, alive)
    saving.kept_step = about.step
    place, metric = run.folder / f"checkpoint-{about.step}", about.metrics[run.method.eval_metric]
    if metric is not None:
        run.note_evaluated_checkpoint(
            EvaluatedCheckpoint(path=place, step=about.step, manifest_sha256=sha256, metric=metric)
        )
    saving.engine_copier.queue_copy(place)


def commit_checkpoint(
    run: TrainingContext, staging: Path, write: Callable[[], None], about: CheckpointFacts, alive: HeartbeatCallback
) -> str:
    """Let `write` complete the folder, make it a checkpoint, report it, and return the SHA-256 of its manifest.

    No partial checkpoint remains.

    Raises:
        OSError, RuntimeError: the disk is full.
    """
    name, began = f"checkpoint-{about.step}", time.monotonic()
    try:
        with heartbeat_while_growing(alive, staging):
            write()
        sha256 = manifest.write_manifest(staging, about.step, about.facts, alive, about.digests)
        size = bytes_below(staging)
        manifest.commit(staging, run.folder / name, alive)
    except BaseException:
        remove_tree(staging, ignore_errors=True)
        raise
    run.journal.record_save(about.step)
    seconds = time.monotonic() - began
    run.report.send(
        {
            "type": "checkpoint",
            "name": name,
            "step": about.step,
            "epoch": about.epoch,
            "kind": about.kind,
            "bytes": size,
            "manifest_sha256": sha256,
            "seconds": seconds,
            **about.answered_saves,
            "metrics": about.metrics,
        }
    )
    return sha256


def verify_checkpoint(path: Path, manifest_sha256: str, alive: HeartbeatCallback = no_heartbeat) -> None:
    """Refuse a checkpoint if a single byte differs from what was written.

    Raises:
        TrainingFailure: `internal`; the message names the damaged files.
    """
    problems = manifest.verify(path, manifest_sha256, alive)
    if problems:
        raise TrainingFailure("internal", f"{path.name} cannot be resumed from: {'; '.join(problems[:5])}")


def restore_paging(optimizer: torch.optim.Optimizer) -> None:
    """Move loaded state of a paged optimizer to memory that the driver pages, as bitsandbytes allocates new state."""
    if not isinstance(optimizer, BnbOptimizer) or not optimizer.is_paged:
        return
    for state in optimizer.state.values():
        for name in _BNB_STATES & state.keys():
            loaded = state[name]
            state[name] = optimizer.get_state_buffer(loaded, dtype=loaded.dtype)
            state[name].copy_(loaded)


def reapply_rates(trainer: Any, weight_decays: list[float]) -> None:
    """Apply the configuration's learning rate and weight decay after a load, instead of the checkpoint's.

    `weight_decays` are those of the optimizer's parameter groups before the load. With unchanged values, this computes
    the same floats that the checkpoint contains.
    """
    scheduler = trainer.lr_scheduler
    rate = trainer.args.learning_rate
    scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
    rates = []
    for group, decay, factor in zip(trainer.optimizer.param_groups, weight_decays, scheduler.lr_lambdas, strict=True):
        group["weight_decay"] = decay
        group["initial_lr"] = rate
        rates.append(rate * factor(scheduler.last_epoch))
        set_learning_rate(group, rates[-1])
    scheduler._last_lr = rates
