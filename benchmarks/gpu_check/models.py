"""Models with random weights, and data for them: a small Llama, and Qwen3-8B's shape."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.processes import Call
from tests.worker.training.tiny import CORPUS, make_tiny_model, write_rows

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
_MIX = (5.6, 1.0)
"""Mean and standard deviation of the logarithm of a text's tokens: a median of 270, as in instruction data."""


@dataclass(frozen=True)
class Shaped:
    """Model in Qwen3-8B's shape or a tiny one, with texts of its tokens."""

    folder: Path
    short: int
    """Tokens of a sequence: 2048, or fewer in tiny."""
    long: int

    def texts(self, name: str) -> Path:
        """Return the file of the texts `short`, `long` or `mix`."""
        return self.folder / f"{name}.jsonl"


def small_model(check: Check, hidden: int = 128, layers: int = 2) -> Path:
    """Return the folder of a small Llama, which is written at the first call."""
    folder = check.work / f"llama-{hidden}-{layers}"
    if not folder.exists():
        call = Call(_write_small, check.folder(folder.name), (str(folder), hidden, layers))
        if processes.run(call).code != 0:
            raise RuntimeError(f"the small model could not be written: {(call.folder / 'stderr').read_text()[-300:]}")
    return folder


def _write_small(folder: str, hidden: int, layers: int) -> None:
    make_tiny_model(folder, hidden=hidden, layers=layers, chat_template=CHAT_TEMPLATE)


def long_texts(check: Check) -> Path:
    """Return the file of texts that fill the longest sequence of the small Llama, 256 tokens."""
    return write_rows(check.work / "texts.jsonl", ({"text": f"{row} {' '.join(CORPUS[:20])}"} for row in range(256)))


def shaped_model(check: Check) -> Shaped:
    """Return a model in Qwen3-8B's shape, or the tiny one; it is written at the first call."""
    short = 64 if check.tiny else 2048
    shaped = Shaped(check.weights / "qwen3", short, 2 * short)
    if not (shaped.folder / "mix.jsonl").exists():
        shape = TINY if check.tiny else QWEN3_8B
        call = Call(_write_shaped, check.folder("weights"), (shaped, shape, check.on_gpu), 150)
        if processes.run(call).code != 0:
            raise RuntimeError(f"the weights could not be written: {(call.folder / 'stderr').read_text()[-300:]}")
    return shaped


def _write_shaped(shaped: Shaped, shape: dict[str, Any], on_gpu: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tiny_model(shaped.folder)  # its tokenizer; the configuration is replaced
    (shaped.folder / "model.safetensors").unlink()  # it would be loaded instead of the shards
    settings = shaped.folder / "tokenizer_config.json"
    longest = {"model_max_length": shape["max_position_embeddings"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | longest))
    config = Qwen3Config(**shape, tie_word_embeddings=False, eos_token_id=0, pad_token_id=1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if on_gpu else "cpu"):
        Qwen3ForCausalLM(config).save_pretrained(shaped.folder, max_shard_size="2GB")
    generator = random.Random(0)
    mix = [min(shaped.short, max(16, int(generator.lognormvariate(*_MIX)))) for _ in range(1200)]
    for name, lengths in (("short", [shaped.short + 8] * 128), ("long", [shaped.long + 8] * 96), ("mix", mix)):
        write_rows(shaped.texts(name), _texts(shaped.folder, lengths, generator))


def _texts(folder: Path, lengths: list[int], generator: random.Random) -> Iterator[dict[str, str]]:
    """Yield texts with these numbers of tokens, up to those of a word more."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {word: len(tokenizer.tokenize(f" {word}")) for word in sorted(set(" ".join(CORPUS).split()))}
    words = list(tokens)
    for length in lengths:
        text: list[str] = []
        count = 0
        while count < length - 1:
            text.append(generator.choice(words))
            count += tokens[text[-1]]
        yield {"text": " ".join(text)}
