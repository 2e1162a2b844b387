"""Starts training processes: forked from the zygote once it is ready, as new interpreters otherwise.

The keeper thread starts the zygote and every cold process, because the kernel's parent-death signal follows the
*thread* that started a process, and this thread lives as long as the worker.
"""

import importlib.util
import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from anneal.contracts.attempt.device import AssignedDevice
from app.config import Settings
from app.infra.process.handle import POLL_SECONDS, pidfd_refusal
from worker.process import process_group
from worker.process.child import TERMINATION_SIGNALS, LaunchSpec
from worker.process.orphans import Orphans
from worker.process.spawn import (
    CODE_ROOT,
    FORK_SECONDS,
    LOOK_SECONDS,
    ColdStart,
    LaunchAbandoned,
    LaunchError,
    LaunchRequest,
    spawn_cold,
    spawn_forked,
)
from worker.process.training_process import TrainingProcess
from worker.wire.rank_place import RankPlace

__all__ = ["LaunchAbandoned", "LaunchError", "Launcher", "Mode"]

log = logging.getLogger(__name__)

Mode = Literal["zygote", "cold"]

_READY_SECONDS = 120.0
_FIRST_PAUSE = 0.1
_LONGEST_WAIT = 2.0
"""Pause before another zygote for which a launch waits, in seconds; processes start cold during a longer one."""
_MAX_PAUSE = 30.0
"""Longest pause after a zygote that had been ready."""
_MAX_START_PAUSE = 600.0
"""Longest pause after one that had not: its imports keep a processor busy, and may fail as long as the worker runs."""
_HEALTHY_SECONDS = 60.0
_MAX_EARLY_DEATHS = 3
"""Deaths before a zygote was ready, after which processes start cold until one is."""
_MAX_FORKS = 3
_LARGEST_MESSAGE = 64 * 1024


