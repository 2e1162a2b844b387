"""`make estimates SIZE=full`: table of the peak memory of full-size models, estimated against a simulated step."""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from app.estimator import architecture
from app.estimator.activations import Checkpointing, Precision
from app.estimator.forward_pass import Attention, Batch
from app.estimator.memory import Memory, estimate_memory
from app.estimator.memory_planner import CHOICES
from benchmarks import step_simulation
from benchmarks.liger_functions import liger_functions
from benchmarks.step_simulation import Step

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16},
    "Qwen3-1.7B": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16},
    "Qwen3-4B": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32},
    "Qwen3-8B": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "Llama-3.2-1B": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "head_dim": 64, "tie_word_embeddings": True},
    "Llama-3.1-8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    "Mistral-7B-v0.1": {"model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096,
                        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
                        "num_key_value_heads": 8, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "Gemma-2-2B": {"model_type": "gemma2"},
    "Gemma-3-4B": {"model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560,
                   "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024},
    "Phi-3-mini": {"model_type": "phi3"},
}  # fmt: skip
"""Sizes of published models, as in their `config.json`."""
METHODS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora"},
    "qlora, no dropout": {"method": "qlora", "lora_dropout": 0.0},
    "lora": {"method": "lora"},
    "lora, no dropout": {"method": "lora", "lora_dropout": 0.0},
    "full": {"method": "full", "optim": "adamw_torch_fused"},
}
BATCHES = (
    Batch(4, 2048), Batch(1, 8192), Batch(8, 1024, masked=True), Batch(1, 8192, texts=4, positions_each=True),
    Batch(2, 4096), Batch(4, 1536, masked=True),
)  # fmt: skip
MEDIAN, WORST = 0.02, 0.05
"""Goals for the relative error of the peak."""


@dataclass(frozen=True)
class Cell:
    """Model, method, micro-batch and checkpointing."""

    model: str
    method: str
    batch: Batch
    checkpointing: Checkpointing | int
    accumulates: bool = False
    """True if gradients of earlier micro-batches of the step exist."""
    liger: bool = False
    """True if liger-kernel computes norms, rotary embeddings and gated layers."""

    @property
    def config(self) -> TrainingConfig:
        """Effective configuration on a GPU."""
        steps = 2 if self.accumulates else 1
        fields = {"gradient_accumulation_steps": steps, **METHODS[self.method]}
        config = TrainingConfig.model_validate({"base_model": self.model, **fields})
        return resolve_config(config, sorted(fields), step_simulation.GPU).config

    @property
    def attention(self) -> Attention:
        """Attention of torch, whose kernels for a GPU have fake counterparts."""
        if MODELS[self.model]["model_type"] == "gemma2":
            return "eager"
        return "varlen" if self.batch.texts > 1 else "sdpa"


def grid() -> Iterator[Cell]:
    """Return all cells of the table: every model with every method and both kernels; the rest in turn."""
    for liger, (row, model), (column, method) in product((False, True), enumerate(MODELS), enumerate(METHODS)):
        number = row + column + liger
        batch, checkpointing = BATCHES[(row + number) % len(BATCHES)], CHOICES[number % len(CHOICES)]
        if MODELS[model]["model_type"] == "gemma2" and batch.texts > 1:
            batch = BATCHES[0]  # only `varlen` separates texts without a mask
        yield Cell(model, method, batch, checkpointing, accumulates=number % 2 == 1, liger=liger)


def simulated(cell: Cell) -> Step:
    """Run the cell's step on fake tensors."""
    with step_simulation.fake_gpu():
        model = step_simulation.build(MODELS[cell.model], cell.config, cell.attention)
        network = model if cell.config.lora_r is None else model.get_base_model()
        with liger_functions(network) if cell.liger else nullcontext():
            return step_simulation.run_step(model, cell.config, cell.batch, cell.checkpointing)


def estimated(cell: Cell) -> Memory:
    """Return the estimate of the cell's step."""
    described, config = architecture.read_architecture(MODELS[cell.model]), cell.config
    precision = Precision.for_device(config, "cuda", has_liger=cell.liger)
    return estimate_memory(described, config, precision, cell.batch, cell.checkpointing, cell.attention)


def main() -> int:
    """Print every cell; return exit code 1 if the errors exceed their goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args().models
    print(f"{'':80s}{'kept, GiB':>20s}{'peak, GiB':>21s}")
    print(
        f"{'model':17s}{'method':19s}{'norms':14s}{'recomputed':12s}{'micro-batch':18s}"
        f"{'simulated':>10s}{'error':>10s}{'simulated':>11s}{'error':>10s}{'s':>6s}"
    )
    kept_errors, errors = [], []
    for cell in (cell for cell in grid() if cell.model in chosen):
        start = time.monotonic()
        step, estimate = simulated(cell), estimated(cell)
        held = estimate.activations
        # A mask outlives the forward pass only as an argument of recomputed layers.
        expected = held.kept_bytes + held.head + (held.mask if cell.checkpointing != "off" else 0)
        kept_errors.append(expected / step.kept_bytes - 1)
        errors.append(estimate.tensors / step.peak - 1)
        shape = cell.batch.texts * cell.batch.sequences, cell.batch.length // cell.batch.texts
        kind = " padded" if cell.batch.masked else " joined" if cell.batch.texts > 1 else ""
        batch, norms = f"{shape[0]} x {shape[1]}{kind}", "liger-kernel" if cell.liger else "transformers"
        print(
            f"{cell.model:17s}{cell.method:19s}{norms:14s}{cell.checkpointing:12s}{batch:18s}"
            f"{step.kept_bytes / 2**30:10.2f}{kept_errors[-1]:+10.1%}{step.peak / 2**30:11.2f}{errors[-1]:+10.1%}"
            f"{time.monotonic() - start:6.1f}",
            flush=True,
        )
    print(f"\n{len(errors)} cells")
    for name, values in (("kept", kept_errors), ("peak", errors)):
        sizes = [abs(value) for value in values]
        print(f"{name}: error {statistics.median(sizes):.1%} in the median, {max(sizes):.1%} at most")
    sizes = [abs(value) for value in errors]
    return 0 if statistics.median(sizes) <= MEDIAN and max(sizes) <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())
