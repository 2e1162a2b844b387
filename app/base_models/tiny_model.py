"""A small Llama, made on this machine: a newly trained tokenizer, a configuration, and random weights.

It needs no download, and trains without a GPU.
"""

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.infra.files.tree import remove_tree
from app.infra.ids import new_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 4096
MAX_TOKENS = 1024
END, PAD = "<|end|>", "<|pad|>"
_SPECIAL_TOKENS = [END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The `generation` block marks the tokens of the assistant, so that only those contribute to the loss."""
_MOST_CHARACTERS = 2_000_000
"""Of the Python library, from which the tokenizer learns; more takes longer and changes little."""
_STANDARD_DEVIATION = 0.02
_SEED = 0


def create_tiny_model(models_folder: Path, name: str) -> Path:
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
        write_model(unfinished, train_tokenizer(_library_texts()))
        _write_weights(unfinished)
        unfinished.rename(target)
    finally:
        remove_tree(unfinished, ignore_errors=True)
    return target


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> "Tokenizer":
    """Train a byte-level BPE tokenizer, which encodes and decodes any text without loss."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[AddedToken(token, special=True) for token in _SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    return bpe


def write_model(folder: Path, tokenizer: "Tokenizer", max_tokens: int = MAX_TOKENS) -> None:
    """Write tokenizer and configuration into `folder` in Hugging Face format; method `full` initializes weights."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD,
            "model_max_length": max_tokens, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
        },
        "config.json": {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": max_tokens, "tie_word_embeddings": False,
            "initializer_range": _STANDARD_DEVIATION, "rms_norm_eps": 1e-5,
            "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad,
        },
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad},
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def _library_texts() -> Iterator[str]:
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
    tensors = {
        name: numpy.ones(shape, numpy.float32)
        if len(shape) == 1
        else random.standard_normal(shape, numpy.float32) * numpy.float32(_STANDARD_DEVIATION)
        for name, shape in _tensor_shapes(json.loads((folder / "config.json").read_text()))
    }
    # Not by `save_file`, whose file only its owner may read: the trainer may have a user of its own.
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def _tensor_shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a Llama without tied embeddings and biases."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{projection}.weight", (hidden, hidden)
        yield f"model.layers.{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"model.layers.{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
