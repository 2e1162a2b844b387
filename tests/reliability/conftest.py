"""A whole service for each file of these tests."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack, WorkerProcess


@pytest.fixture(scope="module")
def shared_stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The service of a file, with the leases of its `LEASE_SECONDS`."""
    values = {"lease_seconds": request.module.LEASE_SECONDS} if hasattr(request.module, "LEASE_SECONDS") else {}
    stack = Stack(tmp_path_factory.mktemp("stack"), **values)
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The service without a worker, unless the test uses `worker`."""
    shares_worker = "worker" in request.fixturenames
    if not shares_worker:
        _end_workers(shared_stack)
    yield shared_stack
    if not shares_worker:
        _end_workers(shared_stack)


@pytest.fixture
def worker(stack: Stack) -> WorkerProcess:
    """A worker that the tests one after another share, for those that only need one."""
    return stack.workers[0] if stack.workers else stack.add_worker()


def _end_workers(stack: Stack) -> None:
    for worker in stack.workers:
        if worker.process.poll() is None:
            worker.thaw()
            worker.kill()
    stack.workers.clear()
