"""A frozen head gives the log-probabilities, metrics and gradients of TRL's with two products instead of three."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
from trl.trainer import utils as trl_utils

from worker.training.model import frozen_head
from worker.training.model.frozen_head import LogProbabilities, use_two_products

ROWS, WIDTH, VOCABULARY = 50, 32, 300
CHUNK = 64


def count_products() -> FlopCounterMode:
    """Count operations, also those of products that add to a tensor in place."""

    def flops(_: Any, rows: Any, columns: Any, **__: Any) -> int:
        return 2 * rows[0] * rows[1] * columns[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flops})


def outputs(function: Any, trains_head: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Per-token results of a head, its loss of weighted tokens, the gradient of the hidden states, and operations."""
    torch.manual_seed(2)
    hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, dtype=dtype) * 0.3).requires_grad_(trains_head)
    bias = torch.randn(VOCABULARY, dtype=dtype) if options.pop("bias", False) else None
    targets, weights = torch.randint(0, VOCABULARY, (ROWS,)), torch.rand(ROWS)
    more = {
        "temperature": 1.0,
        "chunk_size": CHUNK,
        "softcap": None,
        "scale": 1.0,
        "outputs": OPTIONAL_OUTPUTS,
    } | options
    with count_products() as counter:
        results = function.apply(hidden, weight, bias, targets, *more.values())
        # As in preference optimization: the gradient of a token is known only when the loss is computed.
        loss = torch.nn.functional.softplus(-(results[0] * weights).sum() / ROWS)
        loss.backward()
    gradients = (hidden.grad, weight.grad) if trains_head else (hidden.grad,)
    return results, (loss, *gradients), counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"temperature": 0.7}, {"softcap": 5.0, "scale": 0.5}, {"outputs": ("log_probs",)}],
    ids=str,
)
@pytest.mark.parametrize("tile_rows", [1, 16, 1000])
def test_results_and_gradients_equal_those_of_trl(
    options: dict[str, Any], tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, gradients, _ = outputs(ChunkedLogProbFunction, **options)
    monkeypatch.setattr(frozen_head.kernels, "TOKEN_CHUNK_SIZE", tile_rows * VOCABULARY // CHUNK + 1)
    results, own, _ = outputs(LogProbabilities, **options)
    for ours, theirs in zip((*results, *own), (*expected, *gradients), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_results_in_16_bits_are_as_close_to_32_bits_as_those_of_trl() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, gradients, _ = outputs(ChunkedLogProbFunction)
        results, own, _ = outputs(LogProbabilities)
    exact, exact_gradients, _ = outputs(ChunkedLogProbFunction)
    for ours, theirs, truth in zip(
        (results[0], *own), (expected[0], *gradients), (exact[0], *exact_gradients), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert (ours - truth).norm() <= 1.1 * (theirs - truth).norm() + 1e-6


def test_a_step_takes_two_products_with_the_weights_instead_of_three() -> None:
    product = 2 * ROWS * WIDTH * VOCABULARY
    assert outputs(ChunkedLogProbFunction)[2] == 3 * product
    assert outputs(LogProbabilities)[2] == 2 * product


def test_a_trained_head_and_passes_without_gradients_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, own = (outputs(function, trains_head=True) for function in (ChunkedLogProbFunction, LogProbabilities))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(own[1], expected[1], strict=True))
    assert own[2] == expected[2]
    hidden, weight, targets = torch.randn(4, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.arange(4)
    with count_products() as counter:
        LogProbabilities.apply(hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, OPTIONAL_OUTPUTS)
    assert counter.get_total_flops() == 2 * 4 * WIDTH * VOCABULARY


def test_a_loss_with_the_entropy_fails_with_a_reason() -> None:
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    results = LogProbabilities.apply(
        hidden, torch.randn(VOCABULARY, WIDTH), None, torch.arange(4), 1.0, CHUNK, None, 1.0, OPTIONAL_OUTPUTS
    )
    with pytest.raises(RuntimeError, match="without an entropy term"):
        results[1].sum().backward()


def test_a_model_with_the_head_of_trl_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    ids = torch.arange(40).reshape(2, 20)

    def loss_and_flops() -> tuple[float, int]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.lm_head.requires_grad_(False)
        trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        with count_products() as counter:
            loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
            loss.backward()
        return loss.item(), counter.get_total_flops()

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)
    loss, flops = loss_and_flops()
    use_two_products()
    assert loss_and_flops() == (pytest.approx(loss, rel=1e-6), flops - 2 * 2 * 19 * WIDTH * VOCABULARY)
