"""What a training process hears from its supervisor: renewals of the lease, requests, and its end.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Why = Literal["stop", "drain"]


@dataclass(frozen=True)
class StopRequest:
    """End early; `save` asks for a checkpoint first, `why` tells a user's stop from a worker's drain."""

    save: bool
    why: Why
    finish: bool = False
    """Where nothing is to be saved: whether a checkpoint that is being written is wanted all the same."""


class Control:
    """Hears the supervisor: renewals of the lease, requests for a checkpoint or a stop, and its end."""

    _by_descriptor: dict[int, "Control"] = {}

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt a holder
        self._request: StopRequest | None = None
        self._callbacks: list[Callable[[StopRequest], None]] = []
        self._wants_checkpoint = threading.Event()
        self._actions: deque[dict[str, Any]] = deque()
        self.ends_with_epoch = False
        """Whether training is to end with the present epoch."""
        self._heeds_sigterm = False

    @classmethod
    def start(cls, control_fd: int | None, deadline: float | None = None) -> "Control":
        """Listen on `control_fd` in a thread; None hears nothing. The same descriptor gives the same object.

        A launched process starts this before its slow imports, since renewals have to reach it in time. `deadline`
        (CLOCK_MONOTONIC seconds) is the one that it was started with, in force from here on; where an interpreter
        took longer to come up than that, what was renewed meanwhile counts, which lies here already.
        """
        if control_fd is None:
            return cls()
        control = cls._by_descriptor.get(control_fd)
        if control is None:
            control = cls._by_descriptor[control_fd] = cls()
            channel = socket.socket(fileno=control_fd)
            if deadline is not None:
                control._catch_up(channel, deadline)
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

    def take_action(self) -> dict[str, Any] | None:
        """The next action that was asked for: its id, action and parameters; None when there is none."""
        return self._actions.popleft() if self._actions else None

    def on_stop(self, callback: Callable[[StopRequest], None]) -> None:
        """Call `callback` (from another thread or a signal handler) when a stop is asked for or changes."""
        with self._lock:
            self._callbacks.append(callback)
            request = self._request
        if request is not None:
            callback(request)

    def request_stop(self, save: bool, why: Why, finish: bool = False) -> None:
        """Ask this process itself to stop. A user's stop outranks a drain, and what keeps less what keeps more."""
        with self._lock:
            before = self._request
            if before is not None:
                why = "stop" if "stop" in (before.why, why) else "drain"
                finish = (before.save or before.finish) and (save or finish)
                save = before.save and save
            request = StopRequest(save=save, why=why, finish=finish and not save)
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

    def _catch_up(self, channel: socket.socket, deadline: float) -> None:
        """Take what was sent before anybody listened; only the latest deadline is armed, never one outdated by it."""
        waiting = select.poll()
        waiting.register(channel, select.POLLIN)
        while waiting.poll(0):
            message = _receive(channel)
            deadline = max(deadline, float(message.pop("renew_until", deadline)))
            self._heed(message)
        arm_deadline(deadline)

    def _listen(self, channel: socket.socket) -> None:
        while True:
            self._heed(_receive(channel))

    def _heed(self, message: dict[str, Any]) -> None:
        if "renew_until" in message:
            arm_deadline(float(message["renew_until"]))
        if "checkpoint" in message:
            self._wants_checkpoint.set()
        if "action" in message:
            self._actions.append(message["action"])
        if "stop_at" in message:
            self.ends_with_epoch = True
        if "stop" in message:
            stop = message["stop"]
            self.request_stop(bool(stop["save"]), stop["why"], bool(stop.get("finish")))


def _receive(channel: socket.socket) -> dict[str, Any]:
    """The next message; ends this process when there is no supervisor any more."""
    try:
        packet = channel.recv(64 * 1024)
    except ConnectionError:
        packet = b""
    if not packet:
        os._exit(1)  # whatever this process still did could meet its successor
    message: dict[str, Any] = json.loads(packet)
    return message


def arm_deadline(until: float) -> None:
    """Let the kernel end this process at `until` (CLOCK_MONOTONIC seconds), whatever holds the interpreter.

    The timer survives exec, and is not inherited by children.
    """
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.001))
