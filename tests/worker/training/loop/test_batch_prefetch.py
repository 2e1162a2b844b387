"""Batches of the next step are read while the current one is computed, and are the same."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from worker.training.loop.batch_prefetch import BatchPrefetch


@pytest.fixture
def collated() -> list[list[int]]:
    return []


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    GradientState().dataloader_references = [None]  # of iterators that are not at their end


@pytest.fixture
def loader(accelerator: Accelerator, collated: list[list[int]]) -> Any:
    """Loader of seven batches, `collated` in order, as transformers prepares it."""

    def collate(rows: list[int]) -> torch.Tensor:
        collated.append(rows)
        return torch.tensor(rows)

    return accelerator.prepare_data_loader(DataLoader([*range(14)], batch_size=2, collate_fn=collate))


def take_epoch(prefetch: BatchPrefetch, loader: Any, counts: list[int]) -> list[list[int]]:
    """Return the rows of each step of an epoch, whose steps have so many batches."""
    source, steps = iter(loader), []
    for count in counts:
        batches = list(islice(prefetch.batches(source, count), count))
        prefetch.read_next_step()
        steps.append([int(row) for batch in batches for row in batch])
    return steps


@pytest.mark.parametrize("counts", [[1] * 7, [2, 2, 2, 1], [3, 3, 1], [7]])
def test_steps_have_the_batches_of_the_epoch_in_their_order(loader: Any, counts: list[int]) -> None:
    prefetch = BatchPrefetch()
    for _ in range(2):
        steps = take_epoch(prefetch, loader, counts)
        assert [row for step in steps for row in step] == [*range(14)]
        assert [len(step) for step in steps] == [2 * count for count in counts]


def test_reading_collates_the_next_step_before_it_is_asked_for(loader: Any, collated: list[list[int]]) -> None:
    prefetch, source = BatchPrefetch(), iter(loader)
    next(prefetch.batches(source, 1))
    before = len(collated)
    prefetch.read_next_step()
    assert len(collated) == before + 1
    next(prefetch.batches(source, 1))
    assert len(collated) == before + 1


def test_reading_does_not_go_past_the_last_batch_of_an_epoch(loader: Any) -> None:
    prefetch, source = BatchPrefetch(), iter(loader)
    assert len(list(islice(prefetch.batches(source, 7), 7))) == 7
    prefetch.read_next_step()
    assert GradientState().end_of_dataloader  # until the iterator is exhausted, accelerate is in the epoch


def test_batches_left_of_an_epoch_that_ended_early_are_not_those_of_the_next(loader: Any) -> None:
    prefetch = BatchPrefetch()
    take_epoch(prefetch, loader, [2, 2])
    assert take_epoch(prefetch, loader, [2])[0] == [0, 1, 2, 3]


def test_an_error_of_the_next_step_is_raised_in_that_step(accelerator: Accelerator) -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        if 6 in rows:
            raise ValueError("row 6")
        return torch.tensor(rows)

    loader = accelerator.prepare_data_loader(DataLoader([*range(14)], batch_size=2, collate_fn=collate))
    prefetch, source = BatchPrefetch(), iter(loader)
    for _ in range(2):  # the third batch is returned after the fourth is collated, by accelerate
        assert len(list(islice(prefetch.batches(source, 1), 1))) == 1
        prefetch.read_next_step()
    with pytest.raises(ValueError, match="row 6"):
        next(prefetch.batches(source, 1))
