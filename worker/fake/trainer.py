"""Trainer of the `fake` backend: a real training process that only simulates training, without torch.

Its loss depends on a state stored in the checkpoint, so a resume from the wrong place shows in every later loss. Its
samples follow a seeded order of the dataset's rows.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import ErrorInfo, RepairProposal, TrainingResult
from anneal.contracts.fake_options import FakeOptions
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import drop_unknown_fields
from app.infra.files.tree import bytes_below, remove_tree
from worker.checkpoint_files import manifest, resume_fidelity
from worker.fake.actions import Actions
from worker.fake.faults import Failure, classify_error, crash_process
from worker.wire.arguments import parse_args
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.reporter import Reporter

_ROWS_IF_UNKNOWN = 1000


@dataclass
class _State:
    """State that a checkpoint must contain."""

    step: int
    chain: str
    """Digest over all steps so far; the next loss depends on it."""
    run_id: str = ""
    first_step: int = 0
    """Step at which this run started training; above 0 if it continues another run."""
    seconds: float = 0.0
    """Training time in seconds, summed over all attempts of this run."""
    loss: float | None = None
    best_loss: float | None = None
    eval_loss: float | None = None
    """Loss of the last evaluation, at step `eval_step`."""
    eval_step: int | None = None
    best_eval_loss: float | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    """Configuration fields that actions have changed during this run."""
    ended_by: str | None = None
    """Reason why training ended at this step."""


def main(argv: list[str]) -> int:
    """Run one job; return the exit code: 0 if completed or stopped, 1 if failed."""
    job, report_fd, control_fd, _ = parse_args(argv)
    report = Reporter(report_fd)
    control = Control.start(control_fd)
    control.stop_on_sigterm()
    journal: Journal | None = None
    step = 0
    result: TrainingResult
    try:
        journal = Journal(job.journal, job.attempt)
        journal.record_start()
        training = FakeTrainer(job, report, control, journal)
        try:
            result = training.run()
        finally:
            step = training.state.step
    except Exception as problem:
        traceback.print_exc()
        error: ErrorInfo = {"code": classify_error(problem), "message": str(problem) or type(problem).__name__}
        repair = problem.repair if isinstance(problem, Failure) else None
        result = {"outcome": "failed", "step": step, "error": error, "repair": repair}
    if journal is not None:
        with contextlib.suppress(OSError):  # a full disk, which the result reports
            journal.record_stop(result["outcome"])
    report.send({"type": "result", **result})
    return 1 if result["outcome"] == "failed" else 0


class FakeTrainer:
    """Simulated training of one run, from its first to its last step."""

    def __init__(self, job: JobSpec, report: Reporter, control: Control, journal: Journal) -> None:
        self.job = job
        self.report = report
        self.control = control
        self.journal = journal
        self.folder = job.attempt_dir
        self.config = TrainingConfig.model_validate(drop_unknown_fields(job.config, job.user_set_fields))
        self.options = FakeOptions.parse_stored(self.config.extra)
        self.rows = (job.dataset and job.dataset.rows) or _ROWS_IF_UNKNOWN
        self.per_step = self.config.batch_size * self.config.gradient_accumulation_steps
        self.total = self._total_steps()
        self.faulty = job.attempt <= (self.options.faults_until_attempt or job.attempt)
        self.state = _State(0, hashlib.sha256(str(self.config.seed).encode()).hexdigest(), job.run_id)
        self.saved_step = 0
        self.bad_steps = {repair.step for repair in job.auto_repairs}
        """Steps that an earlier attempt found to corrupt the run."""
        self.improved = False
        """True if the evaluation of the current step is the best so far."""
        self.fingerprint = {
            "backend": "fake",
            "dataset": job.dataset and job.dataset.sha256,
            "device": job.device.kind if job.device else "cpu",
            "versions": {"python": sys.version.split()[0]},
        }
        self.actions = Actions(self)
        self.asked = threading.Event()
        if not self.options.ignore_stop:
            control.on_stop(lambda _request: self.asked.set())

    def run(self) -> TrainingResult:
        """Load, train, save and export; return the fields of the result record."""
        self.report.send({"type": "phase", "name": "loading"})
        self.asked.wait(self.options.load_seconds)
        self._restore_state()
        self.facts = {
            "parameters_total": self.options.checkpoint_bytes // 4,
            "parameters_trainable": self.options.checkpoint_bytes // 4,
            "device": self.job.device.id if self.job.device else "cpu",
            "versions": self.fingerprint["versions"],
            **resume_fidelity.fidelity_facts(self._fidelity_differences()),
        }
        self.report_config()
        self._report_training()
        why = self.state.ended_by or self._stop_reason()
        while why is None and self.state.step < self.total:
            self._train_step()
            self.actions.repeat_due()
            why = self._stop_reason()
            if why is None and self.state.step < self.total:
                self.actions.apply_new_actions()
                self._save_if_due()
        if self.state.step >= self.total:
            why = None
        request = self.control.stop_requested
        if why in ("stop", "drain", "epoch_end"):
            self.state.ended_by = why if why == "epoch_end" else None
            if request is None or request.saves_checkpoint:
                self._save_checkpoint("stop")
            return {"outcome": "stopped", "why": why, "step": self.state.step, "epoch": self.epoch()}
        self._save_checkpoint("stop" if why else "final")
        self._export_output()
        return {
            "outcome": "stopped" if why else "completed",
            "why": why,
            "step": self.state.step,
            "epoch": self.epoch(),
            "output": "output",
            "metrics": self._loss_values(),
        }

    def _total_steps(self) -> int:
        if self.config.max_steps is not None:
            return self.config.max_steps
        user_set_fields = self.job.user_set_fields
        if "epochs" in user_set_fields and "extra.steps" not in user_set_fields:
            return max(1, math.ceil(self.config.epochs * self.rows / self.per_step))
        return self.options.steps

    def apply_change(self, **changed: Any) -> None:
        """Apply a change of the configuration and store it in every checkpoint from now on."""
        self.state.changed |= changed
        self.config = self.config.model_copy(update=self.state.changed)
        self.total = self._total_steps()

    def report_config(self) -> None:
        """Report the configuration in force and the facts known at the start."""
        effective = self.config.model_dump(mode="json")
        self.report.send({"type": "config", "effective": effective, "replaced": [], "facts": self.facts})

    def _report_training(self) -> None:
        step, total = self.state.step, self.total
        self.report.send({"type": "phase", "name": "training", "start_step": step, "total_steps": total})

    def learning_rate(self) -> float:
        """Return the learning rate at the current step."""
        return self.config.learning_rate * (1 - self.state.step / (self.total + 1))

    def _stop_reason(self) -> str | None:
        request = self.control.stop_requested if not self.options.ignore_stop else None
        limit = self._limit_reached()
        # A drain at a limit does not change the result: another attempt would train beyond the limit.
        return request.why if request is not None and (limit is None or request.why == "stop") else limit

    def _limit_reached(self) -> str | None:
        if self.control.stop_at_epoch_end and self.state.step > self.saved_step and self._is_epoch_over():
            return "epoch_end"
        limit, at = self.config.time_limit_seconds, self.config.stop_at_step
        if limit is not None and self.state.seconds >= limit:
            return "time_limit"
        # A run that continues another one at or after that one's `stop_at_step` is meant to train on.
        return "stop_at_step" if at is not None and self.state.first_step < at <= self.state.step else None

    def _loss_values(self) -> dict[str, float | None]:
        state = self.state
        evaluated = state.eval_loss if state.eval_step == state.step else None
        return {
            "loss": state.loss,
            "best_loss": state.best_loss,
            "eval_loss": evaluated,
            "best_eval_loss": state.best_eval_loss,
        }

    def _is_epoch_over(self) -> bool:
        before = (self.state.step - 1) * self.per_step // self.rows
        return self.state.step * self.per_step // self.rows > before

    def _is_due(self, every: int | Literal["epoch"]) -> bool:
        return self._is_epoch_over() if every == "epoch" else self.state.step % every == 0

    def epoch(self) -> float:
        """Return the number of epochs so far, including the fraction of the current one."""
        return self.state.step * self.per_step / self.rows

    # One step

    def _train_step(self) -> None:
        step = self.state.step + 1
        began = time.monotonic()
        if self.faulty:
            self._inject_faults(step)
        self.asked.wait(self._step_duration(step))
        samples = self._rows_of_step(step)
        if step in self.bad_steps:
            self.state.step, self.improved = step, False
            self.journal.skip_step(step, samples)
            self.report.message(
                f"Step {step} is skipped: an earlier attempt found that it corrupts the run.", level="warning"
            )
            return
        chain = hashlib.sha256(f"{self.state.chain} {step} {samples}".encode()).hexdigest()
        loss = 1 + 7 / (1 + step / 5) + int(chain[:13], 16) / 16**13 / 10
        bad, count = self.options.non_finite_at_step, self.options.non_finite_steps
        if self.faulty and bad is not None and bad <= step < bad + count:
            loss = math.nan
        else:
            self.state.best_loss = min(loss, self.state.best_loss or math.inf)
        self.state.step, self.state.chain, self.state.loss = step, chain, loss
        self.state.seconds += time.monotonic() - began
        self.improved = False
        self.report.alive()
        self.journal.record_step(step, loss.hex(), samples)
        line = self.options.log_line.replace("{step}", str(step)).replace("{loss}", f"{loss:.4f}")
        for _ in range(self.options.log_lines_per_step):
            print(line)  # noqa: T201
        every = self.config.logging_steps
        if (every and step % every == 0) or step == self.total or not math.isfinite(loss):
            self._report_metric(loss, time.monotonic() - began)
        if not math.isfinite(loss):
            raise Failure("non_finite_loss", f"the loss of step {step} is {loss}", self._propose_rewind(step, samples))
        if self.config.eval_steps is not None and self._is_due(self.config.eval_steps):
            self.evaluate(loss + 0.1)

    def _step_duration(self, step: int) -> float:
        spread = self.options.step_jitter
        if spread == 0:
            return self.options.step_seconds
        # The mean step time is the same as without jitter.
        return self.options.step_seconds * random.Random(f"{self.config.seed} {step}").lognormvariate(
            -spread * spread / 2, spread
        )

    def _propose_rewind(self, step: int, samples: list[int]) -> RepairProposal | None:
        if self.config.on_non_finite != "rewind":
            return None
        return {"kind": "non_finite", "step": step, "rows": samples, "singled_out": []}

    def evaluate(self, loss: float, *, is_due: bool = True) -> dict[str, float]:
        """Simulate an evaluation with this loss, and return its metrics; a requested one affects no decision."""
        state = self.state
        metrics = {"eval_loss": loss, **{f"eval_{name}_loss": loss for name in self.job.extra_eval_datasets}}
        self.report.send({"type": "phase", "name": "evaluating"})
        self.report.send({"type": "eval", "step": state.step, "epoch": self.epoch(), "metrics": metrics})
        state.eval_loss, state.eval_step = loss, state.step
        if is_due:
            self.improved = state.best_eval_loss is None or loss < state.best_eval_loss
            state.best_eval_loss = min(loss, state.best_eval_loss or math.inf)
        self._report_training()
        return metrics

    def _rows_of_step(self, step: int) -> list[int]:
        first = (step - 1) * self.per_step
        return [self._row_at(position) for position in range(first, first + self.per_step)]

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, self.rows)
        if getattr(self, "_order_epoch", None) != epoch:
            self._order_epoch = epoch
            self._order = list(range(self.rows))
            random.Random(f"{self.config.seed} {epoch}").shuffle(self._order)
        return self._order[place]

    def _report_metric(self, loss: float, seconds: float) -> None:
        self.report.send(
            {
                "type": "metric",
                "step": self.state.step,
                "epoch": self.epoch(),
                "loss": loss,
                "learning_rate": self.learning_rate(),
                "grad_norm": loss / 10,
                "gpu_memory_mb": None,
                "samples_per_second": self.per_step / max(seconds, 1e-6),
                "total_steps": self.total,
                "extra": {f"{self.state.step}.{number}": loss for number in range(self.options.metric_values)},
            }
        )

    def _inject_faults(self, step: int) -> None:
        options = self.options
        if options.out_of_memory_above is not None and self.config.batch_size > options.out_of_memory_above:
            raise Failure("out_of_memory", f"a batch size of {self.config.batch_size} is configured to be too large")
        if step == options.fail_at_step:
            raise Failure(options.fail_code, f"step {step} is configured to fail")
        if step == options.hang_at_step:
            while True:
                signal.pause()
        if step == options.crash_at_step:
            crash_process(options.crash)

    # Checkpoints

    def _save_if_due(self) -> None:
        is_requested = self.control.take_checkpoint_request() or self.actions.wants_checkpoint
        periodic = is_requested or self._is_due(self.config.save_steps)
        if periodic or self.improved:
            self._save_checkpoint("periodic" if periodic else "best")
            self._report_training()

    def _save_checkpoint(self, kind: str) -> None:
        if self.state.step == self.saved_step:
            return
        self.report.send({"type": "phase", "name": "saving"})
        began = time.monotonic()
        name = f"checkpoint-{self.state.step}"
        with _staging_folder(self.folder / f".{name}.tmp") as staging:
            (staging / "state.json").write_text(json.dumps(asdict(self.state)))
            with (staging / "weights.bin").open("wb") as weights:
                _fill_file(weights.fileno(), self.options.checkpoint_bytes, self.state.chain)
            sha256 = manifest.write_manifest(staging, self.state.step, {resume_fidelity.FINGERPRINT: self.fingerprint})
            time.sleep(self.options.save_seconds)
            size = bytes_below(staging)
            manifest.commit(staging, self.folder / name)
        self.saved_step = self.state.step
        self.journal.record_save(self.state.step)
        self.report.send(
            {
                "type": "checkpoint",
                "name": name,
                "step": self.state.step,
                "epoch": self.epoch(),
                "kind": kind,
                "bytes": size,
                "manifest_sha256": sha256,
                "seconds": time.monotonic() - began,
                **self.actions.take_answered_saves(),
                "metrics": self._loss_values(),
            }
        )

    def _restore_state(self) -> None:
        source = self.job.resume_from
        if source is None:
            return
        folder = source.path
        problems = manifest.verify(folder, source.manifest_sha256)
        if problems:
            raise Failure("internal", f"checkpoint {folder.name} is corrupt: {'; '.join(problems)}")
        self.state = _State(**json.loads((folder / "state.json").read_text()))
        self.saved_step = self.state.step
        if self.state.run_id != self.job.run_id:  # a new run that continues another has its own clock and limits
            self.state.run_id, self.state.first_step, self.state.seconds = self.job.run_id, self.state.step, 0.0
            self.state.changed, self.state.ended_by = {}, None
        self.apply_change()

    def _fidelity_differences(self) -> list[str]:
        source = self.job.resume_from
        return resume_fidelity.fingerprint_differences(source.path, self.fingerprint) if source else []

    def _export_output(self) -> None:
        self.report.send({"type": "phase", "name": "exporting"})
        with _staging_folder(self.folder / ".output.tmp") as staging:
            facts = {"base_model": self.config.base_model, "step": self.state.step, "chain": self.state.chain}
            (staging / "fake_model.json").write_text(json.dumps(facts))
            point = {"step": self.state.step, **self._loss_values()}
            (staging / "metrics.jsonl").write_text(json.dumps(point) + "\n")
            manifest.commit(staging, self.folder / "output")


@contextlib.contextmanager
def _staging_folder(folder: Path) -> Any:
    remove_tree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove_tree(folder, ignore_errors=True)


def _fill_file(descriptor: int, size: int, seed: str) -> None:
    block = random.Random(seed).randbytes(min(size, 1 << 20))
    while size > 0:
        size -= os.write(descriptor, block[:size])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