class Launcher:
    """Launcher of training processes, which keeps a zygote ready; every method may be called from any thread."""

    def __init__(self, settings: Settings, preload: Sequence[str] | None = None) -> None:
        """Create the launcher; nothing is started yet.

        `preload` names the modules that the zygote imports; by default those of training, if installed.
        """
        self.broken: dict[str, str] = {}
        """Reasons why GPUs take no run, by UUID: a training step failed on them when the zygote started."""
        self._settings = settings
        self._preload = list(preload) if preload is not None else _default_preload()
        self._environment = settings.trainer_environment()
        self._folder = settings.home / "run" / "trainers"
        self._orphans = Orphans()
        self._changed = threading.Condition()
        self._stopping = False
        self._zygote: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._was_ready = False
        self._cold_because = "ANNEAL_LAUNCH=cold" if settings.launch == "cold" else ""
        """Why there is no zygote as long as this worker runs."""
        self._unready_because = ""
        """Why processes start cold until a zygote is ready."""
        self._started_at = self._start_at = 0.0
        """Monotonic time of the last start of a zygote, and of the next one."""
        self._pause = _FIRST_PAUSE
        self._early_deaths = 0
        self._work: queue.SimpleQueue[ColdStart] = queue.SimpleQueue()
        self._wake_reading, self._wake_writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._keeper = threading.Thread(target=self._keep_zygote, name="launcher", daemon=True)

    def start(self) -> list[int]:
        """End processes that an earlier worker left, then start the zygote (returns before it is ready).

        Returns:
            The ids of the processes ended.
        """
        if (reason := pidfd_refusal()) is not None:
            log.warning(
                "this system refuses pidfds (%s): training processes are polled instead, and their ends are noticed up "
                "to %.2f s later", reason, POLL_SECONDS,
            )  # fmt: skip
        swept = process_group.kill_leftovers(self._folder)
        self._keeper.start()
        return swept

    def adopt_orphans(self) -> None:
        """Kill with each training process what it leaves in other sessions.

        Only for a process of which nothing else starts children in sessions of their own.
        """
        self._orphans.adopt()

    @property
    def mode(self) -> Mode:
        """Start mode of the next process; `zygote` also while the zygote is still loading."""
        return "cold" if self._starts_cold() else "zygote"

    @property
    def reason(self) -> str:
        """Reason why the mode is `cold`; empty for `zygote`."""
        return (self._cold_because or self._unready_because) if self._starts_cold() else ""

    def _starts_cold(self) -> bool:
        return bool(self._cold_because) or (bool(self._unready_because) and self._settings.launch != "zygote")

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote if it is ready."""
        with self._changed:
            return self._zygote.pid if self._zygote is not None and self._ready else None

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a launch would not block: the zygote is ready, or processes start cold."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready or self._starts_cold(), timeout)

    def wait_checked(self, timeout: float) -> bool:
        """Wait until the first zygote has checked the GPUs; also True if there is none to wait for."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._was_ready or bool(self._unready_because or self._cold_because), timeout
            )

    def launch(
        self,
        entry: str,
        job_path: Path,
        devices: Sequence[AssignedDevice],
        lock_paths: Sequence[Path] = (),
        *,
        place: RankPlace | None = None,
        renew_until: Callable[[], float] | None = None,
        should_end: Callable[[], bool] | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> TrainingProcess:
        """Start `entry` (`module:function`) on a job file; the job's folder becomes the working directory.

        It sees `devices`; `place` is its place among the processes of the run, None if it is the only one.
        The process holds `lock_paths` for life and waits for them first. `renew_until` returns its first deadline
        (seconds since boot), which is in force before the process imports or does anything. It is called at the
        moment of starting, since a launch may wait long for the zygote to load: a cold start would import the same
        modules and be no faster. A renewal sent before the process listens counts as well. `should_end` is called about
        ten times a second meanwhile. Both may be called from another thread. `secrets` are environment variables of
        this process alone, sent on its own control socket.

        Raises:
            LaunchAbandoned: `should_end` returned True.
            LaunchError: No process could be started.
        """
        start = LaunchSpec(
            entry=entry,
            arguments=[str(job_path), *(place.arguments() if place else ())],
            folder=str(job_path.parent),
            devices=list(devices),
            lock_paths=[str(path) for path in lock_paths],
            user=self._settings.trainer_user,
            has_secrets=bool(secrets),
        )
        request = LaunchRequest(start, renew_until, should_end, secrets)
        process = self._fork_from_zygote(request)
        if process is None:
            if self._settings.launch == "zygote":
                reason = self._cold_because or self._unready_because or "the zygote is not available"
                raise LaunchError(f"{reason}, and ANNEAL_LAUNCH=zygote")
            process = self._start_cold(request)
        try:
            record = process_group.record_trainer(self._folder, process.identity, place.folder if place else None)
            process.set_record(record, self._orphans)
        except OSError as problem:
            process.close()
            raise LaunchError(f"the training process could not be recorded: {problem}") from problem
        return process

    def stop(self) -> None:
        """Stop the zygote, and with it every process forked from it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._wake_keeper()
        if self._keeper.is_alive():
            self._keeper.join()

    # Launching, in the caller's thread

    def _fork_from_zygote(self, request: LaunchRequest) -> TrainingProcess | None:
        """Have the zygote fork, or its successor if it dies meanwhile; None if a cold start is better."""
        for _ in range(_MAX_FORKS):
            self._wait_until(lambda: self._ready or self._starts_cold() or self._stopping, _READY_SECONDS, request)
            with self._changed:
                if not self._ready or self._socket is None:
                    return None
                zygote_socket = self._socket
                try:
                    copy = zygote_socket.dup()  # the keeper may close its own copy at any time
                except OSError as problem:
                    raise LaunchError(f"the zygote cannot be reached: {problem}") from problem
            with copy:
                try:
                    return spawn_forked(request, copy)
                except TimeoutError:
                    return None
                except ConnectionError:
                    pass
                except OSError as problem:  # out of memory or descriptors
                    raise LaunchError(f"the zygote cannot be reached: {problem}") from problem
            # Wait until the keeper has noticed it as well.
            self._wait_until(partial(self._has_replaced, zygote_socket), FORK_SECONDS, request)
        return None

    def _has_replaced(self, zygote: socket.socket) -> bool:
        return self._socket is not zygote

    def _start_cold(self, launch: LaunchRequest) -> TrainingProcess:
        request = ColdStart(launch)
        self._work.put(request)
        self._wake_keeper()
        try:
            self._wait_until(lambda: request.outcome is not None or self._stopping, _READY_SECONDS, launch)
        except LaunchAbandoned:
            late = self._take_outcome(request)
            if isinstance(late, TrainingProcess):
                late.close()  # it arrived just as the launch was abandoned
            raise
        outcome = self._take_outcome(request)
        if isinstance(outcome, TrainingProcess):
            return outcome
        raise LaunchError(f"no training process could be started: {outcome or 'the launcher is stopping'}")

    def _take_outcome(self, request: ColdStart) -> TrainingProcess | OSError | None:
        with self._changed:
            request.awaited = False
            return request.outcome

    def _wait_until(self, done: Callable[[], bool], seconds: float, request: LaunchRequest) -> None:
        """Wait until `done` or for `seconds`; raise LaunchAbandoned once the caller no longer wants the process."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            request.raise_if_unwanted()  # outside the lock, because it runs the caller's code
            with self._changed:
                if self._changed.wait_for(done, min(left, LOOK_SECONDS)):
                    return

    # Keeping, in the keeper's thread

    def _keep_zygote(self) -> None:
        """Start the zygote, restart it after each death, and start cold processes on request."""
        # Blocked in this thread only; the processes it starts inherit the mask and unblock the signals when they can
        # handle them.
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)
        while not self._stopping:
            if self._zygote is None and not self._cold_because and time.monotonic() >= self._start_at:
                self._started_at = time.monotonic()
                try:
                    self._spawn_zygote()
                except OSError as problem:  # out of memory or descriptors
                    self._pause_before_start(_MAX_PAUSE, f"the zygote could not be started ({problem})")
            if self._zygote is None:
                due = None if self._cold_because else self._start_at
            else:
                due = None if self._ready else self._started_at + _READY_SECONDS
            readable = self._wait_for_event(due)
            if self._zygote is not None and (readable or (due is not None and time.monotonic() >= due)):
                self._handle_zygote(timed_out=not readable)
            while not self._work.empty():
                self._spawn_cold(self._work.get())
        self._close_zygote()

    def _spawn_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = ["-m", "worker.process.zygote", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs, self._orphans.starting() as started:
            zygote = subprocess.Popen(
                [sys.executable, *command, *self._preload],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                cwd=CODE_ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is meant for the worker, which saves first
            )
            started.add(zygote.pid)
        with self._changed:
            self._zygote, self._socket = zygote, ours

    def _wait_for_event(self, due: float | None) -> bool:
        """Wait for the zygote, a call from another thread or the time `due`; return True if the zygote sent data."""
        waiting = select.poll()
        waiting.register(self._wake_reading, select.POLLIN)
        if self._socket is not None:
            waiting.register(self._socket, select.POLLIN)
        pause = None if due is None else max(due - time.monotonic(), 0.0) * 1000
        readable = {descriptor for descriptor, _ in waiting.poll(pause)}
        if self._wake_reading in readable:
            os.read(self._wake_reading, 4096)
        return self._socket is not None and self._socket.fileno() in readable

    def _handle_zygote(self, timed_out: bool) -> None:
        """Handle a message from the zygote; discard the zygote if it has ended."""
        if self._socket is None:
            return
        try:
            packet = b"" if timed_out else self._socket.recv(_LARGEST_MESSAGE)
        except ConnectionError:
            packet = b""
        message = json.loads(packet) if packet else {}
        if message.get("ready"):
            if self._unready_because:
                log.info("the zygote is ready: training processes are forked from it again")
            with self._changed:
                self._ready, self._was_ready, self._early_deaths, self._unready_because = True, True, 0, ""
                self.broken = message["broken"]
                self._changed.notify_all()
            return
        was_ready, lived = self._ready, time.monotonic() - self._started_at
        self._close_zygote()
        if "failed" in message:
            with self._changed:
                self._cold_because = f"the zygote cannot run here: {message['failed']}"
                self._changed.notify_all()
            log.warning("%s; training processes start cold until the worker is restarted", self._cold_because)
        elif was_ready:
            pause = _FIRST_PAUSE if lived > _HEALTHY_SECONDS else min(self._pause * 2, _MAX_PAUSE)
            self._pause_before_start(pause, "the zygote ended")
        else:
            # No more than half of the time is spent on starts, which may be slow because the machine is busy.
            pause = min(max(self._pause * 2, lived), _MAX_START_PAUSE)
            self._early_deaths += not timed_out
            problem = f"the zygote was not ready within {_READY_SECONDS:.0f} s"
            if not timed_out:
                times = "" if self._early_deaths == 1 else f" {self._early_deaths} times"
                problem = f"the zygote died{times} before it was ready"
            self._pause_before_start(pause, problem)

    def _pause_before_start(self, pause: float, problem: str) -> None:
        """Plan the next start of a zygote; processes start cold until it is ready if that may take long."""
        self._pause, self._start_at = pause, time.monotonic() + pause
        with self._changed:
            is_long = pause > _LONGEST_WAIT or self._early_deaths >= _MAX_EARLY_DEATHS
            if is_long or self._unready_because:
                self._unready_because = f"{problem}; another one is started after a pause that grows with each failure"
            self._changed.notify_all()
        meanwhile = ", and training processes start cold until it is ready" if self._starts_cold() else ""
        log.warning("%s; another one is started in %.1f s%s", problem, pause, meanwhile)

    def _close_zygote(self) -> None:
        with self._changed:
            zygote, self._zygote = self._zygote, None
            end, self._socket = self._socket, None
            self._ready = False
            self._changed.notify_all()
        if end is not None:
            end.close()
        if zygote is not None:
            zygote.kill()
            zygote.wait()

    def _spawn_cold(self, request: ColdStart) -> None:
        if not request.awaited:
            return
        outcome: TrainingProcess | OSError
        try:
            with self._orphans.starting() as started:
                outcome = spawn_cold(request.launch, self._environment)
                started.add(outcome.pid)
        except OSError as problem:
            outcome = problem
        with self._changed:
            request.outcome = outcome
            abandoned = not request.awaited
            self._changed.notify_all()
        if abandoned and isinstance(outcome, TrainingProcess):
            outcome.close()

    def _wake_keeper(self) -> None:
        try:
            os.write(self._wake_writing, b"!")
        except BlockingIOError:
            pass  # a wake-up is already pending


def _default_preload() -> list[str]:
    torch = importlib.util.find_spec("torch") is not None
    return ["worker.training.__main__", "worker.fake.trainer"] if torch else ["worker.fake.trainer"]
