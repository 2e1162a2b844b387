"""What a training process says and hears: records to its supervisor, requests from it, and its own journal.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.training.pulse import Pulse

MAX_RECORD_BYTES = 128 * 1024
"""A record is one datagram, and a datagram has to fit into the socket's send buffer."""

Why = Literal["stop", "drain"]


def parse_args(argv: Sequence[str]) -> tuple[dict[str, Any], int | None, int | None]:
    """Arguments of a training process: `job.json [--report-fd N] [--control-fd M]`.

    Returns the job (the parsed file), the descriptor for records and the one for requests; both None by hand. A file
    that cannot be read is told as a failed result, and ends the process.
    """
    parser = argparse.ArgumentParser(description="Run one training job.")
    parser.add_argument("job", type=Path, help="JSON file that describes the job")
    parser.add_argument("--report-fd", type=int, default=None, help="records go here, not to standard output")
    parser.add_argument("--control-fd", type=int, default=None, help="renewals and stop requests come from here")
    given = parser.parse_args(list(argv))
    try:
        job = json.loads(given.job.read_text())
    except (OSError, ValueError) as problem:
        job = problem
    if not isinstance(job, dict):
        why = job if isinstance(job, Exception) else "it must hold a JSON object"
        error = {"code": "internal", "message": f"The job file {given.job.name} cannot be read: {why}"}
        Report(given.report_fd).result("failed", error=error)
        sys.exit(1)
    return job, given.report_fd, given.control_fd


