"""Zygote: the process that training processes fork from, with everything imported and no device opened.

It runs no thread, opens no device and does no arithmetic, since a fork after any of these is broken. It receives a
request to start a process in a packet with that process's descriptors, forks, and reports the exit of each child on
that child's own status socket, so that the threads waiting for them share nothing. It ends with its worker, and its
children end with it.

Protocol: over a SOCK_SEQPACKET pair it sends `{"ready": true, "broken": {UUID of a GPU: reason}}` or
`{"failed": reason}` once, then receives one
`worker.process.child.LaunchSpec` per packet with five descriptors (status, report, stdout, stderr, control). On the
status socket it sends `{"pid", "start_time"}`, with a pidfd unless the kernel refuses them, and later the exit, or
`{"failed": reason}` once.
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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from app.infra.process.handle import POLL_SECONDS, PidfdHandle, ProcessHandle, open_process, pidfd_refusal
from app.infra.process.identity import start_time
from worker import devices
from worker.devices import Device
from worker.process import child
from worker.process.orphans import Orphans

_CHECK = "worker.training.model.device_check"
_CHECK_SECONDS = 40
"""Time limit of a check; two of them and the imports fit into the time in which the launcher wants this process."""
_CHECKS_AT_ONCE = 8
"""Checks at the same time; each holds a CUDA context, and the host memory for it."""
_MAX_REASON = 300
_ADVICE = " (check it with `nvidia-smi`, and the kernel's log for Xid errors)"
_ADVISED = 3
"""Exit code of a check whose answer says itself what to do."""
_LARGEST_REQUEST = 64 * 1024
_FDS_PER_REQUEST = 5


def main(arguments: Sequence[str]) -> None:
    """Preload the modules, then serve: `python -m worker.process.zygote --fd N --parent PID [module …]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args(list(arguments))
    child.die_with_parent(options.parent)
    # A service manager signals every process of the service: the trainers then save, and must not lose their parent
    # meanwhile. The zygote ends when its worker does. The signals are blocked and not ignored, since a child inherits
    # the mask, and signals to a child must stay pending until the child can handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, child.TERMINATION_SIGNALS)
    worker = socket.socket(fileno=options.fd)
    try:
        preload_modules(options.modules)
        broken = check_gpus()
    except Exception as problem:
        worker.send(json.dumps({"failed": f"{type(problem).__name__}: {problem}"[:2000]}).encode())
        raise SystemExit(1) from problem
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page that the children share
    inherited = child.open_descriptors() - {worker.fileno()}
    worker.send(json.dumps({"ready": True, "broken": broken}).encode())
    serve_forks(worker, inherited)


def preload_modules(modules: Sequence[str]) -> None:
    """Import `modules`; raise RuntimeError if one of them started a thread or touched the GPU."""
    with child.collector_off(), capability_from_nvml():
        for module in modules:
            importlib.import_module(module)
    threads = _running_threads()
    if len(threads) > 1:
        raise RuntimeError(f"the imports started threads, which no fork would have: {threads}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("the imports initialized CUDA, which no fork of this process could use")


def _running_threads() -> list[str]:
    """Return the names of all Python and C threads that a fork would miss.

    jemalloc (in pyarrow) recreates its thread after a fork. NVML of driver 580 starts a thread when it is initialized,
    and a fork can use CUDA without it: `check_gpus` tries.
    """
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name != "jemalloc_bg_thd" and not name.startswith("cuda")]


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
    torch.cuda.get_device_capability = lambda device=None: devices.compute_capability(_device_index(device))
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def _device_index(device: Any) -> int:
    """Return the index of a device in any form that torch takes; 0 if it names none, since none is current yet."""
    if isinstance(device, str):
        index: Any = device.rpartition(":")[2]
    else:
        index = getattr(device, "idx", getattr(device, "index", device))  # torch.cuda.device, torch.device
    return int(index) if str(index).isdigit() else 0


def check_gpus() -> dict[str, str]:
    """Take a training step on each GPU, in a child that sees only that one; return why it fails where it does, by UUID.

    Raises:
        RuntimeError: A step works in a new process, and not in a forked one.
    """
    if "torch" not in sys.modules:
        return {}
    gpus = devices.list_gpus()
    failed: dict[Device, str] = {}
    for begin in range(0, len(gpus), _CHECKS_AT_ONCE):
        started = [(gpu, *_start_check(gpu)) for gpu in gpus[begin : begin + _CHECKS_AT_ONCE]]
        failed |= {gpu: reason for gpu, pid, answer in started if (reason := _end_check(pid, answer)) is not None}
    deadline = time.monotonic() + _CHECK_SECONDS
    for gpu, process in [(gpu, _start_new_check(gpu)) for gpu in failed]:
        try:
            code = process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code == 0:
            reason = failed[gpu].removesuffix(_ADVICE)
            raise RuntimeError(f"a forked process cannot use the GPU {gpu.id}, though a new one can: {reason}")
    return {gpu.id: reason for gpu, reason in failed.items()}


def _start_check(gpu: Device) -> tuple[int, int]:
    """Fork a child that checks a GPU; return its id and a descriptor from which its answer is read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _check_in_child(gpu, writing)
    os.close(writing)
    return pid, reading


def _end_check(pid: int, reading: int) -> str | None:
    """Wait for a check; return the reason why it failed, or None."""
    with os.fdopen(reading, "rb") as answer:
        said = " ".join(answer.read().decode(errors="replace").split())
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    silent = f"no answer within {_CHECK_SECONDS} s" if code == -signal.SIGALRM else f"its process ended with {code}"
    return (said or silent)[:_MAX_REASON] + ("" if code == _ADVISED else _ADVICE)


def _check_in_child(gpu: Device, writing: int) -> NoReturn:
    code = 1
    try:
        signal.alarm(_CHECK_SECONDS)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.id
        importlib.import_module(_CHECK).check_device(gpu.for_job())
        code = 0
    except BaseException as problem:
        message = getattr(problem, "message", None)  # of a `TrainingFailure`
        os.write(writing, (message or f"{type(problem).__name__}: {problem}")[:2000].encode())
        code = _ADVISED if message else 1
    finally:
        os._exit(code)


def _start_new_check(gpu: Device) -> "subprocess.Popen[bytes]":
    """Start a check in a new process, which shows whether the GPU or the fork is at fault."""
    return subprocess.Popen(
        ["env", f"CUDA_VISIBLE_DEVICES={gpu.id}", sys.executable, "-m", _CHECK, gpu.id],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def serve_forks(worker: socket.socket, inherited: Set[int] = frozenset()) -> None:
    """Fork on request and report the exit of each child, until the worker is gone.

    `inherited`: descriptors that children keep.
    """
    children: dict[int, tuple[ProcessHandle, socket.socket]] = {}  # process id → process, status socket
    has_pidfds = pidfd_refusal() is None
    left = Orphans()
    left.adopt()
    waiting = select.poll()
    waiting.register(worker, select.POLLIN)
    while True:
        readable = waiting.poll(POLL_SECONDS * 1000 if children and not has_pidfds else None)
        for pid, (process, status) in list(children.items()):
            if process.wait():
                if has_pidfds:
                    waiting.unregister(process)
                del children[pid]
                _report_exit(process, pid, status, left)
        if worker.fileno() in (descriptor for descriptor, _event in readable):
            packet, fds, _flags, _address = socket.recv_fds(worker, _LARGEST_REQUEST, _FDS_PER_REQUEST)
            if not packet:
                return
            started = _fork_child(child.LaunchSpec.from_json(packet), fds, inherited)
            if started is not None:
                pid, process, status = started
                with left.starting() as own:
                    own.add(pid)
                children[pid] = (process, status)
                if has_pidfds:
                    waiting.register(process, select.POLLIN)


def _fork_child(
    start: child.LaunchSpec, fds: list[int], inherited: Set[int] = frozenset()
) -> tuple[int, ProcessHandle, socket.socket] | None:
    """Fork a child; return its process id, its handle and status socket, or None after reporting a lack of resources.

    The child does nothing before it is reported: if this process is killed until then, the launcher has another one
    forked. A failure must not end this process: every run of the machine would end with it.
    """
    if not fds:
        return None  # no descriptor was left: the launcher sees its status socket closed
    status_fd, *trainer_fds = fds
    status = socket.socket(fileno=status_fd)
    parent = os.getpid()
    pid = None
    gate: list[int] = []
    try:
        if len(fds) < _FDS_PER_REQUEST:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        gate = list(os.pipe())
        pid = os.fork()
        if pid == 0:
            os.close(gate[1])
            if os.read(gate[0], 1) == b"":
                os._exit(1)
            child.forget_exit_handlers()
            child.run(start, trainer_fds, parent, inherited)
        process = open_process(pid)
        # Read before the child can be reaped, these identify that child and no other, permanently.
        started = {"pid": pid, "start_time": start_time(pid)}
    except OSError as problem:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        failed = json.dumps({"failed": str(problem)}).encode()
        _try_send(lambda: status.send(failed))
        status.close()
        for descriptor in gate:
            os.close(descriptor)
        return None
    finally:
        for descriptor in trainer_fds:
            os.close(descriptor)
    packet = json.dumps(started).encode()
    if isinstance(process, PidfdHandle):
        _try_send(lambda: socket.send_fds(status, [packet], [process.fileno()]))
    else:
        _try_send(lambda: status.send(packet))
    _try_send(lambda: os.write(gate[1], b"1"))
    for descriptor in gate:
        os.close(descriptor)
    return pid, process, status


def _report_exit(process: ProcessHandle, pid: int, status: socket.socket, left: Orphans) -> None:
    """Report the exit of a child once no process that it has started is left."""
    _, raw = os.waitpid(pid, 0)
    left.kill()
    code = os.waitstatus_to_exitcode(raw)
    end = {"code": code} if code >= 0 else {"signal": -code}
    _try_send(lambda: status.send(json.dumps(end).encode()))
    status.close()
    process.close()


def _try_send(send: Callable[[], object]) -> None:
    try:
        send()
    except OSError:
        pass  # the launcher no longer listens, and the child's own control socket has ended it


if __name__ == "__main__":
    main(sys.argv[1:])
