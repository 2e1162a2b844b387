"""Which model a name means. Free of FastAPI: the API checks a name with it, the worker finds the files."""

import re
from pathlib import Path
from typing import TypedDict

from app.config import Settings
from app.ids import is_id
from app.storage import OutsideStorage, Storage

_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
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
        if not _holds_model(folder):
            raise BaseModelError(
                "model_not_found",
                f"The output of run {name} is gone from the storage; resume that run to make it again.",
            )
        return Located(name=name, path=str(folder), hub=None, revision=None)
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
    if _HUB_NAME.fullmatch(name) is None:
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
