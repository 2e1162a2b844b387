"""Messages of the supervisor to a training process: renewals of the lease, requests, and the supervisor's end.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from anneal.contracts.attempt.messages import ActionRequest, ControlMessage
from anneal.contracts.stop import StopRequest
from worker.wire.deadline import arm_deadline


class Control:
    """Receives the supervisor's messages: renewals of the lease, requests for a checkpoint or a stop, and its end."""

    _by_descriptor: dict[int, "Control"] = {}

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt a holder
        self._request: StopRequest | None = None
        self._callbacks: list[Callable[[StopRequest], None]] = []
        self._wants_checkpoint = threading.Event()
        self._actions: deque[ActionRequest] = deque()
        self._question_parts: list[str] = []
        self._questions: deque[str] = deque()
        self._cancelled_questions: deque[str] = deque()
        self._has_questions = threading.Event()
        self.stop_at_epoch_end = False
        """True if training is to end with the current epoch."""
        self._handles_sigterm = False

    @classmethod
    def start(cls, control_fd: int | None, deadline: float | None = None) -> "Control":
        """Listen on `control_fd` in a thread; None receives nothing. The same descriptor gives the same object.

        A launched process starts this before its slow imports, since renewals must reach it in time. `deadline`
        (seconds since boot) is the one that it was started with, in effect from here on. If the interpreter took
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
            threading.Thread(target=control._receive_messages, args=(channel,), name="control", daemon=True).start()
        return control

    @property
    def stop_requested(self) -> StopRequest | None:
        """Immediate stop in effect, if any."""
        return self._request

    def take_checkpoint_request(self) -> bool:
        """Return True if a checkpoint was requested since the last call; training continues after it."""
        is_requested = self._wants_checkpoint.is_set()
        self._wants_checkpoint.clear()
        return is_requested

    @property
    def next_action(self) -> ActionRequest | None:
        """The next requested action; None if there is none."""
        return self._actions[0] if self._actions else None

    def take_action(self) -> ActionRequest:
        """Remove the next requested action and return it."""
        return self._actions.popleft()

    def take_questions(self, wait_seconds: float) -> tuple[list[str], list[str]]:
        """Return the questions that have come, each a `QuestionEnvelope` as JSON, and the ids of cancelled ones.

        Waits up to `wait_seconds` for the first.
        """
        if wait_seconds > 0:
            self._has_questions.wait(wait_seconds)
        self._has_questions.clear()
        # In this order: a question comes before its cancellation, which would otherwise be lost if both come just now.
        cancelled = _take_all(self._cancelled_questions)
        return _take_all(self._questions), cancelled

    def on_stop(self, callback: Callable[[StopRequest], None]) -> None:
        """Call `callback` (from another thread or a signal handler) when an immediate stop is requested or changes."""
        with self._lock:
            self._callbacks.append(callback)
            request = self._request
        if request is not None:
            callback(request)

    def request_stop(self, request: StopRequest) -> None:
        """Request this process to stop: with the epoch, or combined with the immediate stop in effect."""
        if not request.is_immediate:
            self.stop_at_epoch_end = True
            return
        with self._lock:
            before = self._request
            request = request.combined_with(before)
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
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.request_stop(StopRequest("checkpoint", "drain")))
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
            message = _receive_message(channel)
            deadline = max(deadline, message.renew_until or deadline)
            self._handle_message(replace(message, renew_until=None))
        arm_deadline(deadline)

    def _receive_messages(self, channel: socket.socket) -> None:
        while True:
            self._handle_message(_receive_message(channel))

    def _handle_message(self, message: ControlMessage) -> None:
        if message.renew_until is not None:
            arm_deadline(message.renew_until)
        if message.checkpoint:
            self._wants_checkpoint.set()
        if message.action is not None:
            self._actions.append(message.action)
        if message.question is not None:
            self._question_parts.append(message.question.text)
            if message.question.is_last:
                self._questions.append("".join(self._question_parts))
                self._question_parts.clear()
                self._has_questions.set()
        if message.cancelled_question is not None:
            self._cancelled_questions.append(message.cancelled_question)
            self._has_questions.set()
        if message.stop is not None:
            self.request_stop(message.stop)


def _take_all(waiting: deque[str]) -> list[str]:
    """Remove and return what waits; another thread may add more meanwhile."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _receive_message(channel: socket.socket) -> ControlMessage:
    """Return the next message; end this process if the supervisor is gone."""
    try:
        packet = channel.recv(64 * 1024)
    except ConnectionError:
        packet = b""
    if not packet:
        os._exit(1)  # any further work could conflict with the next attempt
    return ControlMessage.from_json(packet)
