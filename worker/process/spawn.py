"""The two ways to start a training process: a fork of the zygote, or a new interpreter."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from anneal.contracts.attempt.messages import ControlMessage
from app.infra.process.handle import PidfdHandle, PolledHandle, ProcessHandle, open_process, pidfd_refusal
from app.infra.process.identity import ProcessIdentity, start_time
from worker.process.channel import Channel
from worker.process.child import LaunchSpec
from worker.process.training_process import ColdExitWatcher, TrainingProcess, ZygoteExitWatcher

FORK_SECONDS = 20.0
LOOK_SECONDS = 0.1
"""Seconds between checks that a waiting caller still wants the process."""
CODE_ROOT = Path(__file__).resolve().parents[2]


class LaunchError(RuntimeError):
    """A training process could not be started; the message says why."""


class LaunchAbandoned(LaunchError):
    """`should_end` returned True before there was a process; none is left behind."""


class LaunchRequest:
    """Request for a training process that a caller waits for."""

    def __init__(
        self,
        start: LaunchSpec,
        renew_until: Callable[[], float] | None,
        should_end: Callable[[], bool] | None,
        secrets: Mapping[str, str],
    ) -> None:
        self._start = start
        self._secrets = dict(secrets)
        self._renew_until = renew_until
        self._should_end = should_end

    def launch_spec(self) -> LaunchSpec:
        """Return the launch parameters, with the deadline as of now."""
        return self._start if self._renew_until is None else replace(self._start, deadline=self._renew_until())

    def open_channel(self) -> Channel:
        """Open a channel in which the secrets are already queued, so that only the new process reads them."""
        channel = Channel()
        if self._secrets and not channel.send(ControlMessage(secrets=self._secrets)):
            channel.close()
            raise OSError("the secrets could not be sent")
        return channel

    def raise_if_unwanted(self) -> None:
        """Raise LaunchAbandoned if the caller no longer wants the process."""
        if self._should_end is not None and self._should_end():
            raise LaunchAbandoned("the process is no longer wanted")


class ColdStart:
    """Cold start requested from the launcher's keeper thread, and its outcome."""

    def __init__(self, launch: LaunchRequest) -> None:
        self.launch = launch
        self.awaited = True
        self.outcome: TrainingProcess | OSError | None = None


def spawn_forked(request: LaunchRequest, zygote: socket.socket) -> TrainingProcess:
    """Have the zygote fork a process.

    A child that exists in spite of one of these errors, or that starts late, ends by itself: its parent or its control
    socket is gone.

    Raises:
        ConnectionError: The zygote is gone.
        TimeoutError: The zygote is frozen.
        LaunchAbandoned: The caller no longer wants the process.
        LaunchError: The zygote cannot fork it.
        OSError: This process is out of memory or descriptors.
    """
    with ExitStack() as undo:
        channel = request.open_channel()
        undo.callback(channel.close)
        status, zygote_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(status.close)
        with zygote_status:
            # The status socket comes first: when the zygote is out of descriptors, the kernel cuts off the last ones.
            fds = [zygote_status.fileno(), *channel.trainer_fds]
            socket.send_fds(zygote, [request.launch_spec().to_json().encode()], fds)
        channel.release_trainer_ends()
        _await_answer(status, request)
        packet, descriptors, _flags, _address = socket.recv_fds(status, 4096, 1)
        if not packet:
            raise ConnectionError("the zygote is gone")
        answer = json.loads(packet)
        if "failed" in answer:
            raise LaunchError(f"the zygote could not fork: {answer['failed']}")
        process: ProcessHandle
        if descriptors:
            process = PidfdHandle(descriptors[0])
        elif pidfd_refusal() is not None:
            process = PolledHandle(answer["pid"], answer["start_time"])
        else:
            raise LaunchError("no descriptor is left for a new process")
        undo.callback(process.close)
        identity = ProcessIdentity.of_process(answer["pid"], answer["start_time"])
        started = TrainingProcess(identity, process, channel, ZygoteExitWatcher(status, process))
        undo.pop_all()
    return started


def _await_answer(status: socket.socket, request: LaunchRequest) -> None:
    waiting = select.poll()
    waiting.register(status, select.POLLIN)
    deadline = time.monotonic() + FORK_SECONDS
    while not waiting.poll(LOOK_SECONDS * 1000):
        request.raise_if_unwanted()
        if time.monotonic() >= deadline:
            raise TimeoutError("the zygote does not answer")


def spawn_cold(request: LaunchRequest, environment: Mapping[str, str]) -> TrainingProcess:
    """Start a new interpreter as a child of the calling thread; raise OSError if the system has no resources for it."""
    with ExitStack() as undo:
        channel = request.open_channel()
        undo.callback(channel.close)
        fds = channel.trainer_fds
        arguments = [request.launch_spec().to_json(), *map(str, fds), str(os.getpid())]
        popen = subprocess.Popen(
            [sys.executable, "-m", "worker.process.child", *arguments],
            pass_fds=fds,
            env=environment,
            cwd=CODE_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=fds[1],
            stderr=fds[2],
        )
        undo.callback(popen.wait)
        undo.callback(popen.kill)
        channel.release_trainer_ends()
        identity = ProcessIdentity.of_process(popen.pid, start_time(popen.pid))
        process = open_process(popen.pid)
        undo.callback(process.close)
        started = TrainingProcess(identity, process, channel, ColdExitWatcher(popen, process))
        undo.pop_all()
    return started
