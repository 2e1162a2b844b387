"""A part of the resume matrix (`make resume-matrix` is the whole): a run of any objective goes on exactly."""

import pytest

from tests.worker.training.cells import Cell, Lab
from tests.worker.training.tiny import Forks


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"), forks)


@pytest.mark.parametrize(
    "cell",
    [
        Cell("dpo", "qlora", "dropout"),
        Cell("kto", "lora", "evaluation"),
        Cell("grpo", "full", "dropout"),
        Cell("rloo", "lora", "evaluation"),
    ],
    ids=str,
)
def test_a_run_goes_on_exactly_from_the_first_and_in_the_second_epoch(cell: Cell, lab: Lab) -> None:
    whole = lab.undisturbed(cell)
    assert whole.result["outcome"] == "completed", whole.result
    places = lab.places(whole)
    for place in ("mid-epoch", "second epoch"):
        step = places[place]
        assert lab.differences(whole, lab.resumed(cell, whole, step), step) == [], place
