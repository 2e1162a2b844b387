"""Records that a training process sends to its supervisor.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from worker.wire.heartbeat import Heartbeat

MAX_RECORD_BYTES = 128 * 1024
"""A record is one datagram, and a datagram must fit into the socket's send buffer."""


def parse_args(argv: Sequence[str]) -> tuple[dict[str, Any], int | None, int | None]:
    """Parse the arguments of a training process: `job.json [--report-fd N] [--control-fd M]`.

    Returns the job (the parsed file), the descriptor for records and the one for requests; both are None in a run by
    hand. A file that cannot be read is reported as a failed result, and ends the process.
    """
    parser = argparse.ArgumentParser(description="Run one training job.")
    parser.add_argument("job", type=Path, help="JSON file that describes the job")
    parser.add_argument("--report-fd", type=int, default=None, help="send records here, not to standard output")
    parser.add_argument("--control-fd", type=int, default=None, help="receive renewals and requests here")
    given = parser.parse_args(list(argv))
    try:
        job = json.loads(given.job.read_text())
    except (OSError, ValueError) as problem:
        job = problem
    if not isinstance(job, dict):
        why = job if isinstance(job, Exception) else "it must hold a JSON object"
        error = {"code": "internal", "message": f"The job file {given.job.name} cannot be read: {why}"}
        Reporter(given.report_fd).result("failed", error=error)
        sys.exit(1)
    return job, given.report_fd, given.control_fd


class Reporter:
    """Sends records to the supervisor, each a JSON object in one datagram; any thread may send.

    `alive()` sends a heartbeat: it reports only progress, may be called often, and is not stored.
    Without a descriptor (a run by hand), the same records are written as lines to standard output.
    """

    def __init__(self, descriptor: int | None) -> None:
        """Send to `descriptor`, a connected datagram socket or None."""
        self._descriptor, self.alive = descriptor, Heartbeat(descriptor).beat

    def send(self, type: str, **fields: Any) -> None:
        """Send one record; `ts` (Unix seconds) is added, and long strings of an oversized record are cut.

        Blocks while the supervisor is behind. Ends the process when the supervisor is gone.
        """
        payload = _encode({"type": type, "ts": time.time(), **fields})
        if self._descriptor is None:
            write_all(1, payload + b"\n")
            return
        try:
            os.write(self._descriptor, payload)
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            # No one renews this run's lease any more: this process would become a second trainer of the run.
            os._exit(1)

    def config(self, effective: dict[str, Any], replaced: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Report the configuration in effect, replaced defaults (field, requested, used, reason), initial run info."""
        self.send("config", effective=effective, replaced=replaced, facts=facts)

    def phase(self, name: str, *, start_step: int | None = None, total_steps: int | None = None) -> None:
        """Enter a phase: loading, tokenizing, training, evaluating, saving or exporting."""
        steps = {"start_step": start_step, "total_steps": total_steps}
        self.send("phase", name=name, **{key: value for key, value in steps.items() if value is not None})

    def progress(self, phase: str, done: float, total: float | None = None, message: str | None = None) -> None:
        """Report the progress of a phase, in units of that phase."""
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
        """Report the measurements of one optimizer step."""
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
        """Report the result of an evaluation after `step`."""
        self.send("eval", step=step, epoch=epoch, metrics=metrics)

    def checkpoint(
        self,
        name: str,
        *,
        step: int,
        kind: str,
        bytes: int,
        manifest_sha256: str,
        seconds: float,
        actions: Sequence[dict[str, Any]] = (),
        pinned: bool = False,
        epoch: float | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report a checkpoint that is on disk: call only after its parent folder was fsynced.

        `kind` is periodic, stop, best or final; `seconds` is how long it took; `actions` (id, action) requested it, and
        a `pinned` one is kept; `metrics` contains loss and best_loss, to which a rollback returns.
        """
        self.send(
            "checkpoint",
            name=name,
            step=step,
            epoch=epoch,
            kind=kind,
            bytes=bytes,
            manifest_sha256=manifest_sha256,
            seconds=seconds,
            actions=list(actions),
            pinned=pinned,
            metrics=metrics or {},
        )

    def action(
        self,
        id: str,
        action: str,
        *,
        step: int,
        status: str,
        epoch: float | None = None,
        result: dict[str, Any] | None = None,
        message: str | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Report the result of an action: `status` is done, refused or failed; it took effect after `step`."""
        about = {"id": id, "action": action, "step": step, "epoch": epoch, "status": status}
        self.send("action", **about, result=result, message=message, total_steps=total_steps)

    def sample(self, step: int, prompt: str, completion: str, **more: Any) -> None:
        """Report a text that the model generated."""
        self.send("sample", step=step, prompt=prompt, completion=completion, **more)

    def message(self, line: str, level: str = "info") -> None:
        """Report a message to the user, shown among the log lines."""
        self.send("message", level=level, line=line)

    def result(
        self,
        outcome: Literal["completed", "stopped", "failed"],
        *,
        why: str | None = None,
        step: int | None = None,
        epoch: float | None = None,
        error: dict[str, Any] | None = None,
        output: str | None = None,
        hub: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        repair: dict[str, Any] | None = None,
    ) -> None:
        """Send the last record; `error` is {code, message, details}, `output` a folder below the attempt's own.

        `hub` is {repo, commit, url} of an output that was pushed, {repo, error} of one that could not be. `repair`
        describes the changes for the next attempt: {kind, step, rows, singled_out}.
        """
        ended = {"outcome": outcome, "why": why, "step": step, "epoch": epoch, "error": error}
        self.send("result", **ended, output=output, hub=hub, metrics=metrics, repair=repair)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many pieces as needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _encode(record: dict[str, Any]) -> bytes:
    payload = json.dumps(record, default=plain).encode()
    longest = MAX_RECORD_BYTES // 8
    while len(payload) > MAX_RECORD_BYTES:
        short = {**_cut(record, longest), "type": record["type"], "ts": record["ts"], "truncated": True}
        payload = json.dumps(short, default=plain).encode()
        longest //= 2
    return payload


def _cut(value: Any, longest: int) -> Any:
    """Return `value` with strings, lists and objects of more than `longest` elements shortened."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[:longest] + "…"
    if isinstance(value, dict):
        return {_cut(str(key), longest): _cut(item, longest) for key, item in list(value.items())[:longest]}
    if isinstance(value, list | tuple):
        return [_cut(item, longest) for item in value[:longest]]
    return value


def plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's own, and anything else to its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):
            pass
    return str(value)
