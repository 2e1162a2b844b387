"""Resolution of base model names. Free of FastAPI: the API validates names with it, the worker locates the files."""

import os
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from anneal.contracts.attempt.job import MERGED_BASE
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.infra.files.untrusted_folder import OutsideStorage, refuse_outside
from app.infra.ids import is_id
from app.infra.storage import Storage

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")

WEIGHTS_FILE = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_MODEL_FILES = ("config.json", "adapter_config.json")


class BaseModelError(ValueError):
    """A name that does not resolve to a model, with a stable code and a message that says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ModelLocation(TypedDict):
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


def locate_model(
    settings: Settings,
    storage: Storage,
    name: str,
    output_attempt_of_base_run: int | None,
    revision: str | None = None,
) -> ModelLocation:
    """Locate the model: the output of a run, else a folder below a models root, else a hub model.

    `output_attempt_of_base_run` is the `output_attempt` of the run that `name` refers to, None for other names.
    The existence of a hub model is checked only when it is loaded. Raises `BaseModelError`.
    """
    if is_run(name):
        if output_attempt_of_base_run is None:
            raise BaseModelError(
                "base_run_without_output", f"Run {name} has no output to use as a model; wait until it is completed."
            )
        folder = storage.output_dir(name, output_attempt_of_base_run)
        if not holds_model(ModelFolder(storage, folder)):
            raise BaseModelError(
                "model_not_found",
                f"The output of run {name} is missing from the storage; resume that run to create it again.",
            )
        return ModelLocation(name=name, path=str(folder), hub=None, revision=None)
    check_allowed(settings, name)
    folder = folder_of(settings, name)
    if folder.is_dir():
        if not holds_model(ModelFolder(storage, folder)):
            raise BaseModelError(
                "not_a_model",
                f"The folder {name!r} below the models root contains neither config.json nor "
                "adapter_config.json; put a model in Hugging Face format there.",
            )
        return ModelLocation(name=_portable_name(settings, name), path=str(folder), hub=None, revision=None)
    return ModelLocation(name=name, path=None, hub=_hub_name(settings, name), revision=revision)


def locate_tokenizer(settings: Settings, storage: Storage, name: str) -> ModelLocation:
    """Locate the tokenizer of another model than the base: a folder below a models root, else a hub model.

    The existence of a hub model is checked only when it is loaded. Raises `BaseModelError`.
    """
    if is_run(name):
        raise BaseModelError(
            "not_supported",
            f"{name} is a run: name the model that it was trained on, whose tokenizer its output has.",
        )
    check_allowed(settings, name)
    folder = folder_of(settings, name)
    if not folder.is_dir():
        return ModelLocation(name=name, path=None, hub=_hub_name(settings, name), revision=None)
    if not any(ModelFolder(storage, folder).has_file(file) for file in _TOKENIZER_FILES):
        raise BaseModelError(
            "not_a_tokenizer",
            f"The folder {name!r} below the models root contains none of {', '.join(_TOKENIZER_FILES)}; put a "
            "tokenizer in Hugging Face format there.",
        )
    return ModelLocation(name=_portable_name(settings, name), path=str(folder), hub=None, revision=None)


def check_allowed(settings: Settings, name: str) -> None:
    """Raise `BaseModelError` unless the operator allows this model.

    For the output of a run this was checked when that run was created.
    """
    patterns = [pattern for part in settings.allowed_models.split(",") if (pattern := part.strip())]
    if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
        return
    allowed = ", ".join(f"`{pattern}`" for pattern in patterns)
    raise BaseModelError(
        "model_not_allowed",
        f"This server does not allow the model {name[:100]!r}; use one of {allowed[:300]} (ANNEAL_ALLOWED_MODELS).",
    )


def is_allowed(settings: Settings, name: str) -> bool:
    """Return True if the operator allows this name of a base model."""
    try:
        check_allowed(settings, name)
    except BaseModelError:
        return False
    return True


def folder_of(settings: Settings, name: str) -> Path:
    """Return the folder that a local name means, with all links resolved; it need not exist.

    `name` is relative to a root, of which the first one with such a folder counts, or absolute and below one of them.
    Links may lead from root to root, never out of all of them. Raises `BaseModelError` (`outside_models_root`).
    """
    with suppress(OutsideStorage, OSError, ValueError):
        if not name.startswith("/"):
            refuse_outside(name)
            others = (root / name for root in settings.model_roots[1:])
            first = settings.models_folder / name
            return _resolve_inside(
                settings, first if first.exists() else next((one for one in others if one.is_dir()), first)
            )
        refuse_outside(name[1:])
        if any(Path(name).is_relative_to(root) for root in settings.model_roots):
            return _resolve_inside(settings, Path(name))
    extra = ", ".join(str(root) for root in settings.model_roots[1:])
    raise BaseModelError(
        "outside_models_root",
        f"{name[:100]!r} points outside the models root; use a folder below it, without '..'"
        + (f", or an absolute path below {extra[:300]}." if extra else " and without a leading '/'.")
        + " Symbolic links must lead to a folder below one of these (ANNEAL_EXTRA_MODEL_ROOTS).",
    )


def base_folder(settings: Settings, storage: Storage, adapter: ModelFolder, name: str) -> Path | None:
    """Return the folder of the base that an adapter names as users do: beside its files, or below a models root.

    None for an absolute path, and for a model that is not on this machine.
    """
    if name == MERGED_BASE and holds_model(ModelFolder(storage, adapter.path / MERGED_BASE)):
        return adapter.path / MERGED_BASE
    if not name or name.startswith("/"):
        return None
    with suppress(BaseModelError):
        folder = folder_of(settings, name)
        return folder if folder.is_dir() and holds_model(ModelFolder(storage, folder)) else None
    return None


def _portable_name(settings: Settings, name: str) -> str:
    """Return a local name without its root: it appears in outputs, which must not name a folder of this server."""
    below = [root for root in settings.model_roots if name.startswith("/") and Path(name).is_relative_to(root)]
    return str(Path(name).relative_to(below[0])) if below else name


def _resolve_inside(settings: Settings, path: Path) -> Path:
    """Return `path`, or where its links lead if that is below a root; raise `OutsideStorage` otherwise."""
    real = Path(os.path.realpath(path))
    for root in settings.model_roots:
        inner = Path(os.path.realpath(root))
        if real != inner and real.is_relative_to(inner):
            return root / real.relative_to(inner)
    raise OutsideStorage(f"outside the models roots: {path}")


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


def holds_model(folder: ModelFolder) -> bool:
    """Return True if a folder has the configuration of a model or an adapter."""
    return any(folder.has_file(file) for file in _MODEL_FILES)
