"""Ranks: the processes that train one run together, each on a device of its own, as replicas of one model.

Rank 0 decides, reports and writes; the others follow. What depends on the rows of all ranks (losses, evaluations) is
gathered. What only one process can know (a request, the time, the disk) is decided by rank 0 and shared.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

# Imported by accelerate when it wraps a model: here, so that forks of the zygote have it.
import torch.distributed.algorithms.ddp_comm_hooks
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from worker.training.failures import TrainingFailure, chain_of, classify_error, one_line
from worker.wire.rank_place import RankPlace

NEVER = timedelta(days=7)
"""Time-out of collective operations: the supervisor ends a run whose ranks are all silent."""
_FIRST_POLL_SECONDS = 0.005
"""Pause of a wait at first; it grows to `_POLL_SECONDS`, so that a short wait ends soon."""
_MEETING_SECONDS = 300
"""Time in which rank 0 must be reachable for those of other hosts; it starts when they do."""
_POLL_SECONDS = 0.1
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_ALONE = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "distributed_type": DistributedType.NO}
"""State of accelerate in a process that trains alone."""
_PEER_WORDS = (
    "connection closed by peer", "connection reset by peer", "gloo/transport", "socket closed", "broken pipe",
    "remote process exited", "nccl remote error", "ncclremoteerror", "ncclsystemerror",
)  # fmt: skip
_OWN_WORDS = (
    # Of gloo: a condition that does not hold here, such as an interface without an address, or one more descriptor.
    "enforce fail",
    # Of NCCL: its GPU, what it was called with, and too little of /dev/shm, as in a container.
    "unhandled cuda error", "ncclinvalid", "shared memory segment",
)  # fmt: skip
"""Words of errors of the same kinds that are this process's own."""

T = TypeVar("T")


