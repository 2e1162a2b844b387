"""Promises about the states of random number generators."""

import random
from typing import Any

import numpy
import pytest
import torch

from worker.training.checkpointing import rng_state


@pytest.fixture
def gpu_generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Generator in the place of that of the current GPU."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator.set_state)
    return generator


def test_state_that_was_taken_restores_every_generator_that_of_the_gpu_too(gpu_generator: torch.Generator) -> None:
    def draw() -> list[Any]:
        on_gpu = torch.rand(1, generator=gpu_generator).item()
        return [random.random(), float(numpy.random.random()), torch.rand(1).item(), on_gpu]

    state = rng_state.current_states()
    drawn = draw()
    rng_state.set_current(state)
    assert draw() == drawn


def test_state_of_a_gpu_is_ignored_on_a_cpu(gpu_generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    state = rng_state.current_states()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch.cuda, "set_rng_state")
    rng_state.set_current(state)
    assert "cuda" in state and "cuda" not in rng_state.current_states()
