"""How slow this machine is, so that leases are as long as it needs: one of 3 s is no fault to survive where a process
takes seconds to start.
"""

import subprocess
import sys

_IMPORT = "import fastapi, sqlalchemy.orm, time; print(time.process_time())"
_SECONDS = 0.8
"""Processor time that this takes on the slowest machine on which leases of 3 s have always sufficed."""
_MOST = 4.0


def slowness() -> float:
    """1, or how many times longer this machine takes to start something."""
    took = min(
        float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    return min(max(took / _SECONDS, 1.0), _MOST)


SLOWNESS = round(slowness(), 1)
