"""A whole service for each file of these tests; every test leaves it with no worker."""

from collections.abc import Iterator

import pytest

from tests.stack import Stack


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    yield shared_stack
    for worker in shared_stack.workers:
        if worker.process.poll() is None:
            worker.thaw()
            worker.kill()
    shared_stack.workers.clear()
