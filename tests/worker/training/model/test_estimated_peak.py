"""The estimated peak of a full-size model is that of a simulated step; `make estimates SIZE=full` shows all cells."""

import statistics

import pytest
import torch

from app.estimator.forward_pass import Batch
from benchmarks.full_size_estimates import MEDIAN, WORST, Cell, estimated, grid, simulated
from benchmarks.step_simulation import backward

CELLS = [
    Cell("Llama-3.2-1B", "full", Batch(2, 4096), "full", accumulates=True),
    Cell("Phi-3-mini", "lora", Batch(1, 4096, texts=2, positions_each=True), "off", liger=True),
]
OTHER_CELLS = [
    Cell("Llama-3.2-1B", "qlora", Batch(4, 2048), "off"),
    Cell("Qwen3-0.6B", "lora", Batch(2, 1024, masked=True), "selective"),
    Cell("Qwen3-0.6B", "qlora", Batch(1, 4096, texts=4, positions_each=True), 10, liger=True),
]


def peak_error(cell: Cell) -> float:
    return estimated(cell).tensors / simulated(cell).peak - 1


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in OTHER_CELLS)],
    ids=lambda cell: f"{cell.model}-{cell.method}-{cell.checkpointing}-{'liger' if cell.liger else ''}",
)
def test_estimated_peak_of_full_size_model_is_that_of_simulated_step(cell: Cell) -> None:
    assert abs(peak_error(cell)) <= MEDIAN


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_estimated_peaks_of_whole_grid_are_within_their_goals() -> None:
    errors = {cell: abs(peak_error(cell)) for cell in grid()}
    assert statistics.median(errors.values()) <= MEDIAN
    assert {cell: error for cell, error in errors.items() if error > WORST} == {}


def test_gradients_of_simulated_backward_pass_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    inputs = torch.randn(4, 8)

    def loss() -> torch.Tensor:
        hidden = inputs
        for layer in layers:
            hidden = hidden + torch.nn.functional.silu(layer(hidden)) * layers[0].weight.sum(0)
        return hidden.pow(2).mean()

    weights = [weight for layer in layers for weight in layer.parameters()]
    expected = torch.autograd.grad(loss(), weights)
    backward([loss()])
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient)
