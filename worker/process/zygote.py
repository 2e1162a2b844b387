"""Zygote: the process that training processes fork from, with everything imported and no device opened.

It runs no thread, opens no device and does no arithmetic, since a fork after any of these is broken. It receives a
request to start a process in a packet with that process's descriptors, forks, and reports the exit of each child on
that child's own status socket, so that the threads waiting for them share nothing. It ends with its worker, and its
children end with it.

Protocol: over a SOCK_SEQPACKET pair it sends `{"ready": true}` or `{"failed": reason}` once, then receives one
`worker.process.child.LaunchSpec` per packet with five descriptors (status, report, stdout, stderr, control). On the
status socket it sends `{"pid", "start_time"}` with a pidfd and later the exit, or `{"failed": reason}` once.
"""

import argparse
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.infra.process.identity import start_time
from worker import devices
from worker.process import child
from worker.process.orphans import Orphans

_PROBE_SECONDS = 120
_LARGEST_REQUEST = 64 * 1024
_FDS_PER_REQUEST = 5


def main(arguments: Sequence[str]) -> None:
    """Preload the modules, then serve: `python -m worker.process.zygote --fd N --parent PID [module …]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("modules", nargs="*")
    given = parser.parse_args(list(arguments))
    child.die_with_parent(given.parent)
    # A service manager signals every process of the service: the trainers then save, and must not lose their parent
    # meanwhile. The zygote ends when its worker does. The signals are blocked and not ignored, since a child inherits
    # the mask, and signals to a child must stay pending until the child can handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, child.TERMINATION_SIGNALS)
    worker = socket.socket(fileno=given.fd)
    try:
        preload(given.modules)
        probe_gpu()
    except Exception as problem:
        worker.send(json.dumps({"failed": f"{type(problem).__name__}: {problem}"[:2000]}).encode())
        raise SystemExit(1) from problem
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page that the children share
    worker.send(b'{"ready": true}')
    serve(worker)


def preload(modules: Sequence[str]) -> None:
    """Import `modules`; raise RuntimeError if one of them started a thread or touched the GPU."""
    with child.collector_off(), capability_from_nvml():
        for module in modules:
            importlib.import_module(module)
    threads = _threads()
    if len(threads) > 1:
        raise RuntimeError(f"the imports started threads, which no fork would have: {threads}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("the imports initialized CUDA, which no fork of this process could use")


def _threads() -> list[str]:
    """Return the names of all Python and C threads but jemalloc's (in pyarrow), which it recreates after a fork."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name != "jemalloc_bg_thd"]


@contextmanager
def capability_from_nvml() -> Iterator[None]:
    """Answer `torch.cuda.get_device_capability` from NVML while modules are imported.

    bitsandbytes asks for it at import. The real function creates a CUDA context, and no fork of a process
    with a context can use the GPU.
    """
    if not devices.has_gpu():
        yield
        return
    import torch

    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: devices.capability(_index(device))
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def _index(device: Any) -> int:
    """Return the index of a device in any form that torch takes; 0 if it names none, since none is current yet."""
    if isinstance(device, str):
        index: Any = device.rpartition(":")[2]
    else:
        index = getattr(device, "idx", getattr(device, "index", device))  # torch.cuda.device, torch.device
    return int(index) if str(index).isdigit() else 0


def probe_gpu() -> None:
    """Use the GPU in a child, on a machine that has one; raise RuntimeError if that fails."""
    if "torch" not in sys.modules or not devices.has_gpu():
        return
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _probe_in_child(writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"a forked process cannot use the GPU (exit {code}): {said or 'no output'}")


def _probe_in_child(writing: int) -> None:
    code = 1
    try:
        signal.alarm(_PROBE_SECONDS)
        import bitsandbytes.functional
        import torch

        ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        packed, state = bitsandbytes.functional.quantize_4bit(ones, quant_type="nf4")
        back = bitsandbytes.functional.dequantize_4bit(packed, state)
        if float((back @ ones).sum()) != 64.0**3:
            raise RuntimeError("a product of NF4 ones is wrong")
        code = 0
    except BaseException as problem:
        os.write(writing, f"{type(problem).__name__}: {problem}"[:2000].encode())
    finally:
        os._exit(code)


def serve(worker: socket.socket) -> None:
    """Fork on request and report the exit of each child, until the worker is gone."""
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd → process id, status socket
    left = Orphans()
    left.adopt()
    waiting = select.poll()
    waiting.register(worker, select.POLLIN)
    while True:
        for descriptor, _event in waiting.poll():
            if descriptor == worker.fileno():
                packet, fds, _flags, _address = socket.recv_fds(worker, _LARGEST_REQUEST, _FDS_PER_REQUEST)
                if not packet:
                    return
                started = _fork(child.LaunchSpec.from_json(packet), fds)
                if started is not None:
                    pidfd, pid, status = started
                    with left.starting() as own:
                        own.add(pid)
                    children[pidfd] = (pid, status)
                    waiting.register(pidfd, select.POLLIN)
            else:
                waiting.unregister(descriptor)
                _report_exit(descriptor, *children.pop(descriptor), left)


def _fork(start: child.LaunchSpec, fds: list[int]) -> tuple[int, int, socket.socket] | None:
    """Fork a child; return its pidfd, process id and status socket, or None after reporting a lack of resources.

    A failure must not end this process: every run of the machine would end with it.
    """
    if not fds:
        return None  # no descriptor was left: the launcher sees its status socket closed
    status_fd, *trainer_fds = fds
    status = socket.socket(fileno=status_fd)
    parent = os.getpid()
    pid = None
    try:
        if len(fds) < _FDS_PER_REQUEST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        if pid == 0:
            child.run(start, trainer_fds, parent)
        pidfd = os.pidfd_open(pid)
        # Read before the child can be reaped, these identify that child and no other, permanently.
        started = {"pid": pid, "start_time": start_time(pid)}
    except OSError as problem:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        failed = json.dumps({"failed": str(problem)}).encode()
        _try_send(lambda: status.send(failed))
        status.close()
        return None
    finally:
        for descriptor in trainer_fds:
            os.close(descriptor)
    _try_send(lambda: socket.send_fds(status, [json.dumps(started).encode()], [pidfd]))
    return pidfd, pid, status


def _report_exit(pidfd: int, pid: int, status: socket.socket, left: Orphans) -> None:
    """Report the exit of a child once no process that it has started is left."""
    _, raw = os.waitpid(pid, 0)
    left.kill()
    code = os.waitstatus_to_exitcode(raw)
    end = {"code": code} if code >= 0 else {"signal": -code}
    _try_send(lambda: status.send(json.dumps(end).encode()))
    status.close()
    os.close(pidfd)


def _try_send(send: Callable[[], object]) -> None:
    try:
        send()
    except OSError:
        pass  # the launcher no longer listens, and the child's own control socket has ended it


if __name__ == "__main__":
    main(sys.argv[1:])
