"""Models and a warm process, shared by the tests of training."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker.training.tiny import Forks, make_chat_dataset, make_tiny_model
from tests.worker.training.two_ranks import TwoRanks


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with attention dropout."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", dropout=0.1)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short chats."""
    return make_chat_dataset(tmp_path_factory.mktemp("data") / "chats.jsonl", 40)


@pytest.fixture(scope="session")
def hub_cache(shared_folder: Path) -> Path:
    """What the processes of `forks` have of the hub; empty but for what a test puts there."""
    return shared_folder / "hub"


@pytest.fixture(scope="session")
def forks(shared_folder: Path, hub_cache: Path) -> Iterator[Forks]:
    """Fresh training processes without the cost of their imports."""
    server = Forks(shared_folder / "forks" / "training", HF_HUB_CACHE=str(hub_cache))
    yield server
    server.close()


@pytest.fixture(scope="session")
def two_ranks(forks: Forks) -> Iterator[TwoRanks]:
    """Fresh training processes on two devices."""
    other = forks.another()
    yield TwoRanks(forks, other)
    other.close()


@pytest.fixture
def copy_model(tiny_model: Path, tmp_path: Path) -> Callable[[], Path]:
    """A function that copies the tiny model, so that a test may spoil it."""

    def copy() -> Path:
        return Path(shutil.copytree(tiny_model, tmp_path / "model"))

    return copy
