"""Resolution of base model names. Free of FastAPI: the API validates names with it, the worker locates the files."""

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
    """A name that does not resolve to a model, with a stable code and a message that says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Located(TypedDict):
    """Location of a base model: its name as the user wrote it, and either a folder or a hub name with a revision."""

    name: str
    path: str | None
    hub: str | None
    revision: str | None


def is_run(name: str) -> bool:
    """Return True if the name refers to the output of a run."""
    return name.startswith("run_") and is_id(name, "run")


def is_hub_name(name: str) -> bool:
    """Return True if the name has the form of a hub name."""
    return _HUB_NAME.fullmatch(name) is not None


def locate(
    settings: Settings,
    storage: Storage,
    name: str,
    output_attempt_of_base_run: int | None,
    revision: str | None = None,
) -> Located:
    """Locate the model: the output of a run, else a folder below the models root, else a hub model.

    `output_attempt_of_base_run` is the `output_attempt` of the run that `name` refers to, None for other names.
    The existence of a hub model is checked only when it is loaded. Raises `BaseModelError`.
    """
    if is_run(name):
        if output_attempt_of_base_run is None:
            raise BaseModelError(
                "base_run_without_output", f"Run {name} has no output to use as a model; wait until it is completed."
            )
        folder = storage.output_dir(name, output_attempt_of_base_run)
        if folder.is_symlink() or not _holds_model(folder):
            raise BaseModelError(
                "model_not_found",
                f"The output of run {name} is missing from the storage; resume that run to create it again.",
            )
        return Located(name=name, path=str(folder), hub=None, revision=None)
    _check_allowed(settings, name)
    folder = _below(settings.models_folder, name)
    if folder.is_dir():
        if not _holds_model(folder):
            raise BaseModelError(
                "not_a_model",
                f"The folder {name!r} below the models root contains neither config.json nor "
                "adapter_config.json; put a model in Hugging Face format there.",
            )
        return Located(name=name, path=str(folder), hub=None, revision=None)
    return Located(name=name, path=None, hub=_hub_name(settings, name), revision=revision)


def conflicts(
    folder: Path, config: Mapping[str, Any], given: Set[str], *, needs_weights: bool = True
) -> list[BaseModelError]:
    """Return settings that a local model does not support, judged by its files before anything is started.

    Without `needs_weights`, the weights may still be missing. The errors' codes are fields of the configuration.
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
        message = f"This is {what}: it scores text and generates none; use it in `rlhf.rewards`, with type `model`."
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
    """Return what is wrong with the weights in a model's folder, as far as can be seen without reading them."""
    if not any(folder.glob("*.safetensors")):
        message = "The folder contains no safetensors weights; add them, or train from scratch with method `full`."
        return None if from_scratch else message
    whole = folder / _WEIGHTS
    if whole.is_file() and whole.stat().st_size == 0:
        return f"{_WEIGHTS} in the folder is empty; replace it with the model's weights."
    return None


def is_reward_model(folder: Path) -> bool | None:
    """Return True if a local model outputs one score instead of tokens; None if its files do not say."""
    if (folder / "adapter_config.json").is_file():
        task = _read_json(folder, "adapter_config.json").get("task_type")
        return task == "SEQ_CLS" if isinstance(task, str) else None
    names = _read_json(folder, "config.json").get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names)


def _of_architecture(folder: Path, config: Mapping[str, Any]) -> list[BaseModelError]:
    """Return settings that are impossible for a model of a known family; nothing if a plugin creates the model."""
    model_config, extra = _read_json(folder, "config.json"), config.get("extra")
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter or (isinstance(extra, Mapping) and (extra.get("model_factory") or extra.get("recipe"))):
        return []
    if wrong := impossible_size(model_config):
        return [BaseModelError("base_model", f"The model's config.json is invalid: {wrong}; correct it there.")]
    names = config.get("target_modules")
    if config.get("method") == "full" or config.get("lora_r", 1) is None or not isinstance(names, list):
        return []
    try:
        there = modules(read(model_config))
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


def _is_among(name: str, modules: Set[str]) -> bool:
    """Return True if a configured name is a module's name or the end of one, as peft matches it."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _longest(folder: Path) -> int | None:
    """Return the model's maximum number of positions, if its configuration gives it."""
    model_config = _read_json(folder, "config.json")
    model_config = model_config.get("text_config", model_config)
    longest = model_config.get("max_position_embeddings") if isinstance(model_config, dict) else None
    return longest if isinstance(longest, int) else None


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of the model; return an empty one if that fails."""
    try:
        file = folder / name
        if not file.is_file() or file.stat().st_size > _MOST_CONFIG_BYTES:
            return {}
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_allowed(settings: Settings, name: str) -> None:
    """Raise unless the operator allows this model; for a run's output this was checked when that run was created."""
    patterns = [pattern for part in settings.allowed_models.split(",") if (pattern := part.strip())]
    if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
        return
    allowed = ", ".join(f"`{pattern}`" for pattern in patterns)
    raise BaseModelError(
        "model_not_allowed",
        f"This server does not allow the model {name[:100]!r}; use one of {allowed[:300]} (ANNEAL_ALLOWED_MODELS).",
    )


def _below(root: Path, name: str) -> Path:
    try:
        return Storage.resolve_below(root, name)
    except OutsideStorage:
        raise BaseModelError(
            "outside_models_root",
            f"{name[:100]!r} points outside the models root; use a folder below it, without '..', a leading "
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
            f"{here}, and this server does not load from the hub; put the model there, or ask the operator to "
            "set ANNEAL_ALLOW_HUB=true.",
        )
    return name


def _holds_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _MODEL_FILES)
