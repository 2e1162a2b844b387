"""The training processes of one attempt: one for each device of the run, which start and end together."""

import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from anneal.contracts.attempt.messages import ControlMessage
from app.infra.process.identity import ProcessIdentity, process_stat
from worker.process.channel import Source
from worker.process.training_process import Exit, TrainingProcess
from worker.wire.rank_place import EXIT_PEER_LOST

_CAUSE_SECONDS = 5.0
"""Seconds to wait for the end that made the others end; the kernel may still be dumping or reaping it."""


class TrainingGroup:
    """Training processes of one host by rank; used by one supervisor thread at a time.

    The process of rank 0 decides and reports. The group ends when that process has ended, or another one with an error.
    """

    def __init__(self, processes: Sequence[TrainingProcess], first_rank: int = 0) -> None:
        """Take over the processes.

        `first_rank` is above 0 for the processes of a part, whose rank 0 is on another host.
        """
        self._processes = list(processes)
        self._at_end: list[Callable[[], None]] = []
        self._first_rank = first_rank
        self._exits: dict[int, Exit] = {}
        """Ends seen so far by rank, in the order in which they were seen."""
        self._lost_at: float | None = None

    @property
    def identities(self) -> list[ProcessIdentity]:
        """Processes of the group, by rank."""
        return [process.identity for process in self._processes]

    def at_end(self, clean_up: Callable[[], None]) -> None:
        """Call `clean_up` when all processes have ended and the group is closed."""
        self._at_end.append(clean_up)

    def send(self, message: ControlMessage) -> bool:
        """Send a message; return False if the first process is gone or its socket is full.

        A deadline is for every process. Requests are for rank 0, which shares what follows from them.
        """
        if message.renew_until is not None:
            for process in self._processes[1:]:
                process.send(ControlMessage(renew_until=message.renew_until))
        return self._processes[0].send(message)

    def poll(self) -> Exit | None:
        """Return the end of the group, or None while it runs.

        Where several processes have ended, it is the end that caused the others.
        """
        for rank, process in self._by_rank():
            if rank not in self._exits and (end := process.poll()) is not None:
                self._exits[rank] = replace(end, rank=rank)
        causes = [
            end for end in self._exits.values() if end.code != EXIT_PEER_LOST and not (end.rank and end.code == 0)
        ]
        if causes:
            return causes[0]
        if not any(end.code == EXIT_PEER_LOST for end in self._exits.values()):
            return None
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        return Exit(peer_lost=True) if now - self._lost_at > _CAUSE_SECONDS else None

    @property
    def is_done(self) -> bool:
        """True if every process has ended with code 0, as those of other ranks than 0 do after the last step."""
        return len(self._exits) == len(self._processes) and all(end.code == 0 for end in self._exits.values())

    def wait(self, timeout: float) -> None:
        """Wait until a process has sent something or has ended, for at most `timeout` seconds."""
        waiting = select.poll()
        for rank, process in self._by_rank():
            waiting.register(process.channel, select.POLLIN)
            if rank not in self._exits:
                waiting.register(process.fate, select.POLLIN)
        waiting.poll(max(timeout, 0) * 1000)

    def receive(self) -> Iterator[tuple[int, list[tuple[Source, bytes]]]]:
        """Yield what each process has sent, with its rank; never waits."""
        for rank, process in self._by_rank():
            if pieces := process.channel.receive(0.0):
                yield rank, pieces

    def drain(self) -> Iterator[tuple[int, list[tuple[Source, bytes]]]]:
        """Yield everything that is left of the output, once the processes have ended."""
        for rank, process in self._by_rank():
            if pieces := process.channel.drain():
                yield rank, pieces

    def suspended(self) -> tuple[int, ...]:
        """Return the ranks whose process is suspended; the others wait for it in silence."""
        states = ((rank, process_stat(process.identity.pid)) for rank, process in self._by_rank())
        return tuple(rank for rank, stat in states if stat is not None and stat.state in ("T", "t"))

    def _by_rank(self) -> Iterator[tuple[int, TrainingProcess]]:
        return enumerate(self._processes, self._first_rank)

    def kill(self) -> None:
        """Kill every process of every session with SIGKILL, and wait until all are gone.

        Raises:
            StillAliveError: One does not die within seconds.
        """
        self._begin_kill()
        for process in self._processes:
            process.kill()

    def _begin_kill(self) -> None:
        """Send SIGKILL to all at once: each may take a second to die, as one with a GPU does."""
        for process in self._processes:
            process.begin_kill()

    def close(self) -> None:
        """Kill what is left running and close every descriptor.

        Raises:
            StillAliveError: Processes do not die; their records for a later sweep then stay.
        """
        problem: Exception | None = None
        self._begin_kill()
        for process in self._processes:
            try:
                process.close()
            except Exception as error:  # the others must not live longer
                problem = problem or error
        for clean_up in self._at_end:
            clean_up()
        if problem is not None:
            raise problem
