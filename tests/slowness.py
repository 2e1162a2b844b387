"""How slow this machine is now, as a factor on leases and time limits of tests.

A lease of 3 s suits tests only while a process starts in a fraction of it. The start of a Python process with a fixed
set of imports is timed by the clock on the wall, so that other programs on the same processors count as well.
"""

import statistics
import subprocess
import sys
import time

_IMPORTS = "import asyncio, decimal, email.message, http.client, json, xml.dom.minidom"
_SECONDS = 0.3
"""A start of this length still goes with leases of 3 s; on an idle machine it takes about 0.1 s."""
_MOST = 4.0


def slowness() -> float:
    """Measure the factor: 1 where a process starts within 0.3 s, at most 4."""
    seconds = statistics.median(_start() for _ in range(3))
    return round(min(max(seconds / _SECONDS, 1.0), _MOST), 1)


def _start() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", _IMPORTS], check=True)
    return time.monotonic() - began
