"""Speed of this machine, which scales the leases: 3 s is too short where a process takes seconds to start."""

from tests.slowness import slowness

SLOWNESS = slowness()
