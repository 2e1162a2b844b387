<<<<<<< HEAD
"""Speed of this machine, which scales the leases: 3 s is too short where a process takes seconds to start."""
=======
"""The slowness of this machine at the start of a campaign: leases are as long as it needs."""
>>>>>>> w/suite

from tests.slowness import slowness

<<<<<<< HEAD
_IMPORT = "import fastapi, sqlalchemy.orm, time; print(time.process_time())"
_SECONDS = 0.8
"""CPU seconds of this import on the slowest machine on which leases of 3 s are sufficient."""
_MOST = 4.0


def slowness() -> float:
    """Return the factor by which this machine starts processes more slowly than the reference; at least 1."""
    took = min(
        float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    return min(max(took / _SECONDS, 1.0), _MOST)


SLOWNESS = round(slowness(), 1)
=======
SLOWNESS = slowness()
>>>>>>> w/suite
