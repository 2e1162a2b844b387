"""Small training processes for the tests of launching; each takes `[job, --report-fd, n, --control-fd, m]`."""

import atexit
import ctypes
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from worker.wire.control import Control
from worker.wire.reporter import Reporter

libc = ctypes.CDLL(None)
_kept: list[object] = []


def start(arguments: list[str]) -> tuple[dict[str, Any], Reporter, Control]:
    path, _, report_fd, _, control_fd = arguments
    return json.loads(Path(path).read_text()), Reporter(int(report_fd)), Control.start(int(control_fd))


def send(report: Reporter, type: str, **fields: Any) -> None:
    """Send a record that only these tests know."""
    report.send({"type": type, **fields})  # type: ignore[arg-type]


def quick(arguments: list[str]) -> int:
    job, report, _ = start(arguments)
    report.message("hello")
    return int(job.get("code", 0))


def about(arguments: list[str]) -> int:
    """Tell what a training process sees of the world."""
    _, report, _ = start(arguments)
    send(
        report,
        "about",
        pid=os.getpid(),
        session=os.getsid(0),
        folder=str(Path.cwd()),
        environment=dict(os.environ),
        descriptors=sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()),
        stdin=os.read(0, 10).decode(),
        oom_score_adj=int(Path("/proc/self/oom_score_adj").read_text()),
        modules=[name for name in ("torch", "json") if name in sys.modules],
    )
    return 0


def secretive(arguments: list[str]) -> int:
    """Tell which secret it has, and what the kernel shows to others of it and of its parent."""
    _, report, _ = start(arguments)
    shown = [
        Path(f"/proc/{pid}/{name}").read_bytes() for pid in ("self", os.getppid()) for name in ("environ", "cmdline")
    ]
    send(report, "secret", token=os.environ.get("HF_TOKEN"), shown=b"".join(shown).decode())
    return 0


def chatty(arguments: list[str]) -> int:
    """Say numbered things by every way there is, one after another."""
    _, report, _ = start(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    warnings.simplefilter("always")
    ways = [
        lambda n: print(f"{n} print"),
        lambda n: print(f"{n} stderr", file=sys.stderr),
        lambda n: logging.info("%d logging", n),
        lambda n: warnings.warn(f"{n} warning", stacklevel=1),
        lambda n: libc.printf(b"%d printf\n", n),
        lambda n: libc.puts(b"%d puts" % n),
        lambda n: os.write(1, b"%d write\n" % n),
        lambda n: subprocess.run([sys.executable, "-c", f"print('{n} subprocess')"], check=True),
        lambda n: report.message(f"{n} record"),
        lambda n: print(f"{n} partial", end=""),
        lambda n: libc.puts(b" %d continued" % n),
    ]
    for n in range(3 * len(ways)):
        ways[n % len(ways)](n)
    return 0


def cleans_up(arguments: list[str]) -> int:
    """Name the temporary folders of the zygote's modules, and make two that go with this process."""
    _, report, _ = start(arguments)
    theirs = importlib.import_module("tests.worker.process.preloads.cleans_up")
    finalized, registered = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    atexit.register(registered.cleanup)
    _kept.append(finalized)
    folders = (theirs.finalized, theirs.registered, finalized, registered)
    send(report, "folders", exist=[folder.name for folder in folders])
    return 0


def big(arguments: list[str]) -> int:
    """One line of a megabyte, and one record that is too large."""
    start(arguments)[1].message("x" * 1_000_000)
    print("y" * 1_000_000)
    print("z", file=sys.stderr)
    return 0


def die(arguments: list[str]) -> int:
    """Say a last line on every way and die as the job says."""
    job, report, _ = start(arguments)
    print("last print")
    libc.puts(b"last puts")
    report.message("last record")
    print("half a line", end="")
    match job["how"]:
        case "segv":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "exception":
            raise RuntimeError("on purpose")
        case "system exit":
            sys.exit("a reason")
    return 0


def wait_for_stop(arguments: list[str]) -> int:
    """Wait for a stop request and tell it."""
    _, report, control = start(arguments)
    control.stop_on_sigterm()
    report.message("waiting")
    # Looks again and again: a signal just before a wait that has no end would not be handled before its end.
    while (request := control.stop_requested) is None:
        select.select([], [], [], 0.05)
    send(report, "stopped", mode=request.mode, why=request.why)
    return 0


def hang(arguments: list[str]) -> int:
    """Hold the interpreter for ever, as a stuck C call does, with children in the session."""
    job, report, _ = start(arguments)
    children: list[int] = []
    while len(children) < job.get("children", 0):
        children.append(os.fork())
        if children[-1] == 0:
            signal.pause()
    send(report, "hanging", children=children)
    ctypes.PyDLL(None).pause()  # keeps the interpreter lock
    return 0


def daemons(arguments: list[str]) -> int:
    """Leave processes in sessions of their own, as daemons and hostile programs do, and end or hang."""
    job, report, _ = start(arguments)
    if job.get("disowns"):
        libc.prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    reading, writing = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if os.fork() == 0:
                    os.setsid()
                os.write(writing, b"%d\n" % os.getpid())
                while True:
                    signal.pause()
            os._exit(0)
    pids: list[int] = []
    while len(pids) < 6:
        pids += [int(line) for line in os.read(reading, 4096).split()]
    send(report, "daemons", pids=pids)
    match job["how"]:
        case "ends":
            return 0
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        signal.pause()


def late_child(arguments: list[str]) -> int:
    """End, leaving a child that goes on writing."""
    _, report, _ = start(arguments)
    if os.fork() == 0:
        while True:
            os.write(1, b"still here\n")
            select.select([], [], [], 0.01)
    report.message("parent ends")
    return 0


def count_threads(arguments: list[str]) -> int:
    """Tell how many threads the kernel sees in the parent."""
    _, report, _ = start(arguments)
    send(report, "threads", parent=len(list(Path(f"/proc/{os.getppid()}/task").iterdir())))
    return 0


def loaded(arguments: list[str]) -> int:
    """Tell whether a module is imported already."""
    job, report, _ = start(arguments)
    send(report, "loaded", loaded=job["module"] in sys.modules)
    return 0


def multiply(arguments: list[str]) -> int:
    """Tell whether the training libraries are imported already, with how many threads, and compute with two or more."""
    _, report, _ = start(arguments)
    warm = {name: name in sys.modules for name in ("torch", "transformers.trainer", "trl", "peft", "bitsandbytes")}
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))
    product = torch.ones(512, 512) @ torch.ones(512, 512)
    send(report, "product", warm=warm, total=float(product.sum()), cuda=torch.cuda.is_initialized(), threads=threads)
    return 0


def write_job(folder: Path, **job: Any) -> Path:
    """A job file in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(job, default=vars))
    return path