class Ranks:
    """The ranks of a run, as one of them sees them; a run on one device has one rank, and nothing here waits."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        """Create the view of a rank; `on_wait` is called when it begins to wait for others, and when it goes on."""
        self.rank = rank
        self.size = size
        self.first_on_host = 0
        """First of the ranks on this host."""
        self.on_host = 1
        """Number of ranks on this host."""
        self.per_sequence = 1
        """Number of consecutive ranks that share each sequence; they have the same rows."""
        self._store = store
        self._on_wait = on_wait

    @classmethod
    def join(
        cls, place: RankPlace | None, kind: Literal["cpu", "cuda"], on_wait: Callable[[bool], None] | None = None
    ) -> "Ranks":
        """Join the other ranks of the run; returns once all of them have joined.

        Everything of accelerate and transformers then finds the process group that is made here. On one host it uses
        the loopback interface, on several the one that the operator names, since neither the store nor the collective
        libraries authenticate anybody.

        Raises:
            RankZeroUnreachableError: another rank than 0, of a run on several hosts, cannot reach rank 0.
        """
        if place is None:
            return cls()
        local = {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}
        numbers = {"RANK": place.rank, "WORLD_SIZE": place.size, **local}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        # NCCL would use every interface whose name begins so, if there were no `=`.
        os.environ.update(GLOO_SOCKET_IFNAME=place.interface, NCCL_SOCKET_IFNAME=f"={place.interface}")
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate demands one, and nothing uses it
        if kind == "cuda":
            torch.cuda.set_device(place.local_rank)
        ranks = cls(place.rank, place.size, on_wait=on_wait)
        ranks.first_on_host, ranks.on_host = place.rank - place.local_rank, place.local_size
        with ranks._reporting_wait():
            if (address := place.address) is None:
                store: dist.Store = dist.FileStore(f"{place.meeting}/store", place.size)
            else:
                store = _open_store(place.rank, *address)
            try:
                dist.init_process_group(
                    _BACKENDS[kind], store=store, rank=place.rank, world_size=place.size, timeout=NEVER
                )
            except RuntimeError as error:
                if place.rank == 0 or place.address is None or is_peer_lost(error):
                    raise
                # The interface of a host can be away for a time, as after a restart of the host.
                raise RankZeroUnreachableError(f"interface {place.interface}: {one_line(error)}") from error
        ranks._store = store
        return ranks

    def stop_reporting_waits(self) -> None:
        """Report no wait from now on: the ranks wait for each other in each step."""
        self._on_wait = None

    @contextmanager
    def _reporting_wait(self) -> Iterator[None]:
        on_wait = self._on_wait
        if on_wait is not None:
            on_wait(True)
        yield
        if on_wait is not None:
            on_wait(False)

    @property
    def is_first(self) -> bool:
        """True for the rank that decides, reports and writes."""
        return self.rank == 0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups that share sequences, among which the rows of a step are divided."""
        return self.size // self.per_sequence

    @property
    def data_parallel_rank(self) -> int:
        """Number of this rank, or of its group, among those of `data_parallel_size`, from 0."""
        return self.rank // self.per_sequence

    @property
    def sequence_parallel_rank(self) -> int:
        """Number of this rank among those that share its sequences, from 0."""
        return self.rank % self.per_sequence

    # Collective operations, which every rank calls

    def broadcast_value(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        box = [value]
        with self._reporting_wait():
            dist.broadcast_object_list(box, 0)
        return box[0]

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._reporting_wait():
            dist.all_gather_object(values, value)
        return values

    def agree_on(self, error: Exception | None, stopped: bool) -> bool:
        """End work that each rank does by itself; return True if one of them was stopped in it.

        Raises:
            TrainingFailure: it failed on a rank; on that rank, its own error is raised.
        """
        failure, stopped = self.agree_on_end(error, stopped)
        if failure is not None:
            raise failure
        return stopped

    def agree_on_end(self, error: Exception | None, stopped: bool) -> tuple[Exception | None, bool]:
        """End such work as `agree_on` does, but return the failure: on a rank that failed, its own error."""
        own = None if error is None else classify_error(error)
        ends = self.gather_values((None if own is None else (own.code, own.message), stopped))
        stopped = any(was_stopped for _, was_stopped in ends)
        failures = [(rank, *failed) for rank, (failed, _) in enumerate(ends) if failed is not None]
        if error is not None or not failures:
            return error, stopped
        rank, code, message = failures[0]
        relayed = TrainingFailure(code, f"On rank {rank}: {message}")
        relayed.rank = rank
        return relayed, stopped

    def check_same(self, own_values: Mapping[str, str], advice: str) -> None:
        """Check that every rank has found the same; `found` maps what it is, in the plural, to its identity.

        Raises:
            TrainingFailure: `config_error` with the ranks, what each has found, and `advice`; on every rank.
        """
        every = self.gather_values(dict(own_values))
        for what in own_values:
            holders: dict[str, list[str]] = {}
            for rank, values in enumerate(every):
                holders.setdefault(values.get(what, "unknown"), []).append(str(rank))
            if len(holders) > 1:
                differing = "; ".join(
                    f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
                    for value, ranks in holders.items()
                )
                raise TrainingFailure(
                    "config_error", f"The processes of the run have different {what}: {differing}. {advice}"
                )

    # Signals, which do not wait

    def set_flag(self, name: str) -> None:
        """Set a flag that every rank can read."""
        if self._store is not None:
            self._store.set(name, "1")

    def has_flag(self, name: str) -> bool:
        """Return True if a rank has set the flag."""
        return self._store is not None and self._store.check([name])

    def wait_for_flag(self, name: str) -> None:
        """Wait until a rank has set a flag, for however long its work takes.

        Sends no heartbeat: the rank that works sends its own, and a wait must not hide that it hangs.
        """
        pause = _FIRST_POLL_SECONDS
        with self._reporting_wait():
            while not self.has_flag(name):
                time.sleep(pause)
                pause = min(1.2 * pause, _POLL_SECONDS)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """During the block, accelerate knows only this process, so that nothing waits for other ranks."""
        if self.size == 1:
            yield
            return
        states: list[dict[str, Any]] = [PartialState._shared_state, AcceleratorState._shared_state]
        before = [{name: state[name] for name in _ALONE} for state in states]
        for state in states:
            state.update(_ALONE)
        try:
            yield
        finally:
            for state, values in zip(states, before, strict=True):
                state.update(values)

    def wait_for_end(self) -> None:
        """Wait for the end of this process: rank 0 has what is left to do, and then the supervisor ends all ranks."""
        threading.Event().wait()


class RankZeroUnreachableError(Exception):
    """Rank 0 of a run on several hosts could not be reached from this one."""


def _open_store(rank: int, host: str, port: int) -> dist.Store:
    """Return the store of a run on several hosts, which rank 0 keeps; it listens on this address only."""
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # The supervisor keeps the port reserved with a socket that does not listen.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
            fd = listener.detach()
        return dist.TCPStore(host, port, is_master=True, timeout=NEVER, wait_for_workers=False, master_listen_fd=fd)
    try:
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=_MEETING_SECONDS), wait_for_workers=False
        )
    except dist.DistError as error:
        raise RankZeroUnreachableError(
            f"rank 0 could not be reached at {host}, port {port}, within {_MEETING_SECONDS} s"
        ) from error
    store.set_timeout(NEVER)
    return store


def is_peer_lost(error: BaseException) -> bool:
    """Return True if an exception only says that another rank has ended."""
    return any(_says_peer_lost(cause) for cause in chain_of(error))


def _says_peer_lost(error: BaseException) -> bool:
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or any(word in text for word in _OWN_WORDS):
        return False
    is_of_exchange = isinstance(error, dist.DistNetworkError | dist.DistBackendError)
    return is_of_exchange or any(word in text for word in _PEER_WORDS)
