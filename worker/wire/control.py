"""Messages of the supervisor to a training process: renewals of the lease, requests, and the supervisor's end.

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
from typing import Any

from app.contracts.stop import StopRequest, Why


class Control:
    """Receives the supervisor's messages: renewals of the lease, requests for a checkpoint or a stop, and its end."""

    _by_descriptor: dict[int, "Control"] = {}

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt a holder
        self._request: StopRequest | None = None
        self._callbacks: list[Callable[[StopRequest], None]] = []
        self._wants_checkpoint = threading.Event()
        self._actions: deque[dict[str, Any]] = deque()
        self.ends_with_epoch = False
        """True if training is to end with the current epoch."""
        self._handles_sigterm = False

    @classmethod
    def start(cls, control_fd: int | None, deadline: float | None = None) -> "Control":
        """Listen on `control_fd` in a thread; None receives nothing. The same descriptor gives the same object.

        A launched process starts this before its slow imports, since renewals must reach it in time. `deadline`
        (CLOCK_MONOTONIC seconds) is the one that it was started with, in effect from here on. If the interpreter took
        longer to start than that, the renewals sent meanwhile count, which are already in the socket.
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
        """Stop request in effect, if any."""
        return self._request

    def take_checkpoint_request(self) -> bool:
        """Return True if a checkpoint was requested since the last call; training continues after it."""
        wanted = self._wants_checkpoint.is_set()
        self._wants_checkpoint.clear()
        return wanted

    def take_action(self) -> dict[str, Any] | None:
        """Return the next requested action: its id, action and parameters; None if there is none."""
        return self._actions.popleft() if self._actions else None

    def on_stop(self, callback: Callable[[StopRequest], None]) -> None:
        """Call `callback` (from another thread or a signal handler) when a stop is requested or changes."""
        with self._lock:
            self._callbacks.append(callback)
            request = self._request
        if request is not None:
            callback(request)

    def request_stop(self, save: bool, why: Why, finish: bool = False) -> None:
        """Request this process to stop.

        A user's stop outranks a drain, and a request that saves less outranks one that saves more.
        """
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
        """Make SIGTERM request a drain with a checkpoint. Main thread only; children of this process still die of it.

        A launched process calls this before its slow imports; a request during them is in `stop_requested` later.
        """
        if self._handles_sigterm:
            return
        self._handles_sigterm = True
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.request_stop(save=True, why="drain"))
        # A pool ends its workers with SIGTERM and waits for them; they must not inherit the handler, and a
        # signal during the fork must not be lost to it.
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
        """Handle what was sent before the thread listened; arm only the latest deadline, never an outdated one."""
        waiting = select.poll()
        waiting.register(channel, select.POLLIN)
        while waiting.poll(0):
            message = _receive(channel)
            deadline = max(deadline, float(message.pop("renew_until", deadline)))
            self._handle(message)
        arm_deadline(deadline)

    def _listen(self, channel: socket.socket) -> None:
        while True:
            self._handle(_receive(channel))

    def _handle(self, message: dict[str, Any]) -> None:
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
    """Return the next message; end this process if the supervisor is gone."""
    try:
        packet = channel.recv(64 * 1024)
    except ConnectionError:
        packet = b""
    if not packet:
        os._exit(1)  # any further work could conflict with the next attempt
    message: dict[str, Any] = json.loads(packet)
    return message


def arm_deadline(until: float) -> None:
    """Make the kernel end this process at `until` (CLOCK_MONOTONIC seconds), even if the interpreter is blocked.

    The timer survives exec, and is not inherited by children.
    """
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.001))