class Report:
    """Sends records to the supervisor, each one JSON object in one datagram; any thread may send.

    `alive()` says no more than that work goes on, as often as it is called, and is stored nowhere.
    Opened without a descriptor (a run by hand), it writes the same records as lines on standard output.
    """

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is a connected datagram socket or None."""
        self._descriptor, self.alive = descriptor, Pulse(descriptor).beat

    def send(self, type: str, **fields: Any) -> None:
        """Send one record; `ts` (unix seconds) is added, long strings of an oversized record are cut.

        Blocks while the supervisor is behind. Ends the process when the supervisor is gone.
        """
        payload = _encode({"type": type, "ts": time.time(), **fields})
        if self._descriptor is None:
            _write_all(1, payload + b"\n")
            return
        try:
            os.write(self._descriptor, payload)
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            # Nobody holds the lease of this run any more, so going on would be a second trainer in waiting.
            os._exit(1)

    def config(self, effective: dict[str, Any], replaced: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """The configuration in force, replaced defaults (field, requested, used, reason), first facts."""
        self.send("config", effective=effective, replaced=replaced, facts=facts)

    def phase(self, name: str, *, start_step: int | None = None, total_steps: int | None = None) -> None:
        """Enter a phase: loading, tokenizing, training, evaluating, saving or exporting."""
        steps = {"start_step": start_step, "total_steps": total_steps}
        self.send("phase", name=name, **{key: value for key, value in steps.items() if value is not None})

    def progress(self, phase: str, done: float, total: float | None = None, message: str | None = None) -> None:
        """How far a phase is, in units of that phase."""
        self.send("progress", phase=phase, done=done, total=total, message=message)

    def metric(
        self,
        step: int,
        *,
        epoch: float | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        gpu_memory_mb: float | None = None,
        samples_per_second: float | None = None,
        total_steps: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Measurements of one optimizer step."""
        self.send(
            "metric",
            step=step,
            epoch=epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            gpu_memory_mb=gpu_memory_mb,
            samples_per_second=samples_per_second,
            total_steps=total_steps,
            extra=extra or {},
        )

    def eval(self, step: int, metrics: dict[str, Any], *, epoch: float | None = None) -> None:
        """The result of an evaluation after `step`."""
        self.send("eval", step=step, epoch=epoch, metrics=metrics)

    def checkpoint(
        self,
        name: str,
        *,
        step: int,
        kind: str,
        bytes: int,
        manifest_sha256: str,
        epoch: float | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """A checkpoint that is on disk: send only after its parent folder was fsynced.

        `kind` is periodic, stop, best or final; `metrics` carries loss and best_loss, to roll back with it.
        """
        self.send(
            "checkpoint",
            name=name,
            step=step,
            epoch=epoch,
            kind=kind,
            bytes=bytes,
            manifest_sha256=manifest_sha256,
            metrics=metrics or {},
        )

    def sample(self, step: int, prompt: str, completion: str, **more: Any) -> None:
        """A text that the model wrote."""
        self.send("sample", step=step, prompt=prompt, completion=completion, **more)

    def message(self, line: str, level: str = "info") -> None:
        """A remark to the user, shown among the log lines."""
        self.send("message", level=level, line=line)

    def result(
        self,
        outcome: Literal["completed", "stopped", "failed"],
        *,
        why: str | None = None,
        step: int | None = None,
        epoch: float | None = None,
        error: dict[str, str] | None = None,
        output: str | None = None,
        hub: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """The last record; `error` is {code, message}, `output` a folder below the attempt's own.

        `hub` is {repo, commit, url} of an output that was pushed, {repo, error} of one that could not be.
        """
        ended = {"outcome": outcome, "why": why, "step": step, "epoch": epoch, "error": error}
        self.send("result", **ended, output=output, hub=hub, metrics=metrics)


@dataclass(frozen=True)
class StopRequest:
    """End early; `save` asks for a checkpoint first, `why` tells a user's stop from a worker's drain."""

    save: bool
    why: Why


class Control:
    """Hears the supervisor: renewals of the lease, requests for a checkpoint or a stop, and its end."""

    _by_descriptor: dict[int, "Control"] = {}

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt a holder
        self._request: StopRequest | None = None
        self._callbacks: list[Callable[[StopRequest], None]] = []
        self._wants_checkpoint = threading.Event()
        self._heeds_sigterm = False

    @classmethod
    def start(cls, control_fd: int | None) -> "Control":
        """Listen on `control_fd` in a thread; None hears nothing. The same descriptor gives the same object.

        A launched process starts this before its slow imports, since renewals have to reach it in time.
        """
        if control_fd is None:
            return cls()
        control = cls._by_descriptor.get(control_fd)
        if control is None:
            control = cls._by_descriptor[control_fd] = cls()
            channel = socket.socket(fileno=control_fd)
            threading.Thread(target=control._listen, args=(channel,), name="control", daemon=True).start()
        return control

    @property
    def stop_requested(self) -> StopRequest | None:
        """The stop request in force, if any."""
        return self._request

    def take_checkpoint_request(self) -> bool:
        """Whether a checkpoint was asked for since the last call; training goes on after it."""
        wanted = self._wants_checkpoint.is_set()
        self._wants_checkpoint.clear()
        return wanted

    def on_stop(self, callback: Callable[[StopRequest], None]) -> None:
        """Call `callback` (from another thread or a signal handler) when a stop is asked for or changes."""
        with self._lock:
            self._callbacks.append(callback)
            request = self._request
        if request is not None:
            callback(request)

    def request_stop(self, save: bool, why: Why) -> None:
        """Ask this process itself to stop. A user's stop outranks a drain, and not saving outranks saving."""
        with self._lock:
            before = self._request
            if before is not None:
                why = "stop" if "stop" in (before.why, why) else "drain"
                save = before.save and save
            request = StopRequest(save=save, why=why)
            if request == before:
                return
            self._request = request
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(request)

    def stop_on_sigterm(self) -> None:
        """Let SIGTERM mean: save and hand back. Main thread only; children of this process die of it as ever.

        A launched process does this before its slow imports, and what comes then is in `stop_requested` after them.
        """
        if self._heeds_sigterm:
            return
        self._heeds_sigterm = True
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.request_stop(save=True, why="drain"))
        # A pool ends its workers with SIGTERM and waits for them; they must not inherit the handler, and a
        # signal in the moment of the fork must not be lost to it.
        term = {signal.SIGTERM}
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, term),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, term),
            after_in_child=lambda: (
                signal.signal(signal.SIGTERM, signal.SIG_DFL),
                signal.pthread_sigmask(signal.SIG_UNBLOCK, term),
            ),
        )

    def _listen(self, channel: socket.socket) -> None:
        while True:
            try:
                packet = channel.recv(64 * 1024)
            except ConnectionError:
                packet = b""
            if not packet:
                # The supervisor is gone: whatever this process still did could meet its successor.
                os._exit(1)
            message = json.loads(packet)
            if "renew_until" in message:
                arm_deadline(float(message["renew_until"]))
            if "checkpoint" in message:
                self._wants_checkpoint.set()
            if "stop" in message:
                self.request_stop(save=bool(message["stop"]["save"]), why=message["stop"]["why"])


