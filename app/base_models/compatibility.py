"""Checks that a base model fits a training configuration."""

import json
from collections.abc import Mapping, Set
from typing import Any

from anneal.contracts.methods import method_of
from anneal.contracts.training_config.resolution import LONGEST_SEQUENCE
from app.base_models.model_folder import ModelFolder
from app.base_models.resolver import WEIGHTS_FILE, BaseModelError
from app.estimator.architecture import UnknownArchitecture, impossible_size, read_architecture
from app.estimator.parameters import module_names


def model_conflicts(
    folder: ModelFolder, config: Mapping[str, Any], user_set_fields: Set[str], *, needs_weights: bool = True
) -> list[BaseModelError]:
    """Return settings that a local model does not support, judged by its files before anything is started.

    Without `needs_weights`, the weights may still be missing. The errors' codes are fields of the configuration.
    """
    conflicts = []
    if config.get("revision") is not None:
        conflicts.append(
            BaseModelError(
                "revision", "A local folder or a run has no revisions; leave `revision` out, or name a hub model."
            )
        )
    is_adapter = folder.has_file("adapter_config.json")
    method = method_of(config)
    if is_reward_model(folder) and (is_adapter or not method.has_reward_head):
        what = "an adapter of a reward model" if is_adapter else "a reward model"
        message = f"This is {what}: it scores text and generates none; use it in `rlhf.rewards`, with type `model`."
        conflicts.append(BaseModelError("base_model", message))
    if needs_weights and not is_adapter and (lacking := _missing_weights(folder, method.adapter == "forbidden")):
        conflicts.append(BaseModelError("base_model", lacking))
    conflicts += _of_architecture(folder, config)
    if not is_adapter and not creates_model(config):
        conflicts += _outside_of_model(folder, config)
    length, longest = config.get("max_seq_length"), longest_sequence(folder)
    if "max_seq_length" in user_set_fields and isinstance(length, int) and longest is not None and length > longest:
        message = (
            f"The model takes at most {longest} tokens; set `max_seq_length` to that or less, or null for the limit."
        )
        conflicts.append(BaseModelError("max_seq_length", message))
    return conflicts


def _missing_weights(folder: ModelFolder, from_scratch: bool) -> str | None:
    """Return what is wrong with the weights in a model's folder, as far as can be seen without reading them."""
    weights = folder.weight_sizes()
    if not weights:
        message = "The folder contains no safetensors weights; add them, or train from scratch with method `full`."
        return None if from_scratch else message
    if weights.get(WEIGHTS_FILE) == 0:
        return f"{WEIGHTS_FILE} in the folder is empty; replace it with the model's weights."
    return None


def is_reward_model(folder: ModelFolder) -> bool | None:
    """Return True if a local model outputs one score instead of tokens; None if its files do not say."""
    if folder.has_file("adapter_config.json"):
        task = folder.read_json("adapter_config.json").get("task_type")
        return task == "SEQ_CLS" if isinstance(task, str) else None
    names = folder.read_json("config.json").get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names)


def _of_architecture(folder: ModelFolder, config: Mapping[str, Any]) -> list[BaseModelError]:
    """Return settings that are impossible for a model of a known family; nothing if a plugin creates the model."""
    model_config = folder.read_json("config.json")
    if folder.has_file("adapter_config.json") or creates_model(config):
        return []
    if problem := impossible_size(model_config):
        return [BaseModelError("base_model", f"The model's config.json is invalid: {problem}; correct it there.")]
    names = config.get("target_modules")
    has_adapter = method_of(config).adapter != "forbidden" and config.get("lora_r", 1) is not None
    if not has_adapter or not isinstance(names, list):
        return []
    try:
        there = module_names(read_architecture(model_config))
    except UnknownArchitecture:
        return []
    if there is None:
        return []
    missing = [name for name in names if isinstance(name, str) and not _is_among(name, there)]
    if not missing:
        return []
    message = (
        f"`target_modules`: this model has no module {', '.join(missing)[:200]}; leave the field out for all linear "
        "layers."
    )
    return [BaseModelError("target_modules", message)]


