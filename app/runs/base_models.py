"""Which model a name means. Free of FastAPI: the API checks a name with it, the worker finds the files."""

import json
import re
from collections.abc import Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypedDict

from app.config import Settings
from app.estimates.architecture import UnknownArchitecture, impossible_size, read
from app.estimates.parameters import modules
from app.ids import is_id
from app.storage import OutsideStorage, Storage

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_MOST_CONFIG_BYTES = 2**20
_WEIGHTS = "model.safetensors"
_MODEL_FILES = ("config.json", "adapter_config.json")


class BaseModelError(ValueError):
    """A name that leads to no model: a stable code, and a sentence that says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Located(TypedDict):
    """A base model: its name as the user wrote it, and either a local folder or a hub name with a revision."""

    name: str
    path: str | None
    hub: str | None
    revision: str | None


def is_run(name: str) -> bool:
    """Whether the name means the output of a run."""
    return name.startswith("run_") and is_id(name, "run")


def is_hub_name(name: str) -> bool:
    """Whether the name could be one of the hub."""
    return _HUB_NAME.fullmatch(name) is not None


def locate(
    settings: Settings,
    storage: Storage,
    name: str,
    output_attempt_of_base_run: int | None,
    revision: str | None = None,
) -> Located:
    """Where the model lies: a run's output, else a folder below the models root, else a model of the hub.

    `output_attempt_of_base_run` is the `output_attempt` of the run that `name` means, None for other names.
    Whether a hub model exists is seen when it is loaded. Raises `BaseModelError`.
    """
    if is_run(name):
        if output_attempt_of_base_run is None:
            raise BaseModelError(
                "base_run_without_output", f"Run {name} has no output to build on; wait until it is completed."
            )
        folder = storage.output_dir(name, output_attempt_of_base_run)
        if folder.is_symlink() or not _holds_model(folder):
            raise BaseModelError(
                "model_not_found",
                f"The output of run {name} is gone from the storage; resume that run to make it again.",
            )
        return Located(name=name, path=str(folder), hub=None, revision=None)
    _check_allowed(settings, name)
    folder = _below(settings.models_folder, name)
    if folder.is_dir():
        if not _holds_model(folder):
            raise BaseModelError(
                "not_a_model",
                f"The folder {name!r} below the models root holds neither config.json nor "
                "adapter_config.json; put a model in Hugging Face format there.",
            )
        return Located(name=name, path=str(folder), hub=None, revision=None)
    return Located(name=name, path=None, hub=_hub_name(settings, name), revision=revision)


def conflicts(
    folder: Path, config: Mapping[str, Any], given: Set[str], *, needs_weights: bool = True
) -> list[BaseModelError]:
    """What of a configuration a local model cannot do: seen from its files, before anything is started.

    Without `needs_weights` they may still be missing. The errors' codes are fields of the configuration.
    """
    found = []
    if config.get("revision") is not None:
        found.append(
            BaseModelError(
                "revision", "A local folder or a run has no revisions; leave `revision` out, or name a hub model."
            )
        )
    is_adapter = (folder / "adapter_config.json").is_file()
    method = config.get("method", "qlora")
    if is_reward_model(folder) and (is_adapter or method != "reward"):
        what = "an adapter of a reward model" if is_adapter else "a reward model"
        message = f"This is {what}: it scores answers and writes none; name it in `rlhf.rewards`, with type `model`."
        found.append(BaseModelError("base_model", message))
    if needs_weights and not is_adapter and (lacking := _lacking(folder, method == "full")):
        found.append(BaseModelError("base_model", lacking))
    found += _of_architecture(folder, config)
    length, longest = config.get("max_seq_length"), _longest(folder)
    if "max_seq_length" in given and isinstance(length, int) and longest is not None and length > longest:
        message = (
            f"The model takes at most {longest} tokens; set `max_seq_length` to that or less, or null for the limit."
        )
        found.append(BaseModelError("max_seq_length", message))
    return found


def _lacking(folder: Path, from_scratch: bool) -> str | None:
    """What is wrong with the weights of a model's folder, as far as it is seen without reading them."""
    if not any(folder.glob("*.safetensors")):
        told = "The folder has no safetensors weights; put them there, or train it from scratch with method `full`."
        return None if from_scratch else told
    whole = folder / _WEIGHTS
    if whole.is_file() and whole.stat().st_size == 0:
        return f"{_WEIGHTS} in the folder is empty; put the model's weights there again."
    return None


