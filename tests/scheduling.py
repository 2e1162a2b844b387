"""Distribution of the tests over processes with pytest-xdist; hooks of `tests/conftest.py`.

All tests of a file run in one process, so its fixtures are made once. The group is computed here from the path in the
node id. The scheduler `loadgroup` of pytest-xdist 3.8 cannot be used: it appends the group to `item._nodeid`, which
pytest 9.2 no longer reads (pytest-xdist issue 1386), and then distributes single tests without a warning.
"""

import contextlib
import os
import zlib
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import xdist_processes

_FOLDERS = {"tests/e2e/": 1, "tests/worker/training/": 2}
"""Folders whose files share fixtures of the session that are slow to make, and the most processes that run them."""

_MOST_PROCESSES = 8
"""Upper limit of `-n auto`: each process imports the whole service and torch, and starts its own PostgreSQL."""

FIRST = "tests/chaos/test_chaos.py"
"""The longest test, which waits for half of its time; started first."""


class ByFile(LoadScopeScheduling):
    """Give each file, or each part of `_FOLDERS`, to one process, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        for folder, parts in _FOLDERS.items():
            if path.startswith(folder):
                return f"{folder}{zlib.crc32(path.encode()) % parts}"
        return path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Create the scheduler of the process that distributes the tests."""
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the processes that will run the tests from one that has imported what the tests import."""
    stack = contextlib.ExitStack()
    stack.enter_context(xdist_processes.template(specs))
    config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Choose the number of processes of `-n auto`: five for two idle cores, one for each core of a busy machine.

    Tests wait more than half of their time, for leases and for other processes, so more processes than cores keep
    idle cores busy. Where other programs use the cores, more processes only make leases expire. The use of the
    processors is sampled now: the load average would still include the tests that have just ended.
    """
    cores = len(os.sched_getaffinity(0))
    is_idle = psutil.cpu_percent(interval=1.0) < 50
    return min(5 * cores // 2 if is_idle else cores, _MOST_PROCESSES)
