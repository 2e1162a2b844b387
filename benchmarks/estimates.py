"""`make estimates`: table of activation bytes, estimated against kept by torch, over a grid."""

import json
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import transformers
from peft import get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig
from trl.trainer.utils import add_fused_lm_head

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator import architecture
from app.estimator.activations import Activations, Checkpointing, Precision, compute_activations, recomputed_layers
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Attention, Batch
from app.estimator.memory_planner import CHOICES
from worker.training.data.sequence_share import WHOLE, SequenceShareCollator
from worker.training.model import kernels
from worker.training.model.loader import lora_config
from worker.training.model.parallel.sequence_parallel import SequenceParallel
from worker.training.planning.recomputation import Recomputation

SIZES: dict[str, Any] = {
    "vocab_size": 517, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": 517, "n_embd": 64, "n_layer": 4, "n_head": 4}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "lora_r": None, "load_in_4bit": False},
    "lora": {"method": "lora", "load_in_4bit": False},
    "lora, no dropout": {"method": "lora", "load_in_4bit": False, "lora_dropout": 0.0},
    "dora": {"method": "lora", "load_in_4bit": False, "use_dora": True},
    "qlora": {"method": "qlora", "bnb_4bit_compute_dtype": "float32"},
    "dpo": {"method": "dpo", "load_in_4bit": False, "lora_dropout": 0.0},
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2")
BATCHES = (
    Batch(1, 48), Batch(3, 40), Batch(2, 96), Batch(2, 64, masked=True),
    Batch(1, 96, masked=True, positions_each=True),
)  # fmt: skip
WITHIN = 0.1


@dataclass(frozen=True)
class Cell:
    """Model, method and micro-batch; `mixed` uses 16-bit matrix products, as on a GPU."""

    family: str
    method: str
    attention: Attention
    batch: Batch
    checkpointing: Checkpointing
    mixed: bool = False

    @property
    def config(self) -> TrainingConfig:
        """Training configuration of the cell."""
        return TrainingConfig(base_model="any", **METHODS[self.method])

    @property
    def precision(self) -> Precision:
        """Data types of the weights, as loaded on a CPU or on a GPU."""
        config = self.config
        if not self.mixed:
            return Precision.for_device(config, "cpu")
        return Precision("cpu", autocast=True, base=4 if config.lora_r is None else 2)


def grid() -> Iterator[Cell]:
    """Return all cells of the table."""
    for family, method, attention in product(FAMILIES, METHODS, ("sdpa", "eager")):
        if (family == "gemma2" and attention == "sdpa") or (method == "dora" and family not in ("llama", "qwen3")):
            continue  # the family does not support sdpa, or the cell would be a duplicate
        for batch, checkpointing in product(BATCHES, CHOICES):
            shape = Batch(batch.sequences * 2, batch.length, masked=True) if method == "dpo" else batch
            yield Cell(family, method, attention, shape, checkpointing)  # type: ignore[arg-type]
    for family, method, batch in product(("llama", "gemma3_text"), ("full", "lora"), BATCHES):
        yield Cell(family, method, "sdpa", batch, "off", mixed=True)


def built(cell: Cell) -> tuple[Any, Architecture]:
    """Build the model of a cell as a worker does, and the architecture from its config.json."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    config = cell.config
    described = CONFIG_MAPPING[cell.family](**(_GPT2 if cell.family == "gpt2" else SIZES))
    model = AutoModelForCausalLM.from_config(described, attn_implementation=cell.attention)
    if config.load_in_4bit:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, device_map={"": "cpu"}, attn_implementation=cell.attention,
                quantization_config=BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
                    bnb_4bit_use_double_quant=True,
                ),
            )  # fmt: skip
    network = model
    adapter = lora_config(config)
    if adapter is not None:
        model = get_peft_model(model, adapter)
    for parameter in model.parameters():
        if cell.mixed and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    add_fused_lm_head(network, outputs=("log_probs", "entropy", "is_top1"))
    kernels.use_kernels(model)
    recomputation = Recomputation(model)
    recomputation.recompute_first(recomputed_layers(cell.checkpointing, recomputation.layers))
    model.train()
    return model, architecture.read_architecture(json.loads(described.to_json_string(use_diff=True)))


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def measured(model: Any, cell: Cell, divided: SequenceParallel | None = None) -> int:
    """Return the bytes that torch keeps for the backward pass after the forward pass; counts each storage once.

    With `divided`, they are those of the first of the devices that share each sequence.
    """
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept_tensors: list[weakref.ref[_Kept]] = []

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor
        packed = _Kept(tensor)
        kept_tensors.append(weakref.ref(packed))
        return packed

    ids = torch.randint(1, 500, (cell.batch.sequences, cell.batch.length))
    more: dict[str, Any] = {}
    if cell.batch.positions_each:  # two texts per sequence, separated only by their position ids
        half = torch.arange(cell.batch.length // 2)
        more["position_ids"] = torch.cat([half, half]).expand_as(ids).contiguous()
    elif cell.batch.masked:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        more["attention_mask"] = mask
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, **more}
    over: AbstractContextManager[None] = nullcontext()
    if divided is not None:
        whole = inputs | {"rows": []}
        inputs = SequenceShareCollator(lambda _: whole, 0, cell.batch.sequence_parallel, 0)([])
        over = divided.divide_during(inputs.pop(WHOLE))
        del inputs["labels"], inputs["rows"]
    with (
        over,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda value: getattr(value, "tensor", value)),
        torch.autocast("cpu", torch.bfloat16, enabled=cell.mixed),
    ):
        output = model(**inputs, fused_lm_head=True)
    there = [kept.tensor.untyped_storage() for kept in (reference() for reference in kept_tensors) if kept is not None]
    assert output.loss.requires_grad
    return sum({one.data_ptr(): one.nbytes() for one in there}.values())


def estimated(described: Architecture, cell: Cell) -> tuple[int, Activations]:
    """Return the estimated bytes kept for the backward pass, and the whole estimate."""
    computed = compute_activations(
        described, cell.config, cell.precision, cell.batch, cell.checkpointing, cell.attention
    )  # fmt: skip
    # GPT-2 passes its mask as an argument to the recomputed function, where it is counted.
    seen = computed.mask if cell.family == "gpt2" and cell.checkpointing != "off" else 0
    return computed.kept_bytes + computed.head + seen, computed


def main() -> int:
    """Print the worst cell of each line; return exit code 1 if an error exceeds 10 %."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    cells = 0
    for cell in grid():
        model, described = built(cell)
        real, (formula, _) = measured(model, cell), estimated(described, cell)
        off, cells = formula / real - 1, cells + 1
        kind = " packed" if cell.batch.positions_each else " padded" if cell.batch.masked else ""
        shape = f"{cell.batch.sequences} x {cell.batch.length}{kind}"
        line = (cell.family, cell.method + (", 16-bit products" if cell.mixed else ""))
        cell_text = f"{cell.attention}, {shape}, checkpointing {cell.checkpointing}: {formula:,} for {real:,} bytes"
        if line not in worst or abs(off) > abs(worst[line][0]):
            worst[line] = (off, cell_text)
    print(f"{'family':14s}{'method':28s}{'worst':>8s}  where")
    for (family, method), (off, cell_text) in worst.items():
        print(f"{family:14s}{method:28s}{off:+8.1%}  {cell_text}")
    most = max(abs(off) for off, _ in worst.values())
    print(f"\n{cells} cells; largest error {most:.1%}")
    return 0 if most <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
