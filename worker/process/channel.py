"""Output and records of a training process, received in the exact order in which they were written.

Standard output, standard error and the records are three datagram sockets connected to one receiver, so the kernel
keeps a single queue for them: data written before a SIGKILL can still be read, and no stream overtakes
another. The receiver identifies the stream by the sender's address.

Limits: the kernel queues `net.unix.max_dgram_qlen` (10) datagrams, after which writers block; one write is at most the
send buffer (208 KiB or more), beyond which a program that does not split its writes gets EMSGSIZE
(`worker.process.child` splits Python's writes). A socket cannot be opened through /dev/stdout.
"""

import mmap
import select
import socket
import tempfile
from pathlib import Path
from typing import Literal

from anneal.contracts.attempt.messages import ControlMessage
from app.infra.files.tree import remove_tree

Source = Literal["report", "stdout", "stderr"]
SOURCES: tuple[Source, ...] = ("report", "stdout", "stderr")

_WANTED_BUFFER = 4 * 1024 * 1024
_MAX_BATCH = 512
_MAX_BATCH_BYTES = 4 * 1024 * 1024


class Channel:
    """Supervisor's end of the channel: receives output and records, sends control messages to the trainer."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="anneal-"))  # mode 0700, and removed before any other process can connect
        self._receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._senders: list[socket.socket] = []
        self._source_of: dict[str, Source] = {}
        try:
            self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WANTED_BUFFER)
            self._receiver.bind(str(folder / "receiver"))
            largest = 0
            for source in SOURCES:
                sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._senders.append(sender)
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WANTED_BUFFER)
                sender.bind(str(folder / source))
                sender.connect(str(folder / "receiver"))
                self._source_of[str(folder / source)] = source
                largest = max(largest, sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        finally:
            remove_tree(folder)
        # Not a `bytearray`, which writes zeros to all of its pages; these take memory as far as a datagram reaches.
        self._buffer = mmap.mmap(-1, largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._control, self._trainer_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)

    def fileno(self) -> int:
        """Return the receiver's descriptor, which is readable when data is queued."""
        return self._receiver.fileno()

    @property
    def trainer_fds(self) -> list[int]:
        """Descriptors to pass to the trainer: report, stdout, stderr, control."""
        return [*(sender.fileno() for sender in self._senders), self._trainer_control.fileno()]

    def release_trainer_ends(self) -> None:
        """Close this process's copies of the trainer's descriptors, once the trainer has its own."""
        for end in [*self._senders, self._trainer_control]:
            end.close()

    def receive(self, timeout: float | None = 0.0) -> list[tuple[Source, bytes]]:
        """Return the queued pieces in order; wait up to `timeout` seconds for the first one (None: no limit)."""
        pieces = self._read_queued()
        if pieces or timeout == 0.0:
            return pieces
        waiting = select.poll()
        waiting.register(self._receiver, select.POLLIN)
        waiting.poll(None if timeout is None else timeout * 1000)
        return self._read_queued()

    def drain(self) -> list[tuple[Source, bytes]]:
        """Return everything queued now: the remaining output, once the process has ended."""
        everything = []
        while pieces := self._read_queued():
            everything.extend(pieces)
        return everything

    def send(self, message: ControlMessage) -> bool:
        """Send a message to the trainer without waiting; return False if it is gone, not reading or closed."""
        try:
            self._control.send(message.to_json())
        except OSError:  # may happen in any thread, also after `close`
            return False
        return True

    def close(self) -> None:
        """Close every descriptor; a trainer that is still alive then exits by itself."""
        self.release_trainer_ends()
        self._control.close()
        self._receiver.close()

    def _read_queued(self) -> list[tuple[Source, bytes]]:
        pieces: list[tuple[Source, bytes]] = []
        received = 0
        while len(pieces) < _MAX_BATCH and received < _MAX_BATCH_BYTES:
            try:
                size, address = self._receiver.recvfrom_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            received += size
            source = self._source_of.get(address)
            if source is not None and size:
                pieces.append((source, bytes(memoryview(self._buffer)[:size])))
        return pieces