def _outside_of_model(folder: ModelFolder, config: Mapping[str, Any]) -> list[BaseModelError]:
    """Return errors for configured layers and tokens that the model does not have."""
    errors = []
    for field, size, noun in (
        ("layers_to_transform", "num_hidden_layers", "layers"),
        ("trainable_token_indices", "vocab_size", "tokens"),
    ):
        numbers, count = config.get(field), _text_config(folder).get(size)
        if not isinstance(numbers, list) or not isinstance(count, int):
            continue
        above = [number for number in numbers if isinstance(number, int) and number >= count]
        if above:
            message = f"The model has {count} {noun}, 0 to {count - 1}, and so no {', '.join(map(str, above))[:200]}."
            errors.append(BaseModelError(field, message))
    return errors


def _text_config(folder: ModelFolder) -> Mapping[str, Any]:
    """Return the part of a model's config.json that describes its language model."""
    model_config = folder.read_json("config.json")
    text = model_config.get("text_config", model_config)
    return text if isinstance(text, Mapping) else {}


_MAX_TOKENIZER_BYTES = 64 * 2**20


def tokenizer_conflict(tokenizer: ModelFolder, model: ModelFolder) -> str | None:
    """Return why a model has no embeddings for all tokens of a tokenizer, as far as their files say."""
    rows = _text_config(model).get("vocab_size")
    highest = _highest_token(tokenizer)
    if not isinstance(rows, int) or highest is None or highest < rows:
        return None
    return (
        f"its tokens have ids up to {highest}, and the model has embeddings for {rows} tokens; use a tokenizer whose "
        "tokens are among those of the model"
    )


def teacher_conflict(teacher: ModelFolder, model: ModelFolder) -> str | None:
    """Return why the probabilities of a teacher are not those of the model's tokens, as far as their files say."""
    own, other = _vocabulary(model), _vocabulary(teacher)
    if own is None or other is None:
        return None
    different = [token for token, number in own.items() if other.get(token) != number]
    if not different:
        return None
    return (
        f"{len(different)} of the {len(own)} tokens of the base model are not in it, or have other ids, such as "
        f"{different[0][:40]!r}"
    )


def _vocabulary(folder: ModelFolder) -> dict[str, int] | None:
    """Return the ids in a `tokenizer.json` by token; None if it cannot be read, or if there is none."""
    try:
        content = json.loads(folder.read_file("tokenizer.json", _MAX_TOKENIZER_BYTES))
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or ()
        if not isinstance(vocabulary, dict):  # of a Unigram model: pairs of a token and its score
            vocabulary = {str(token): number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{str(token["content"]): int(token["id"]) for token in added}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _highest_token(folder: ModelFolder) -> int | None:
    """Return the highest id in a `tokenizer.json`; None if it cannot be read, or if there is none."""
    vocabulary = _vocabulary(folder)
    try:
        return None if vocabulary is None else max(int(number) for number in vocabulary.values())
    except (ValueError, TypeError, OverflowError):  # no tokens, or ids that are no numbers
        return None


def creates_model(config: Mapping[str, Any]) -> bool:
    """Return True if a plugin creates the model, so that the files of the base do not determine it."""
    extra = config.get("extra")
    return isinstance(extra, Mapping) and bool(extra.get("model_factory"))


def _is_among(name: str, modules: Set[str]) -> bool:
    """Return True if a configured name is a module's name or the end of one, as peft matches it."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def longest_sequence(folder: ModelFolder) -> int | None:
    """Return the maximum sequence length of a local model: its number of positions, else that of its tokenizer."""
    model_config = folder.read_json("config.json")
    model_config = model_config.get("text_config", model_config)
    positions = model_config.get("max_position_embeddings") if isinstance(model_config, dict) else None
    if isinstance(positions, int):
        return positions
    longest = folder.read_json("tokenizer_config.json").get("model_max_length") if model_config else None
    # JSON as Python reads it has infinity and NaN.
    return int(min(longest, LONGEST_SEQUENCE)) if isinstance(longest, int | float) and longest >= 1 else None
