"""The two ways in which a training process comes to be: forked by the zygote, or a new interpreter."""

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

from worker import session
from worker.channel import Channel
from worker.child import Start
from worker.process import ColdFate, TrainingProcess, ZygoteFate

FORK_SECONDS = 20.0
LOOK_SECONDS = 0.1
"""How often a caller who waits is asked whether it still wants the process."""
CODE_ROOT = Path(__file__).resolve().parent.parent


class LaunchError(RuntimeError):
    """A training process could not be started; the message says why."""


class LaunchAbandoned(LaunchError):
    """`should_end` said yes before there was a process; none is left behind."""


class Wanted:
    """The process that a caller waits for."""

    def __init__(
        self,
        start: Start,
        renew_until: Callable[[], float] | None,
        should_end: Callable[[], bool] | None,
        secrets: Mapping[str, str],
    ) -> None:
        self._start = start
        self._secrets = dict(secrets)
        self._renew_until = renew_until
        self._should_end = should_end

    def start(self) -> Start:
        """What to start now, with the deadline as it stands now."""
        return self._start if self._renew_until is None else replace(self._start, deadline=self._renew_until())

    def open_channel(self) -> Channel:
        """A channel to it, the secrets waiting in it to be read by nobody else."""
        channel = Channel()
        if self._secrets and not channel.send({"secrets": self._secrets}):
            channel.close()
            raise OSError("the secrets could not be handed over")
        return channel

    def check(self) -> None:
        """Raise LaunchAbandoned when the caller does not want it any more."""
        if self._should_end is not None and self._should_end():
            raise LaunchAbandoned("the process is not wanted any more")


class ColdStart:
    """A cold start that the launcher's keeper is asked for, and what came of it."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.awaited = True
        self.outcome: TrainingProcess | OSError | None = None


def forked(wanted: Wanted, zygote: socket.socket) -> TrainingProcess:
    """The process that the zygote forks.

    A child that exists all the same after one of these, or that comes late, ends by itself: its parent or its
    control socket is gone.

    Raises:
        ConnectionError: the zygote is gone.
        TimeoutError: it is frozen.
        LaunchAbandoned, LaunchError: nobody wants the process any more; the zygote cannot fork it.
        OSError: no memory or descriptors here.
    """
    with ExitStack() as undo:
        channel = wanted.open_channel()
        undo.callback(channel.close)
        status, zygote_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(status.close)
        with zygote_status:
            # Its status first: when the zygote is out of descriptors, the kernel cuts off the last ones.
            fds = [zygote_status.fileno(), *channel.trainer_fds]
            socket.send_fds(zygote, [wanted.start().to_json().encode()], fds)
        channel.release()
        _await_answer(status, wanted)
        packet, pidfds, _flags, _address = socket.recv_fds(status, 4096, 1)
        if not packet:
            raise ConnectionError("the zygote is gone")
        answer = json.loads(packet)
        if "failed" in answer:
            raise LaunchError(f"the zygote could not fork: {answer['failed']}")
        if not pidfds:
            raise LaunchError("no descriptor is left for a new process")
        undo.callback(os.close, pidfds[0])
        identity = session.Identity.of(answer["pid"], answer["start_time"])
        process = TrainingProcess(identity, pidfds[0], channel, ZygoteFate(status, pidfds[0]))
        undo.pop_all()
    return process


def _await_answer(status: socket.socket, wanted: Wanted) -> None:
    waiting = select.poll()
    waiting.register(status, select.POLLIN)
    deadline = time.monotonic() + FORK_SECONDS
    while not waiting.poll(LOOK_SECONDS * 1000):
        wanted.check()
        if time.monotonic() >= deadline:
            raise TimeoutError("the zygote does not answer")


def cold(wanted: Wanted, environment: Mapping[str, str]) -> TrainingProcess:
    """A new interpreter, child of the calling thread; raises OSError when there is no room for one."""
    with ExitStack() as undo:
        channel = wanted.open_channel()
        undo.callback(channel.close)
        fds = channel.trainer_fds
        arguments = [wanted.start().to_json(), *map(str, fds), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.child", *arguments],
            pass_fds=fds,
            env=environment,
            cwd=CODE_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=fds[1],
            stderr=fds[2],
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        channel.release()
        identity = session.Identity.of(process.pid, session.start_time(process.pid))
        pidfd = os.pidfd_open(process.pid)
        undo.callback(os.close, pidfd)
        started = TrainingProcess(identity, pidfd, channel, ColdFate(process, pidfd))
        undo.pop_all()
    return started
