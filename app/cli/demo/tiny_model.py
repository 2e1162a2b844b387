"""A small model with random weights, made on this machine: trains without a GPU and without the hub."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from app.cli.demo.base_model import train_tokenizer, write_model
from app.infra.files.tree import remove_tree
from app.infra.ids import new_id

MAX_TOKENS = 1024
_MOST_CHARACTERS = 2_000_000
"""Of the Python library, from which the tokenizer learns; more takes longer and changes little."""
_DEVIATION = 0.02
_SEED = 0


def create(models_folder: Path, name: str) -> Path:
    """Write the model below `models_folder` and return its folder, which appears when it is complete.

    Raises:
        FileExistsError: There is such a folder.
        OSError: It cannot be written.
    """
    target = models_folder / name
    if target.exists():
        raise FileExistsError(17, "File exists", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".{new_id('new')}"
    try:
        write_model(unfinished, train_tokenizer(_texts()), MAX_TOKENS)
        _write_weights(unfinished)
        unfinished.rename(target)
    finally:
        remove_tree(unfinished, ignore_errors=True)
    return target


def _texts() -> Iterator[str]:
    """Yield modules of this Python's library."""
    characters = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        characters += len(text)
        if characters > _MOST_CHARACTERS:
            return


def _write_weights(folder: Path) -> None:
    """Write weights as transformers initializes them: normally distributed, norms of one."""
    import numpy
    from safetensors.numpy import save

    random = numpy.random.default_rng(_SEED)
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: numpy.ones(shape, numpy.float32)
        if len(shape) == 1
        else (random.standard_normal(shape, numpy.float32) * numpy.float32(_DEVIATION))
        for name, shape in _shapes(config)
    }
    # Not by `save_file`, whose file only its owner may read: the trainer may have a user of its own.
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def _shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a Llama without tied embeddings and biases."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{part}.weight", (hidden, hidden)
        yield f"model.layers.{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"model.layers.{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
