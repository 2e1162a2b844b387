"""Why a run most probably ended as it did, and what to change: from its error and what was seen of its last attempt."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.runs.prediction import is_probe

_LONGEST_LIMIT = 365 * 86_400.0
_NATIVE = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_REQUESTS_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_CLIMBED = 1.5
"""So many times its lowest is a loss that has been rising: the weights are spoilt then, whatever rows came last."""
_NAMED = "out when put through the model alone"
"""What the trainer says of rows that go wrong by themselves."""
_EVALUATED = "` of the evaluation at step "
"""What the trainer says where not a step but an evaluation had no number: there is none to pass over."""
_GOES_ON = "another attempt goes on from the last checkpoint"


@dataclass(frozen=True)
class Cause:
    """A sentence, and fields of the configuration that would have helped."""

    sentence: str
    changes: dict[str, Any] = field(default_factory=dict)
    """New values; empty where no other configuration helps."""
    advice: str | None = None
    """What the changes do, or what else to do."""
    is_for_new_run: bool = False
    """Whether the changes help only from the first step on: no checkpoint is worth going on from."""


@dataclass(frozen=True)
class Before:
    """What a run had come to when it ended."""

    losses: Sequence[float] = ()
    """The latest logged ones, in order of their steps."""
    has_checkpoint: bool = False
    """Whether there is one to go back to."""

    @property
    def was_diverging(self) -> bool:
        """Whether the loss stood well above its lowest."""
        return len(self.losses) > 1 and self.losses[-1] > _CLIMBED * min(self.losses) > 0


def explain(
    code: str | None,
    message: str | None,
    report: Mapping[str, Any],
    config: Mapping[str, Any],
    outcome: str | None = None,
    before: Before = Before(),
) -> Cause:
    """The probable cause of an end with this error; `report` is what the supervisor noted, empty if it saw nothing.

    `config` is what the last attempt was told to train, `outcome` what became of that attempt, `before` how the run
    stood until then.
    """
    if is_probe(config):
        return _of_a_probe(code, message, report, config, outcome)
    match code:
        case "out_of_memory":
            return _out_of_memory(report, config)
        case "non_finite_loss" | "loss_spike":
            return _bad_step(code, message or "", config, before)
        case "disk_full":
            return _disk_full(message or "", config)
        case "time_limit":
            limit = config.get("time_limit_seconds")
            changes = {"time_limit_seconds": min(2 * limit, _LONGEST_LIMIT)} if limit else {}
            return Cause("The run reached its own `time_limit_seconds`.", changes, "It goes on for as long again.")
        case "trainer_crashed":
            return _crash(report, resume="Resume the run")
        case "worker_lost":
            return _lost_too_often(report, message or "")
        case None:
            return _after_a_restart(report, outcome)
        case _:
            return Cause(message or f"The run ended with `{code}`.")


def _of_a_probe(
    code: str | None, message: str | None, report: Mapping[str, Any], config: Mapping[str, Any], outcome: str | None
) -> Cause:
    """A probe with another configuration would measure another run: what helps is to be changed in that one."""
    # It never mends itself, and that it could is no advice.
    left_out = ("extra", "on_out_of_memory")
    cause = explain(code, message, report, {name: config[name] for name in config if name not in left_out}, outcome)
    if not cause.changes:
        return cause
    if code != "out_of_memory":
        return Cause(cause.sentence, advice="Once that is mended, ask for another probe.")
    changes = " and ".join(f"`{name}` {value}" for name, value in cause.changes.items())
    return Cause(cause.sentence, advice=f"The run that it measures may fit with {changes}: ask for a probe of that.")


def _out_of_memory(report: Mapping[str, Any], config: Mapping[str, Any]) -> Cause:
    phase = report.get("phase") or "training"
    where, seen = ("the machine", "host") if report.get("killed_by_kernel") else ("the device", "device")
    last = (report.get("memory") or [{}])[-1]
    told = ""
    if f"{seen}_mb" in last:
        told = f": shortly before, {last[f'{seen}_mb']:,} MB were in use and {last[f'{seen}_free_mb']:,} MB free"
    sentence = f"The memory of {where} did not suffice while {phase}{told}."
    if report.get("killed_by_kernel") and "device_mb" in last:
        return Cause(sentence, advice="Give the machine more memory, or let fewer runs train on it at once.")
    if config.get("on_out_of_memory") == "stop" and phase not in ("loading", "tokenizing"):
        return Cause(sentence, {"on_out_of_memory": "repair"}, "The run then makes micro-batches smaller by itself.")
    if config.get("batch_size", 1) > 1 and phase != "loading":
        batch, micro_batches = config["batch_size"], config["gradient_accumulation_steps"]
        changes = {"batch_size": 1, "gradient_accumulation_steps": batch * micro_batches}
        return Cause(sentence, changes, "The same rows make up a step, one at a time.")
    method = config.get("method")
    if method in ("full", "lora"):
        smaller = "lora" if method == "full" else "qlora"
        return Cause(sentence, {"method": smaller}, f"Method `{smaller}` needs a fraction of the memory of `{method}`.")
    length = config.get("max_seq_length")
    if phase != "loading" and length and length > 256:
        return Cause(sentence, {"max_seq_length": length // 2}, "Rows that are longer are cut, or left out.")
    return Cause(sentence, advice="Take a smaller base model, or a device with more memory.")


def _bad_step(code: str, message: str, config: Mapping[str, Any], before: Before) -> Cause:
    name = "on_non_finite" if code == "non_finite_loss" else "on_spike"
    sentence = message.partition(" Look at ")[0] or "A step spoilt the run."
    rate = config.get("learning_rate")
    slower = {"learning_rate": rate / 10} if rate else {}
    if before.was_diverging:
        lowest, last = min(before.losses), before.losses[-1]
        told = f"{sentence} The loss had been rising before, from {lowest:.4g} to {last:.4g}: the run diverged."
        advice = "The learning rate is too high more probably than the rows are bad; what was trained so far is spoilt."
        return Cause(told, slower, advice, is_for_new_run=True)
    if _EVALUATED in message:
        return Cause(sentence, slower, "The learning rate is probably too high.")
    if config.get(name) == "rewind":
        advice = "It happened again and again: the learning rate is too high more probably than the rows are bad."
        return Cause(sentence, slower, advice)
    if before.has_checkpoint:
        advice = "Resumed with this, a run goes back to the last checkpoint and passes over such steps."
        return Cause(sentence, {name: "rewind"}, advice)
    if _NAMED in message:
        return Cause(sentence, {name: "rewind"}, "Posted again with this, a run passes over such steps.")
    advice = "No row stands out, and there is no checkpoint to go back to: the learning rate is probably too high."
    return Cause(sentence, slower, advice)


def _disk_full(message: str, config: Mapping[str, Any]) -> Cause:
    kept = config.get("save_total_limit")
    changes = {"save_total_limit": 1} if kept is None or kept > 1 else {}
    advice = "Free some space first (`anneal prune` does); fewer checkpoints then need less of it."
    return Cause(message or "The disk of the worker is full.", changes, advice)


def _crash(report: Mapping[str, Any], resume: str | None = None) -> Cause:
    """`resume` begins the advice to do so; None: the run has gone on by itself."""
    number, phase = report.get("exit_signal"), report.get("phase") or "its work"
    if number in _NATIVE:
        name = signal.Signals(number).name
        return Cause(
            f"A library written in C or CUDA crashed ({name}) during {phase}; the last lines may tell which.",
            advice=f"{f'{resume}; if' if resume else 'If'} it crashes there again, look at the versions in its "
            "`config` event.",
        )
    if number == signal.SIGKILL:
        return Cause(
            f"Somebody killed the training process from outside during {phase}, not the service, and not for memory.",
            advice=f"{resume}." if resume else None,
        )
    how = f"signal {number}" if number else f"exit code {report.get('exit_code')}"
    return Cause(f"The training process ended with {how} during {phase} without saying why; its last lines may tell.")


def _hung(report: Mapping[str, Any]) -> Cause:
    phase = report.get("phase") or "its work"
    return Cause(
        f"The training process hung during {phase}: for longer than ANNEAL_HANG_SECONDS it gave no sign of life.",
        advice="A device or a file system that does not answer looks like this; the worker's log has more.",
    )


def _cut_off(report: Mapping[str, Any]) -> str:
    phase = report.get("phase") or "its work"
    why = "The database was out of reach for too long, or the worker stood still"
    return f"{why}, so the service ended the training process during {phase}"


_TIMER = (
    "The training process ended by its own timer, since it had not heard in time that its lease was renewed: the "
    "database was out of reach, or the machine was overloaded or stood still"
)
_UNSEEN = "The worker was lost: its machine or its process ended, so nobody saw how the training process did."


def _lost_too_often(report: Mapping[str, Any], message: str) -> Cause:
    if report.get("killed_for") == "hang":
        return _hung(report)
    if report.get("killed_for") == "lease":
        return Cause(f"{_cut_off(report)}.", advice="Once the database stays within reach, resume the run.")
    if report.get("exit_signal") == signal.SIGALRM:
        return Cause(f"{_TIMER}.", advice="Once that machine can keep up and the database is within reach, resume it.")
    if message.startswith("worker lost") or not message:
        return Cause(_UNSEEN, advice="Look at that machine; the run can be resumed.")
    # What kept the last attempt from going on: a file that is not there, a process that could not be started, …
    return Cause(message[0].upper() + message[1:], advice="Once that is mended, the run can be resumed.")


def _after_a_restart(report: Mapping[str, Any], outcome: str | None) -> Cause:
    """Of an attempt that another one followed: there is nothing to resume."""
    repair, number = report.get("repair"), report.get("exit_signal")
    if repair:
        return Cause(f"The run repaired itself after this attempt: {repair['reason']}.")
    if report.get("killed_for") == "hang":
        return _hung(report)
    if report.get("killed_for") == "lease":
        return Cause(f"{_cut_off(report)}; {_GOES_ON}.")
    if number == signal.SIGALRM:
        return Cause(f"{_TIMER}; {_GOES_ON}.")
    if number in _REQUESTS_TO_END:
        name = signal.Signals(number).name
        return Cause(f"Somebody told the training process to end ({name}), not the service; {_GOES_ON}.")
    if report and number is None and report.get("exit_code") is None:
        lost = "The process that training processes are forked from was lost, and the training process with it"
        return Cause(f"{lost}; {_GOES_ON}.")
    if report:
        return _crash(report)
    if outcome == "lost":
        return Cause(_UNSEEN, advice="Look at that machine.")
    return Cause("The attempt was given up and the run goes on by itself; its `status` event says why.")
