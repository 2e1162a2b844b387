"""Records that a training process sends to its supervisor.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from anneal.contracts.attempt.messages import MAX_RECORD_BYTES, TrainerRecord
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
        """Send one record with the time, `ts`; long strings of an oversized record are cut.

        Blocks while the supervisor is behind. Ends the process when the supervisor is gone.
        """
        payload = _encode_record({**record, "ts": time.time()})
        if self._descriptor is None:
            write_all(1, payload + b"\n")
        else:
            self._write_packet(payload)

    def message(self, line: str, level: str = "info") -> None:
        """Report a message to the user, shown among the log lines."""
        self.send({"type": "message", "level": level, "line": line})

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
