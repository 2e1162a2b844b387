"""A part of the resume matrix (`make resume-matrix` is the whole): a run of any objective goes on exactly."""

import pytest

from tests.worker.training.cells import Cell, Lab
from tests.worker.training.tiny import Forks, Outcome


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"), forks)


def computes_reference(outcome: Outcome) -> bool:
    return any("Computing the reference" in record["line"] for record in outcome.of("message"))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell("sft", "full", "epochs"), marks=pytest.mark.full),
        Cell("dpo", "qlora", "dropout"),
        pytest.param(Cell("kto", "lora", "evaluation"), marks=pytest.mark.full),
        pytest.param(Cell("orpo", "lora", "dropout"), marks=pytest.mark.full),
        pytest.param(Cell("simpo", "qlora", "evaluation"), marks=pytest.mark.full),
        Cell("gkd", "lora", "dropout"),
        Cell("grpo", "full", "dropout"),
        pytest.param(Cell("rloo", "lora", "evaluation"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_run_goes_on_exactly_from_the_first_and_in_the_second_epoch(cell: Cell, lab: Lab) -> None:
    whole = lab.undisturbed(cell)
    assert whole.result["outcome"] == "completed", whole.result
    places = lab.places(whole)
    for place in ("mid-epoch", "second epoch"):
        step = places[place]
        again = lab.resumed(cell, whole, step)
        assert lab.differences(whole, again, step) == [], place
        if cell.objective == "dpo":  # a checkpoint contains the reference log-probabilities
            assert [computes_reference(one) for one in (whole, again)] == [True, False]
