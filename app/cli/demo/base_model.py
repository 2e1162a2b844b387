"""Small base model of the demo: a newly trained tokenizer and a Llama configuration without weights.

Method `full` on such a folder trains from scratch, so no download is needed.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 4096
MAX_TOKENS = 256
END, PAD = "<|end|>", "<|pad|>"
_SPECIAL = [END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
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


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> "Tokenizer":
    """Train a byte-level BPE tokenizer, which encodes and decodes any text without loss."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def write_model(folder: Path, tokenizer: "Tokenizer", max_tokens: int = MAX_TOKENS) -> None:
    """Write tokenizer and model configuration into `folder` in Hugging Face format; replaces existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": max_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(
        folder / "config.json",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": max_tokens,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
    )
    _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