def arm_deadline(until: float) -> None:
    """Let the kernel end this process at `until` (CLOCK_MONOTONIC seconds), whatever holds the interpreter.

    The timer survives exec, and is not inherited by children.
    """
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.001))


class Journal:
    """The trainers' own witness of what ran when: one file per run, shared by all its attempts.

    A line is written at once and in one piece; start, save and stop are on disk before the call returns,
    steps within 0.2 s.
    """

    SYNC_SECONDS = 0.2

    def __init__(self, path: str | Path, attempt: int) -> None:
        self._attempt = attempt
        self._boot_id = boot_id()
        self._synced = 0.0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # A power cut may have torn the last line of an earlier attempt; ours must not be glued to it.
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def start(self) -> None:
        """Training begins: this process now counts as the run's one trainer."""
        self._write({"event": "start"}, sync=True)

    def step(self, n: int, loss_hex: str, samples: Sequence[Any]) -> None:
        """Step `n` is done; `loss_hex` is `float.hex` of its exact loss, `samples` the row ids it saw."""
        self._write({"event": "step", "step": n, "loss_hex": loss_hex, "samples": list(samples)}, sync=False)

    def save(self, step: int) -> None:
        """A checkpoint of `step` is on disk."""
        self._write({"event": "save", "step": step}, sync=True)

    def stop(self, outcome: str) -> None:
        """Nothing of this attempt will run any more."""
        self._write({"event": "stop", "outcome": outcome}, sync=True)

    def _write(self, event: dict[str, Any], sync: bool) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        about = {"attempt": self._attempt, "pid": os.getpid(), "boot_id": self._boot_id, "t": now}
        line = json.dumps({**event, **about}, default=_plain) + "\n"
        _write_all(self._file, ("\n" + line if self._torn else line).encode())
        self._torn = False
        if sync:
            os.fsync(self._file)
        elif now - self._synced >= self.SYNC_SECONDS:
            os.fdatasync(self._file)
        else:
            return
        self._synced = now


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """The events of a journal in order; a torn line (power cut) is left out, a missing file is empty."""
    events = []
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def boot_id() -> str:
    """The id of this boot of the machine: process ids and CLOCK_BOOTTIME mean something only within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _encode(record: dict[str, Any]) -> bytes:
    payload = json.dumps(record, default=_plain).encode()
    longest = MAX_RECORD_BYTES // 8
    while len(payload) > MAX_RECORD_BYTES:
        short = {**_cut(record, longest), "type": record["type"], "ts": record["ts"], "truncated": True}
        payload = json.dumps(short, default=_plain).encode()
        longest //= 2
    return payload


def _cut(value: Any, longest: int) -> Any:
    """`value` with strings, lists and objects of more than `longest` elements shortened."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[:longest] + "…"
    if isinstance(value, dict):
        return {_cut(str(key), longest): _cut(item, longest) for key, item in list(value.items())[:longest]}
    if isinstance(value, list | tuple):
        return [_cut(item, longest) for item in value[:longest]]
    return value


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own, anything else as its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):
            pass
    return str(value)
