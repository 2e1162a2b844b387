"""Page that says which models fit which GPUs, computed by the estimator."""

import math
from typing import Any

from anneal.contracts.gpus import GPUS, Gpu
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.activations import Precision
from app.estimator.architecture import Architecture, read_architecture
from app.estimator.forward_pass import Batch
from app.estimator.memory_planner import USABLE_FRACTION, memory_of_choices
from docs.generator import markdown

_TOKENS = 2048
_ROWS = (16, 8, 4, 2, 1)
_SIZES = (16, 24, 32, 40, 48, 80, 96, 141, 180)
_QWEN: dict[str, Any] = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
_QWEN3: dict[str, Any] = {**_QWEN, "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip


def _shape(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, **others}


_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _shape(
        896, 4864, 24, 14, **_QWEN, model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True
    ),
    "Llama-3.2-1B": {**_LLAMA, **_shape(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True)},
    "Qwen3-1.7B": {**_QWEN3, **_shape(2048, 6144, 28, 16, tie_word_embeddings=True)},
    "Llama-3.2-3B": {**_LLAMA, **_shape(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True)},
    "Qwen3-4B": {**_QWEN3, **_shape(2560, 9728, 36, 32, tie_word_embeddings=True)},
    "Llama-3.1-8B": {**_LLAMA, **_shape(4096, 14_336, 32, 32, tie_word_embeddings=False)},
    "Qwen3-14B": {**_QWEN3, **_shape(5120, 17_408, 40, 40, tie_word_embeddings=False)},
    "Qwen3-32B": {**_QWEN3, **_shape(5120, 25_600, 64, 64, tie_word_embeddings=False)},
    "Llama-3.3-70B": {**_LLAMA, **_shape(8192, 28_672, 80, 64, tie_word_embeddings=False)},
}
"""Sizes of published models, as in their `config.json`."""
_METHODS = {"qlora": "QLoRA", "lora": "LoRA", "full": "All weights (`full`)"}

_INTRO = f"""\
Each cell is the largest number of rows of {_TOKENS:,} tokens in a micro-batch that fits: 1, 2, 4, 8 or 16. An empty cell means
that the model does not fit with one row. `batch_size` times `gradient_accumulation_steps` is the size of a step, whatever fits at
once. A `*` means that all layers are recomputed (`gradient_checkpointing: "auto"` decides that); then the same run takes about a
third longer.

The numbers are those of `POST /v1/runs/estimate` ([how they are computed](../guides/estimates.md)) with the defaults of the
method, of which {USABLE_FRACTION:.0%} of the GPU's memory may be used, without liger-kernel. Estimate your own model, lengths and
options with `anneal runs estimate -f run.yaml --rows 10k --device H100`. Models that do not fit can be divided among several
GPUs ([several devices](../guides/devices.md)), or train with shorter rows.

"""


def page() -> str:
    """Return the page."""
    text = markdown.header("Which model fits which GPU", "`anneal/contracts/gpus.py` and the estimator") + _INTRO
    classes = _memory_classes()
    for method, title in _METHODS.items():
        rows = [[name, *_cells(read_architecture(shape), method, classes)] for name, shape in _MODELS.items()]
        text += f"## {title}\n\n" + markdown.table(["model", *(f"{size} GB" for size in classes)], rows)
    text += "## GPUs\n\nFrom the data sheets of the manufacturer: operations are dense products of bfloat16 with 32-bit sums.\n\n"
    columns = ["GPU", "memory, MiB", "TFLOP/s", "GB/s", "column"]
    return text + markdown.table(
        columns,
        [[it.name, f"{it.memory_mb:,}", f"{it.tflops:g}", f"{it.bandwidth:,}", f"{_size(it)} GB"] for it in GPUS],
    )


def _size(gpu: Gpu) -> int:
    """Return the memory in GB that is written on the box; error correction takes some of it."""
    return min(size for size in _SIZES if size >= math.ceil(gpu.memory_mb / 1024))


def _memory_classes() -> dict[int, int]:
    """Return the least memory in MiB of the GPUs of each size."""
    sizes: dict[int, int] = {}
    for gpu in GPUS:
        sizes[_size(gpu)] = min(gpu.memory_mb, sizes.get(_size(gpu), gpu.memory_mb))
    return dict(sorted(sizes.items()))


def _cells(model: Architecture, method: str, classes: dict[int, int]) -> list[str]:
    machine = DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
    config = {"base_model": "any", "method": method, "max_seq_length": _TOKENS}
    config = resolve_config(TrainingConfig.model_validate(config), sorted(config), machine).config
    precision = Precision.for_device(config, "cuda")
    needs = {rows: memory_of_choices(model, config, precision, Batch(rows, _TOKENS)) for rows in _ROWS}

    def cell(memory_mb: int) -> str:
        room = memory_mb * 2**20 * USABLE_FRACTION
        for rows, of_choice in needs.items():
            if of_choice("off").peak <= room or of_choice("selective").peak <= room:
                return str(rows)
            if of_choice("full").peak <= room:
                return f"{rows}\\*"
        return ""

    return [cell(memory_mb) for memory_mb in classes.values()]
