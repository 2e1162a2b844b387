"""A plan by measured passes fits, with no more operations than that by the estimate; `make planner` is at full size."""

import pytest

from benchmarks.planner import MODELS, Cell, SimulatedModel, compare


@pytest.mark.full
def test_plans_by_counted_passes_fit_with_no_more_operations_than_by_the_estimate() -> None:
    described = MODELS["Qwen3-4B"](num_hidden_layers=4)
    simulated = SimulatedModel(described)
    ratios = []
    for gigabytes in (6, 7, 9, 12):
        comparison = compare(Cell("Qwen3-4B", 4096, gigabytes), simulated, described)
        assert comparison.planned.fits and (comparison.planned.needed_bytes or 0) <= comparison.cell.usable
        assert comparison.estimated.recomputed > 0, "the device is too large to show anything"
        ratios.append(comparison.planned_operations / comparison.estimated_operations)
    assert max(ratios) < 0.95
