"""Masks of dropout that a hash decides about have the rate and the independence of random ones."""

import pytest
import torch

from worker.training.model.dropout.mask import draw_seed, kept_values
from worker.training.model.dropout.products import TorchProducts

CPU = torch.device("cpu")
SIZE = 1024
LARGEST_DEVIATION = 4.5
"""Standard deviations of independent values that a measured value may be from what is expected."""
SEEDS = [0, 1, 2**32, 2**63 - 1]


def dropped_values(seed: int, rate: float, rows: int = SIZE, columns: int = SIZE) -> torch.Tensor:
    return ~kept_values(torch.tensor([seed]), rows, columns, rate)


def correlation(some: torch.Tensor, other: torch.Tensor) -> float:
    """Correlation of two masks, in standard deviations of that of independent ones."""
    some, other = (mask.double() - mask.double().mean() for mask in (some, other))
    return float((some * other).sum() / (some.norm() * other.norm())) * some.numel() ** 0.5


class TestMask:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("rate", [0.01, 0.05, 0.5, 0.9])
    def test_drops_the_rate_of_all_values_and_of_each_row_and_column(self, rate: float, seed: int) -> None:
        dropped = dropped_values(seed, rate).double()
        deviation = (rate * (1 - rate)) ** 0.5
        assert abs(dropped.mean() - rate) < LARGEST_DEVIATION * deviation / SIZE + 1e-5
        for dimension in (0, 1):
            each = dropped.mean(dimension)
            assert each.var() == pytest.approx(deviation**2 / SIZE, rel=0.25)
            assert (each - rate).abs().max() < 6 * deviation / SIZE**0.5

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("rate", [0.05, 0.5])
    def test_neighbors_in_rows_columns_and_tiles_are_independent(self, rate: float, seed: int) -> None:
        dropped = dropped_values(seed, rate)
        for distance in (1, 2, 3, 8, 63, 64, 65, 128, 256):
            assert abs(correlation(dropped[:, :-distance], dropped[:, distance:])) < LARGEST_DEVIATION
            assert abs(correlation(dropped[:-distance], dropped[distance:])) < LARGEST_DEVIATION
        assert abs(correlation(dropped[1:, 1:], dropped[:-1, :-1])) < LARGEST_DEVIATION
        assert abs(correlation(dropped[1:, :-1], dropped[:-1, 1:])) < LARGEST_DEVIATION

    def test_no_two_rows_and_no_two_columns_are_alike(self) -> None:
        signs = dropped_values(7, 0.5).float() * 2 - 1
        for vectors in (signs, signs.t()):
            products = vectors @ vectors.t() / SIZE**0.5
            products.fill_diagonal_(0)
            assert products.abs().max() < 6.5

    @pytest.mark.parametrize("seed", SEEDS[:-1])
    def test_masks_of_neighboring_seeds_are_independent_also_when_shifted(self, seed: int) -> None:
        dropped = dropped_values(seed, 0.3)
        for other in (dropped_values(seed + 1, 0.3), dropped_values(seed + 2**32, 0.3)):
            assert abs(correlation(dropped, other)) < LARGEST_DEVIATION
            for distance in (1, 2, 64):
                assert abs(correlation(dropped[distance:], other[:-distance])) < LARGEST_DEVIATION
                assert abs(correlation(dropped[:, distance:], other[:, :-distance])) < LARGEST_DEVIATION

    def test_of_a_value_does_not_depend_on_the_size_of_its_matrix(self) -> None:
        assert torch.equal(dropped_values(5, 0.3, 70, 300)[:9, :130], dropped_values(5, 0.3, 9, 130))

    @pytest.mark.parametrize("rate", [1e-7, 0.05, 0.3, 0.999])
    def test_keeps_the_expected_sum(self, rate: float) -> None:
        ones, down = torch.ones(SIZE, SIZE), torch.ones(1, SIZE)
        sums = TorchProducts().project(ones, down, torch.tensor([3]), rate)
        deviation = (rate / (1 - rate)) ** 0.5 / SIZE
        assert float(sums.mean()) / SIZE == pytest.approx(1, abs=LARGEST_DEVIATION * deviation + 1e-4)

    def test_seeds_follow_the_generator(self) -> None:
        state = torch.get_rng_state()
        seeds = [int(draw_seed(CPU)) for _ in range(3)]
        assert len(set(seeds)) == 3
        torch.set_rng_state(state)
        assert [int(draw_seed(CPU)) for _ in range(3)] == seeds
