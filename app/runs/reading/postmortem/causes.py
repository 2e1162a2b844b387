"""Probable cause of a run's end and advised changes, from its error and the failure report of its last attempt."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.attempt.messages import AnomalyDetails
from anneal.contracts.methods import method_of, predict_options
from anneal.contracts.training_config.raw_config import is_probe
from app.runs.state.machine import WORKER_LOST

_NATIVE = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_REQUESTS_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_DIVERGED_RATIO = 1.5
"""Ratio of the last to the lowest loss above which the run diverged: its weights are damaged regardless of the rows."""
_NEXT_ATTEMPT = "another attempt resumes from the last checkpoint"


@dataclass(frozen=True)
class Cause:
    """Probable cause as a sentence, with configuration changes that would have helped."""

    sentence: str
    changes: dict[str, Any] = field(default_factory=dict)
    """New values of fields; empty if no configuration change helps."""
    advice: str | None = None
    """Effect of the changes, or another remedy."""
    is_for_new_run: bool = False
    """True if the changes help only from the first step on, so that no checkpoint is worth resuming from."""


@dataclass(frozen=True)
class RunHistory:
    """State of a run before it ended."""

    losses: Sequence[float] = ()
    """Latest logged losses, in step order."""
    has_checkpoint: bool = False
    """True if there is a checkpoint to go back to."""

    @property
    def was_diverging(self) -> bool:
        """True if the last loss was well above the lowest."""
        return len(self.losses) > 1 and self.losses[-1] > _DIVERGED_RATIO * min(self.losses) > 0


def probable_cause(
    code: str | None,
    message: str | None,
    report: FailureReport | None,
    config: Mapping[str, Any],
    outcome: str | None = None,
    before: RunHistory = RunHistory(),
) -> Cause:
    """Return the probable cause of an end with this error.

    `report` is the attempt's failure report, None if there is none; `config` is the configuration of the last
    attempt, `outcome` its outcome, and `before` the state of the run until then.
    """
    if is_probe(config):
        return _probe_cause(code, message, report, config, outcome)
    seen = report or FailureReport()
    match code:
        case "out_of_memory":
            return _out_of_memory(seen, config)
        case "non_finite_loss" | "loss_spike":
            return _bad_step(code, _anomaly_details(message, report), config, before)
        case "disk_full":
            return _disk_full(message or "", config)
        case "device_error":
            advice = "Check the devices that `anneal workers list` shows as paused, then resume the run."
            return Cause(message or "The device failed.", advice=advice)
        case "storage_unavailable":
            advice = "Resume the run once the storage works: it continues from its last checkpoint."
            return Cause(message or "The storage could not be used.", advice=advice)
        case "trainer_crashed":
            return _crash_cause(seen, resume="Resume the run")
        case "worker_lost":
            return _lost_too_often(seen, message or "")
        case None:
            return _after_a_restart(report, outcome)
        case _:
            return Cause(message or f"The run ended with `{code}`.")


def _probe_cause(
    code: str | None, message: str | None, report: FailureReport | None, config: Mapping[str, Any], outcome: str | None
) -> Cause:
    """Return the cause for a probe; changes are advised for the run that it measures, not for the probe."""
    # A probe never repairs itself, so this is not advised.
    left_out = ("extra", "on_out_of_memory")
    cause = probable_cause(
        code, message, report, {name: config[name] for name in config if name not in left_out}, outcome
    )
    if not cause.changes:
        return cause
    if code != "out_of_memory":
        return Cause(cause.sentence, advice="Fix the problem, then request another probe.")
    changes = " and ".join(f"`{name}` {value}" for name, value in cause.changes.items())
    return Cause(cause.sentence, advice=f"The measured run may fit with {changes}: request a probe with these values.")


def _out_of_memory(report: FailureReport, config: Mapping[str, Any]) -> Cause:
    phase = report.phase or "training"
    where = "The machine" if report.killed_by_kernel else "The device"
    last = report.memory[-1] if report.memory else None
    used = free = None
    if last is not None:
        host, device = (last.host_mb, last.host_free_mb), (last.device_mb, last.device_free_mb)
        used, free = host if report.killed_by_kernel else device
    usage = "" if used is None else f": shortly before, {used:,} MB were in use and {free:,} MB free"
    sentence = f"{where} ran out of memory while {phase}{usage}."
    if report.killed_by_kernel and last is not None and last.device_mb is not None:
        return Cause(sentence, advice="Add memory to the machine, or run fewer trainings on it at the same time.")
    if predict_options(config) is not None:
        advice = "Send a new prediction with fewer `max_new_tokens`, a smaller model, or a device with more memory."
        return Cause(sentence, advice=advice)
    if config.get("on_out_of_memory") == "stop" and phase not in ("loading", "tokenizing"):
        return Cause(sentence, {"on_out_of_memory": "repair"}, "The run then reduces its micro-batch size itself.")
    method = method_of(config)
    batch, least = config.get("batch_size", 1), method.min_batch_size
    size = next((number for number in range(least, batch) if batch % number == 0), None)
    if size is not None and phase != "loading":
        micro_batches = config["gradient_accumulation_steps"] * (batch // size)
        changes = {"batch_size": size, "gradient_accumulation_steps": micro_batches}
        at_a_time = "one" if size == 1 else size
        return Cause(sentence, changes, f"A step then has the same rows, processed {at_a_time} at a time.")
    if smaller := method.smaller:
        advice = f"Method `{smaller}` needs a fraction of the memory of `{method.name}`."
        return Cause(sentence, {"method": smaller.value}, advice)
    length = config.get("max_seq_length")
    if phase != "loading" and length and length > 256:
        return Cause(sentence, {"max_seq_length": length // 2}, "Longer rows are truncated or dropped.")
    return Cause(sentence, advice="Use a smaller base model, or a device with more memory.")


def _anomaly_details(message: str | None, report: FailureReport | None) -> AnomalyDetails:
    """Return the details that the trainer reported; without any, its message is the summary."""
    if report is not None and report.error is not None and "details" in report.error:
        return report.error["details"]
    summary = message or "A step had a non-finite or spiking loss."
    return {"summary": summary, "in_evaluation": False, "singled_out": []}


def _bad_step(code: str, anomaly: AnomalyDetails, config: Mapping[str, Any], before: RunHistory) -> Cause:
    name = "on_non_finite" if code == "non_finite_loss" else "on_spike"
    sentence = anomaly["summary"]
    rate = config.get("learning_rate")
    slower = {"learning_rate": rate / 10} if rate else {}
    if before.was_diverging:
        lowest, last = min(before.losses), before.losses[-1]
        diverged = f"{sentence} The loss had already risen from {lowest:.4g} to {last:.4g}: the run diverged."
        advice = "The learning rate is probably too high rather than the rows bad; discard the training so far."
        return Cause(diverged, slower, advice, is_for_new_run=True)
    if anomaly["in_evaluation"]:  # there is no step to skip
        return Cause(sentence, slower, "The learning rate is probably too high.")
    if config.get(name) == "rewind":
        advice = "It happened repeatedly: the learning rate is probably too high rather than the rows bad."
        return Cause(sentence, slower, advice)
    if before.has_checkpoint:
        advice = "Resume with this setting: the run then restores the last checkpoint and skips such steps."
        return Cause(sentence, {name: "rewind"}, advice)
    if anomaly["singled_out"]:
        return Cause(sentence, {name: "rewind"}, "Create the run again with this setting: it then skips such steps.")
    advice = "No single row is at fault and there is no checkpoint to restore: the learning rate is probably too high."
    return Cause(sentence, slower, advice)


def _disk_full(message: str, config: Mapping[str, Any]) -> Cause:
    limit = config.get("save_total_limit")
    changes = {"save_total_limit": 1} if limit is None or limit > 1 else {}
    advice = "Free disk space first; `anneal prune --dry-run` shows what old data takes. Fewer checkpoints need less."
    return Cause(message or "The worker's disk is full.", changes, advice)


def _crash_cause(report: FailureReport, resume: str | None = None) -> Cause:
    """Return the cause of a crash; `resume` starts the advice to resume, None if the run has continued by itself."""
    number, phase = report.exit_signal, report.phase or "its work"
    process = "training process" + ("" if report.rank is None else f" of rank {report.rank}")
    if number in _NATIVE:
        name = signal.Signals(number).name
        return Cause(
            f"A C or CUDA library crashed ({name}) in the {process} during {phase}; the last lines may show which.",
            advice=f"{f'{resume}; if' if resume else 'If'} it crashes there again, check the versions in its "
            "`config` event.",
        )
    if number == signal.SIGKILL:
        return Cause(
            f"An external SIGKILL ended the {process} during {phase}; neither the service nor a lack of memory caused "
            "it.",
            advice=f"{resume}." if resume else None,
        )
    how = f"signal {number}" if number else f"exit code {report.exit_code}"
    return Cause(f"The {process} ended with {how} during {phase} without an error; see its last lines.")


def _hang_cause(report: FailureReport) -> Cause:
    phase = report.phase or "its work"
    return Cause(
        f"The training process hung during {phase}: it reported nothing for longer than ANNEAL_HANG_SECONDS.",
        advice="The usual cause is a device or file system that does not respond; see the worker's log.",
    )


def _cut_off(report: FailureReport) -> str:
    phase = report.phase or "its work"
    why = "The database was unreachable for too long, or the worker was stalled"
    return f"{why}, so the service ended the training process during {phase}"


_TIMER = (
    "The training process ended itself because it was not notified in time that its lease was renewed: the "
    "database was unreachable, or the machine was overloaded or suspended"
)
_WORKER_LOST = "The worker was lost: its machine or its process ended, so the end of the training process is unknown."


def _lost_too_often(report: FailureReport, message: str) -> Cause:
    if report.killed_for == "hang":
        return _hang_cause(report)
    if report.killed_for == "lease":
        return Cause(f"{_cut_off(report)}.", advice="Once the database is reliably reachable, resume the run.")
    if report.exit_signal == signal.SIGALRM:
        return Cause(f"{_TIMER}.", advice="Once the machine is responsive and the database reachable, resume the run.")
    if message.startswith(WORKER_LOST) or not message:
        return Cause(_WORKER_LOST, advice="Check that machine; the run can be resumed.")
    # The reason why the last attempt could not continue: a missing file, a process that could not be started, …
    return Cause(message[0].upper() + message[1:], advice="Fix the problem, then resume the run.")


def _after_a_restart(report: FailureReport | None, outcome: str | None) -> Cause:
    """Return the cause for an attempt that was followed by another one, so there is nothing to resume."""
    if report is None:
        if outcome == "lost":
            return Cause(_WORKER_LOST, advice="Check that machine.")
        return Cause(
            "The attempt was abandoned and the run continues by itself; see its `status` event for the reason."
        )
    number = report.exit_signal
    if report.error and report.error["code"] == "device_error":
        return Cause(f"{report.error['message']} {_NEXT_ATTEMPT.capitalize()}.")
    if report.repair:
        return Cause(f"The run repaired itself after this attempt: {report.repair.reason}.")
    if report.killed_for == "hang":
        return _hang_cause(report)
    if report.killed_for == "lease":
        return Cause(f"{_cut_off(report)}; {_NEXT_ATTEMPT}.")
    if number == signal.SIGALRM:
        return Cause(f"{_TIMER}; {_NEXT_ATTEMPT}.")
    if number in _REQUESTS_TO_END:
        name = signal.Signals(number).name
        return Cause(f"An external signal ({name}), not from the service, ended the training process; {_NEXT_ATTEMPT}.")
    if number is None and report.exit_code is None:
        lost = "The process from which training processes are forked was lost, and the training process with it"
        return Cause(f"{lost}; {_NEXT_ATTEMPT}.")
    return _crash_cause(report)
