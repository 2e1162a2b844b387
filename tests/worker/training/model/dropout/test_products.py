"""Kernels of dropout divide their work among programs, and are used only where they compute what torch does."""

from typing import Any

import pytest
import torch

from worker.training.model.dropout.mask import kept_values
from worker.training.model.dropout.products import (
    TorchProducts,
    TritonProducts,
    _padded_rank,
    kernel_failure,
    triton_products,
)

CPU = torch.device("cpu")


class _Programs:
    """Kernels as their docstrings state them, one program after another: what each sums up, and where it writes."""

    def __getattr__(self, name: str) -> Any:
        return _Launch(getattr(self, f"_{name}"))

    @staticmethod
    def _project(
        place: tuple[int, ...], x: torch.Tensor, down: torch.Tensor, result: torch.Tensor, seed: torch.Tensor,
        rows: int, columns: int, rank: int, stride: int, tiles_each: int, threshold: int, scale: float, **options: int,
    ) -> None:  # fmt: skip
        block, share = place
        assert (x.stride(0), tuple(down.shape)) == (stride, (rank, columns)) and options["RANK"] >= rank
        own = slice(block * options["ROWS"], (block + 1) * options["ROWS"])
        summed = slice(share * tiles_each * 128, (share + 1) * tiles_each * 128)
        mask = kept_values(seed, rows, columns, threshold / 65536)
        result[share, own] = (torch.where(mask, x, 0).float()[own, summed] @ down.float()[:, summed].t() * scale).to(
            result.dtype
        )

    @staticmethod
    def _project_gradient(
        place: tuple[int, ...], x: torch.Tensor, hidden_grad: torch.Tensor, result: torch.Tensor, seed: torch.Tensor,
        rows: int, columns: int, rank: int, stride: int, blocks_each: int, threshold: int, scale: float, **options: int,
    ) -> None:  # fmt: skip
        share, tile = divmod(place[0], -(-columns // 128))
        summed = slice(share * blocks_each * options["ROWS"], (share + 1) * blocks_each * options["ROWS"])
        own = slice(tile * 128, (tile + 1) * 128)
        mask = kept_values(seed, rows, columns, threshold / 65536)
        result[share, :, own] = hidden_grad.float()[summed].t() @ torch.where(mask, x, 0).float()[summed, own] * scale

    @staticmethod
    def _add_input_gradient(
        place: tuple[int, ...], x_grad: torch.Tensor, hidden_grad: torch.Tensor, down: torch.Tensor, seed: torch.Tensor,
        rows: int, columns: int, rank: int, threshold: int, scale: float, **options: int,
    ) -> None:  # fmt: skip
        block, tile = divmod(place[0], -(-columns // 128))
        own = slice(block * options["ROWS"], (block + 1) * options["ROWS"]), slice(tile * 128, (tile + 1) * 128)
        mask = kept_values(seed, rows, columns, threshold / 65536)
        x_grad = x_grad.view(rows, columns)
        change = torch.where(mask, hidden_grad.float() @ down.float(), 0)[own] * scale
        x_grad[own] = (x_grad[own].float() + change).to(x_grad.dtype)


class _Launch:
    def __init__(self, program: Any) -> None:
        self.program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: int) -> None:
            for place in torch.cartesian_prod(*(torch.arange(size) for size in grid)).reshape(-1, len(grid)).tolist():
                self.program(tuple(place), *arguments, **options)

        return launch


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (3, 64, 4), (600, 130, 8), (70, 1600, 5)])
def test_programs_of_kernels_sum_up_everything_once(rows: int, columns: int, rank: int) -> None:
    kernels, reference = TritonProducts(_Programs()), TorchProducts()
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(columns, rows, generator=generator).t().bfloat16()
    down, hidden_grad = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((rank, columns), (rows, rank))
    )
    draw = torch.tensor([9]), 0.25
    for results in (
        [products.project(x, down, *draw) for products in (kernels, reference)],
        [products.project_gradient(x, hidden_grad, *draw) for products in (kernels, reference)],
    ):
        assert results[0].dtype == results[1].dtype
        torch.testing.assert_close(*results)
    sums = torch.ones(rows, columns), torch.ones(rows, columns)
    for products, x_grad in zip((kernels, reference), sums, strict=True):
        products.add_input_gradient(x_grad, hidden_grad, down, *draw)
    torch.testing.assert_close(*sums)


class _Wrong(TorchProducts):
    def __init__(self, product: str) -> None:
        self.product = product

    def project(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        is_wrong = self.product == "project" or (self.product == "narrow" and x.shape[1] <= 4 * 128)
        return super().project(x, *arguments) * (1.1 if is_wrong else 1)

    def project_gradient(self, *arguments: Any) -> torch.Tensor:
        return super().project_gradient(*arguments) * (1.1 if self.product == "project_gradient" else 1)

    def add_input_gradient(self, x_grad: torch.Tensor, hidden_grad: torch.Tensor, *arguments: Any) -> None:
        super().add_input_gradient(x_grad, hidden_grad, *arguments)
        if self.product == "one value" and bool((hidden_grad == 1).all()):
            x_grad[300, 700] = 1 - (x_grad[300, 700] != 0).float()


class TestKernels:
    @pytest.mark.parametrize(
        ("products", "failure"),
        [
            (TorchProducts(), None),
            (_Wrong("project"), "their results differ by 0.1 from those of torch"),
            (_Wrong("narrow"), "their results differ by 0.1 from those of torch"),
            (_Wrong("project_gradient"), "their results differ by 0.1 from those of torch"),
            (_Wrong("one value"), "their results differ by 1 from those of torch"),
            (None, "they fail: "),  # without a GPU, and maybe without triton
        ],
        ids=["right", "wrong", "wrong for one program", "wrong gradient", "wrong mask", "failing"],
    )
    def test_are_used_only_where_they_compute_what_torch_does(self, products: Any, failure: str | None) -> None:
        state = torch.get_rng_state()
        reason = kernel_failure(CPU, 4, torch.bfloat16, torch.float32, products)
        assert torch.equal(torch.get_rng_state(), state)
        assert (reason is None) == (failure is None) and (reason or "").startswith(failure or "")

    @pytest.mark.parametrize(
        ("rank", "dtype", "reason"),
        [
            (129, torch.bfloat16, "ranks above 128 are not supported"),
            (8, torch.float32, "float32 is not supported"),
        ],
    )
    def test_do_not_have_every_rank_and_type(self, rank: int, dtype: torch.dtype, reason: str) -> None:
        assert kernel_failure(CPU, rank, dtype, dtype, TorchProducts()) == reason

    def test_are_not_used_on_a_cpu(self) -> None:
        assert triton_products(torch.ones(2, 2, dtype=torch.bfloat16), torch.bfloat16, 8) is None

    def test_lack_of_memory_is_not_taken_for_their_failure(self) -> None:
        class Greedy(TorchProducts):
            def project(self, *_: Any) -> torch.Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(torch.OutOfMemoryError):
            kernel_failure(CPU, 4, torch.bfloat16, torch.bfloat16, Greedy())

    @pytest.mark.parametrize(("rank", "padded"), [(1, 16), (16, 16), (17, 32), (64, 64), (100, 128)])
    def test_pad_ranks_to_powers_of_two(self, rank: int, padded: int) -> None:
        assert _padded_rank(rank) == padded