def is_reward_model(folder: Path) -> bool | None:
    """Whether a local model gives one score in place of tokens; None where its files do not tell."""
    if (folder / "adapter_config.json").is_file():
        task = _told(folder, "adapter_config.json").get("task_type")
        return task == "SEQ_CLS" if isinstance(task, str) else None
    names = _told(folder, "config.json").get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names)


def _of_architecture(folder: Path, config: Mapping[str, Any]) -> list[BaseModelError]:
    """What a known family's configuration makes impossible for certain; nothing where another part makes the model."""
    told, extra = _told(folder, "config.json"), config.get("extra")
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter or (isinstance(extra, Mapping) and (extra.get("model_factory") or extra.get("recipe"))):
        return []
    if wrong := impossible_size(told):
        return [BaseModelError("base_model", f"The model's config.json cannot be: {wrong}; correct it there.")]
    names = config.get("target_modules")
    if config.get("method") == "full" or config.get("lora_r", 1) is None or not isinstance(names, list):
        return []
    try:
        there = modules(read(told))
    except UnknownArchitecture:
        return []
    if there is None:
        return []
    missing = [name for name in names if isinstance(name, str) and not _is_among(name, there)]
    if not missing:
        return []
    message = (
        f"`target_modules`: this model has no module {', '.join(missing)[:200]}; leave it out for all linear ones."
    )
    return [BaseModelError("target_modules", message)]


def _is_among(name: str, modules: Set[str]) -> bool:
    """Whether a name of the configuration is that of a module, or the end of it, as peft understands it."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _longest(folder: Path) -> int | None:
    """Positions that the model has, where its configuration tells."""
    told = _told(folder, "config.json")
    told = told.get("text_config", told)
    longest = told.get("max_position_embeddings") if isinstance(told, dict) else None
    return longest if isinstance(longest, int) else None


def _told(folder: Path, name: str) -> dict[str, Any]:
    """What a file of the model's says; nothing where it cannot be read."""
    try:
        file = folder / name
        if not file.is_file() or file.stat().st_size > _MOST_CONFIG_BYTES:
            return {}
        told = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _check_allowed(settings: Settings, name: str) -> None:
    """Of a run's output it was asked when that run was made."""
    patterns = [pattern for part in settings.allowed_models.split(",") if (pattern := part.strip())]
    if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
        return
    allowed = ", ".join(f"`{pattern}`" for pattern in patterns)
    raise BaseModelError(
        "model_not_allowed",
        f"This server does not train on {name[:100]!r}; its operator allows {allowed[:300]} (ANNEAL_ALLOWED_MODELS).",
    )


def _below(root: Path, name: str) -> Path:
    try:
        return Storage.resolve_below(root, name)
    except OutsideStorage:
        raise BaseModelError(
            "outside_models_root",
            f"{name[:100]!r} leads out of the models root; name a folder below it, without '..', a leading "
            "'/' or symbolic links.",
        ) from None


def _hub_name(settings: Settings, name: str) -> str:
    here = f"There is no folder {name!r} below the models root {settings.models_folder}"
    if not is_hub_name(name):
        raise BaseModelError(
            "model_not_found",
            f"{here}, and it is neither the id of a run (`run_…`) nor a hub name (`owner/model`); put the "
            "model there, or correct the name.",
        )
    if not settings.allow_hub:
        raise BaseModelError(
            "hub_not_allowed",
            f"{here}, and this server does not load from the hub; put the model there, or let the operator "
            "set ANNEAL_ALLOW_HUB=true.",
        )
    return name


def _holds_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _MODEL_FILES)
