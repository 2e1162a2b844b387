"""Server that the stages are forked from: it imports the training libraries once, and touches no GPU.

`python -m benchmarks.gpu_check.stage [module …]` imports the modules. Each line that it reads is a stage: JSON with the
fields of `Check` and the name of the stage's module. It writes 0 when it is ready. For each stage it writes the process
id of a fork, which leads a session of its own, and later its exit code.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from worker.process.child import die_with_parent


def main() -> None:
    die_with_parent(os.getppid())
    processes.prepare(sys.argv[1:])
    print(0, flush=True)
    for line in sys.stdin:
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _enter(json.loads(line), server)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _enter(request: dict[str, Any], server: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent(server)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # the log; the server answers on standard output
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _run(request.pop("module"), Check(**{**request, **_paths(request)}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _paths(request: dict[str, Any]) -> dict[str, Path]:
    return {name: Path(request[name]) for name in ("work", "weights", "rows")}


def _run(module: str, check: Check) -> int:
    try:
        importlib.import_module(module).run(check)
    except Exception as error:  # the next stage may succeed
        traceback.print_exc()
        check.record("stage", "failed", f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


if __name__ == "__main__":
    main()
