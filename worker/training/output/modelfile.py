"""`Modelfile`, from which Ollama creates a model of `model.gguf`."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from worker.training.data.chat_template import end_of_turn

MODELFILE = "Modelfile"
_PARAMETERS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty", "max_new_tokens": "num_predict",
}  # fmt: skip
"""Names in Ollama of what a generation_config.json may say."""
_CHAT_TEMPLATES_SINCE = "0.30.0"
"""Version of Ollama from which it renders chats with the template that the GGUF file carries."""


def modelfile(folder: Path, gguf_file: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text for a GGUF file of the model in a folder, with what its generation_config.json says."""
    path = folder / "generation_config.json"
    generation: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    lines = [f"FROM ./{gguf_file}"]
    if tokenizer.chat_template:
        lines += [f"# The chat template is in {gguf_file}.", f"REQUIRES {_CHAT_TEMPLATES_SINCE}"]
    for name, parameter in _PARAMETERS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            lines.append(f"PARAMETER {parameter} {value}")
    quotes = {text: '"""' if '"' in text else '"' for text in _end_texts(generation, tokenizer)}
    lines += [f"PARAMETER stop {quote}{text}{quote}" for text, quote in quotes.items()]
    return "\n".join(lines) + "\n"


def _end_texts(generation: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the texts of the tokens that end an answer."""
    published = generation.get("eos_token_id")
    ends = published if isinstance(published, list) else [published]
    for token in dict.fromkeys([*ends, tokenizer.eos_token_id, end_of_turn(tokenizer)]):
        if token is not None and (text := str(tokenizer.decode([token]))):
            yield text
