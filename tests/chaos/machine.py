"""Speed of this machine, which scales the leases: 3 s is too short where a process takes seconds to start."""

import os

from tests.slowness import slowness

_BESIDE_OTHER_TESTS = 3.0
"""In a session of several processes a renewal may have to wait for a processor for a second or two."""

SLOWNESS = max(slowness(), _BESIDE_OTHER_TESTS if "PYTEST_XDIST_WORKER" in os.environ else 1.0)
