"""Records that a training process sends to its supervisor.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, cast

from anneal.contracts.attempt.messages import (
    MAX_RECORD_BYTES,
    ActionStatus,
    AnsweredAction,
    ErrorInfo,
    HubPush,
    Phase,
    RepairProposal,
    SampleOrigin,
    SampleRecord,
    TrainerRecord,
)
from worker.wire.heartbeat import RESUMED, WAITING, Heartbeat


class Reporter:
    """Sends records to the supervisor, each a JSON object in one datagram; any thread may send.

    `alive()` sends a heartbeat: it reports only progress, may be called often, and is not stored.
    Without a descriptor (a run by hand), the same records are written as lines to standard output.
    """

    def __init__(self, descriptor: int | None) -> None:
        """Send to `descriptor`, a connected datagram socket or None."""
        self._descriptor, self.alive = descriptor, Heartbeat(descriptor).send_if_due

    def send(self, record: TrainerRecord) -> None:
        """Send one record; sets its `ts`, and long strings of an oversized record are cut.

        Blocks while the supervisor is behind. Ends the process when the supervisor is gone.
        """
        record["ts"] = time.time()
        payload = _encode_record(record)
        if self._descriptor is None:
            write_all(1, payload + b"\n")
        else:
            self._write_packet(payload)

    def report_waiting(self, is_waiting: bool) -> None:
        """Report that this rank waits for others, or goes on."""
        if self._descriptor is not None:
            self._write_packet(WAITING if is_waiting else RESUMED)

    def _write_packet(self, payload: bytes) -> None:
        assert self._descriptor is not None  # noqa: S101
        try:
            os.write(self._descriptor, payload)
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            # No one renews this run's lease any more: this process would become a second trainer of the run.
            os._exit(1)

    def config(self, effective: dict[str, Any], replaced: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        """Report the configuration in effect, replaced defaults (field, requested, used, reason), initial run info."""
        self.send({"type": "config", "effective": effective, "replaced": replaced, "facts": facts})

    def phase(self, name: Phase, *, start_step: int | None = None, total_steps: int | None = None) -> None:
        """Enter a phase."""
        self.send({"type": "phase", "name": name, "start_step": start_step, "total_steps": total_steps})

    def progress(self, phase: str, done: float, total: float | None = None, message: str | None = None) -> None:
        """Report the progress of a phase, in units of that phase."""
        self.send({"type": "progress", "phase": phase, "done": done, "total": total, "message": message})

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
            {
                "type": "metric",
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
                "gpu_memory_mb": gpu_memory_mb,
                "samples_per_second": samples_per_second,
                "total_steps": total_steps,
                "extra": extra or {},
            }
        )

    def eval(self, step: int, metrics: dict[str, Any], *, epoch: float | None = None) -> None:
        """Report the result of an evaluation after `step`."""
        self.send({"type": "eval", "step": step, "epoch": epoch, "metrics": metrics})

    def checkpoint(
        self,
        name: str,
        *,
        step: int,
        kind: str,
        bytes: int,
        manifest_sha256: str,
        seconds: float,
        actions: Sequence[AnsweredAction] = (),
        pinned: bool = False,
        epoch: float | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report a checkpoint that is on disk: call only after its parent folder was fsynced.

        `kind` is periodic, stop, best or final; `seconds` is how long it took; `actions` (id, action) requested it, and
        a `pinned` one is kept; `metrics` contains loss and best_loss, to which a rollback returns.
        """
        self.send(
            {
                "type": "checkpoint",
                "name": name,
                "step": step,
                "epoch": epoch,
                "kind": kind,
                "bytes": bytes,
                "manifest_sha256": manifest_sha256,
                "seconds": seconds,
                "actions": list(actions),
                "pinned": pinned,
                "metrics": metrics or {},
            }
        )

    def action(
        self,
        id: str,
        action: str,
        *,
        step: int,
        status: ActionStatus,
        epoch: float | None = None,
        result: dict[str, Any] | None = None,
        message: str | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Report the result of an action, which took effect after `step`."""
        self.send(
            {
                "type": "action",
                "id": id,
                "action": action,
                "step": step,
                "epoch": epoch,
                "status": status,
                "result": result,
                "message": message,
                "total_steps": total_steps,
            }
        )

    def sample(self, step: int, prompt: str, completion: str, **origin: Unpack[SampleOrigin]) -> None:
        """Report a text that the model generated."""
        sample = {"type": "sample", "step": step, "prompt": prompt, "completion": completion, **origin}
        self.send(cast(SampleRecord, sample))

    def skipped_rows(self, data: str, *, count: int, total: int, reason: str, examples: list[int]) -> None:
        """Report rows of the training or evaluation `data` that are left out, cut, or teach nothing."""
        self.send(
            {
                "type": "skipped_rows",
                "data": data,
                "count": count,
                "total": total,
                "reason": reason,
                "examples": examples,
            }
        )

    def distribution(self, step: int, edges: list[float | None], groups: dict[str, Any]) -> None:
        """Report histograms of weights and gradients before a step."""
        self.send({"type": "distribution", "step": step, "edges": edges, "groups": groups})

    def export(
        self,
        weights: Literal["best", "last", "checkpoint"],
        *,
        step: int,
        reason: str,
        output: Literal["adapter", "merged"],
    ) -> None:
        """Report the output, and the weights of which step it contains."""
        self.send({"type": "export", "weights": weights, "step": step, "reason": reason, "output": output})

    def message(self, line: str, level: str = "info") -> None:
        """Report a message to the user, shown among the log lines."""
        self.send({"type": "message", "level": level, "line": line})

    def result(
        self,
        outcome: Literal["completed", "stopped", "failed"],
        *,
        why: str | None = None,
        step: int | None = None,
        epoch: float | None = None,
        error: ErrorInfo | None = None,
        rank: int | None = None,
        output: str | None = None,
        exported: str | None = None,
        hub: HubPush | None = None,
        metrics: Mapping[str, Any] | None = None,
        repair: RepairProposal | None = None,
    ) -> None:
        """Send the last record; its fields are those of `TrainingResult`."""
        self.send(
            {
                "type": "result",
                "outcome": outcome,
                "why": why,
                "step": step,
                "epoch": epoch,
                "error": error,
                "rank": rank,
                "output": output,
                "exported": exported,
                "hub": hub,
                "metrics": metrics,
                "repair": repair,
            }
        )


class RankReporter(Reporter):
    """Reporter of another rank than 0: it sends heartbeats and its own failure, since rank 0 reports the run."""

    def send(self, record: TrainerRecord) -> None:
        """Send a failed result; any other record is left to rank 0, and only shows progress here."""
        if record["type"] == "result" and record["outcome"] == "failed":
            super().send(record)
        else:
            self.alive()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, in as many pieces as needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _encode_record(record: Mapping[str, Any]) -> bytes:
    payload = json.dumps(record, default=to_plain).encode()
    longest = MAX_RECORD_BYTES // 8
    while len(payload) > MAX_RECORD_BYTES:
        short = {**_cut_long_values(record, longest), "type": record["type"], "ts": record["ts"], "truncated": True}
        payload = json.dumps(short, default=to_plain).encode()
        longest //= 2
    return payload


def _cut_long_values(value: Any, longest: int) -> Any:
    """Return `value` with strings, lists and objects of more than `longest` elements shortened."""
    if isinstance(value, str):
        return value if len(value) <= longest else value[:longest] + "…"
    if isinstance(value, dict):
        return {
            _cut_long_values(str(key), longest): _cut_long_values(item, longest)
            for key, item in list(value.items())[:longest]
        }
    if isinstance(value, list | tuple):
        return [_cut_long_values(item, longest) for item in value[:longest]]
    return value


def to_plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's own, and anything else to its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):
            pass
    return str(value)
