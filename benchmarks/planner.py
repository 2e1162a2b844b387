"""The measured step plan beside that of the estimate, for QLoRA of models of full size on GPUs of three sizes.

Nothing is computed: tensors are those of `FakeTensorMode`, of which the bytes that live and the operations of products
are counted. The estimate plans the configured micro-batch by formula, with no, half or all layers recomputed; the
planner measures passes, as a training process does on a GPU, and may change the micro-batch too. `make planner`;
ARGS='--layers 4' for a trial in small.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator import architecture, memory_planner
from app.estimator.activations import HEAD_TOKENS, HEAD_WORDS, Checkpointing, Precision
from app.estimator.memory import CONTEXT, optimizer_state
from app.estimator.memory_planner import USABLE_FRACTION
from app.estimator.steps import micro_batch
from benchmarks.counting_meter import OPERATIONS_PER_SECOND, CountingMeter
from worker.training.planning.pass_meter import Reading, measure_pass
from worker.training.planning.recomputation import Recomputation
from worker.training.planning.step_planner import MeasuredPass, StepChoices, StepPlan, StepPlanner, Trial, micro_batches
from worker.training.planning.step_planning import trained_tensors

MODELS: dict[str, Callable[..., PretrainedConfig]] = {
    "Qwen3-4B": partial(
        Qwen3Config, vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Llama-3-8B": partial(
        LlamaConfig, vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
LAYERS = {"Qwen3-4B": 36, "Llama-3-8B": 32}
GIGABYTES = (24, 48, 80)
LENGTHS = (1024, 4096)
_ENOUGH = 2**50


class Linear4bit(nn.Linear):
    """A frozen 4-bit layer, with the bytes and products of that of bitsandbytes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        count = layer.in_features * layer.out_features
        self.weight = nn.Parameter(torch.empty(count // 2, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        # A constant of 8 bits for each 64 weights, and one of 32 bits for each 256 of these.
        self.constants = nn.Parameter(
            torch.empty(count // 64 + 4 * (count // 16_384), dtype=torch.uint8, device="meta"), requires_grad=False
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Product4bit.apply(hidden.to(torch.bfloat16), self.out_features)


class _Product4bit(torch.autograd.Function):
    """A product with a weight that is dequantized for it, forward and backward, and never kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, columns: int) -> torch.Tensor:
        ctx.shape = (columns, hidden.shape[-1])
        return nn.functional.linear(hidden, hidden.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None


class _TiledHead(torch.autograd.Function):
    """Loss of a frozen head in tiles of tokens and words, as TRL computes it: the backward pass projects again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        for tokens, words in _tiles(hidden, weight):
            tokens @ words.t()
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for tokens, words in _tiles(hidden, weight):
            probabilities = tokens @ words.t()
            probabilities @ words
        return total.to(hidden.dtype), None


def _tiles(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tokens in hidden.split(HEAD_TOKENS):
        for words in weight.split(HEAD_WORDS):
            yield tokens, words


@dataclass(frozen=True)
class Cell:
    """A model, its text length and a device."""

    model: str
    length: int
    gigabytes: int

    @property
    def usable(self) -> int:
        return round((self.gigabytes * 2**30 - CONTEXT["cuda"]) * USABLE_FRACTION)


class SimulatedModel:
    """A model of full size with an adapter, as `qlora` loads it on a GPU, without any data."""

    def __init__(self, described: PretrainedConfig) -> None:
        described._attn_implementation = "sdpa"
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
        model.requires_grad_(False)
        for parent in list(model.model.layers.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Linear4bit(child))
        adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_dropout=0.05, target_modules="all-linear")
        self.model: Any = get_peft_model(model, adapter)
        self.model.train()
        copies: dict[int, nn.Parameter] = {}
        with self.mode:
            for module in self.model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                        module._parameters[name] = copies.setdefault(
                            id(parameter),
                            nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad),
                        )
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        self.allocated = sum(copy.numel() * copy.element_size() for copy in copies.values())
        self.trained = [copy for copy in copies.values() if copy.requires_grad]
        self.recomputation = Recomputation(self.model)
        self._readings: dict[tuple[Trial, int], Reading] = {}

    def measure(self, trial: Trial, length: int) -> Reading:
        """Count the bytes and operations of a pass that accumulates gradients, on a device of any size."""
        if (trial, length) not in self._readings:
            self._readings[trial, length] = self._count(trial, length)
        return self._readings[trial, length]

    def _count(self, trial: Trial, length: int) -> Reading:
        self.recomputation.recompute_first(trial.recomputed)
        with self.mode:
            reading = measure_pass(CountingMeter(_ENOUGH, self.allocated), self._pass(trial.rows, length))
            for parameter in self.trained:
                parameter.grad = None
        return reading

    def _pass(self, rows: int, length: int) -> Callable[[], None]:
        base = self.model.get_base_model()

        def run_pass() -> None:
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)
            ids = torch.ones(rows, length, dtype=torch.long)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state
                loss = _TiledHead.apply(hidden[:, :-1].reshape(-1, hidden.shape[-1]), base.lm_head.weight)
            loss.backward()

        return run_pass


@dataclass(frozen=True)
class Comparison:
    """Plans of a cell, and the operations of a step with each."""

    cell: Cell
    estimated: Trial
    estimated_fits: bool
    """True if the simulated peak of the estimate's plan fits."""
    estimated_operations: float
    planned: StepPlan
    planned_operations: float


def compare(cell: Cell, simulated: SimulatedModel, described: PretrainedConfig) -> Comparison:
    """Plan a cell by the estimate and by counted passes, with the default configuration of `qlora`."""
    base_config = TrainingConfig(base_model="any", max_seq_length=cell.length)
    machine = DeviceCapabilities(kind="cuda", bf16=True)
    config = resolve_config(base_config, set(), machine).config
    layers = simulated.recomputation.layers
    model = architecture.read_architecture(described.to_dict())
    choice = memory_planner.choose_checkpointing(
        model, config, Precision.for_device(config, "cuda"), micro_batch(model, config, cell.length, None),
        cell.gigabytes * 2**30,
    )  # fmt: skip
    recomputed: dict[Checkpointing, int] = {"off": 0, "selective": -(-layers // 2), "full": layers}
    estimated = Trial(config.batch_size, recomputed[choice.checkpointing])
    later = optimizer_state(trained_tensors(simulated.model), config)
    planned = _plan(cell, simulated, config, later)

    def operations(trial: Trial) -> float:
        steps = config.batch_size * config.gradient_accumulation_steps // trial.rows
        return simulated.measure(trial, cell.length).seconds * OPERATIONS_PER_SECOND * steps

    return Comparison(
        cell, estimated, (simulated.measure(estimated, cell.length).peak_bytes or 0) + later <= cell.usable,
        operations(estimated), planned, operations(Trial(planned.rows, planned.recomputed)),
    )  # fmt: skip


def _plan(cell: Cell, simulated: SimulatedModel, config: TrainingConfig, later: int) -> StepPlan:
    rows_per_step = config.batch_size * config.gradient_accumulation_steps
    sizes = micro_batches(rows_per_step, rows_per_step)
    positions = {rows: rows * cell.length for rows in sizes}
    layers = simulated.recomputation.layers
    planner = StepPlanner(
        StepChoices(
            rows_per_step, sizes, config.batch_size, layers, 0, layers, positions, positions, cell.usable,
            simulated.allocated, later,
        )
    )  # fmt: skip
    while (trial := planner.next_trial()) is not None:
        peak, seconds = simulated.measure(trial, cell.length)
        fits_device = peak is not None and peak <= cell.gigabytes * 2**30 - CONTEXT["cuda"]
        planner.add_measurement(MeasuredPass(trial, positions[trial.rows], peak if fits_device else None, seconds))
    return planner.best_plan()


def comparisons(layers: int | None = None) -> Iterator[Comparison]:
    """Yield each cell of the grid; with `layers`, of models that have only so many."""
    for name, describe in MODELS.items():
        described = describe(num_hidden_layers=layers or LAYERS[name])
        simulated = SimulatedModel(described)
        for length in LENGTHS:
            for gigabytes in GIGABYTES:
                yield compare(Cell(name, length, gigabytes), simulated, described)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each cell; return 1 if a plan does not fit, or has more operations than a plan that fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, help="layers of each model, for a trial in small")
    layers = parser.parse_args(arguments).layers
    print(f"{'model':12s}{'length':>7s}{'GPU':>7s}   {'by estimate':24s}{'measured':34s}{'operations':>10s}")
    wrong = 0
    for comparison in comparisons(layers):
        cell, planned = comparison.cell, comparison.planned
        ratio = comparison.planned_operations / comparison.estimated_operations
        wrong += not planned.fits or (comparison.estimated_fits and ratio > 1)
        by_estimate = f"{comparison.estimated.rows} rows, {comparison.estimated.recomputed} layers"
        by_estimate += "" if comparison.estimated_fits else " (!)"
        needed = (planned.needed_bytes or 0) / 2**30
        measured = f"{planned.rows} rows, {planned.recomputed} layers, {needed:.1f} GiB"
        print(
            f"{cell.model:12s}{cell.length:7,d}{cell.gigabytes:4d} GB   {by_estimate:24s}{measured:34s}{ratio:10.3f}",
            flush=True,
        )
    print("\n(!) needs more than can be used, as simulated")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
