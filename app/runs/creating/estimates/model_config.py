"""Configuration (`config.json`) of a base model, from which an estimate reads its architecture."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from app.base_models import resolver
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.infra.files.object_store import StoreUnavailable
from app.infra.files.untrusted_folder import OutsideStorage
from app.infra.storage import Storage
from app.runs.creating.estimates import hub_config
from app.runs.creating.estimates.hub_config import HubConfig

_MOST_BYTES = 2**20


class NoConfig(Exception):
    """Raised when the model's configuration cannot be read here; the message is a sentence that says why."""


def read_config(
    settings: Settings, storage: Storage, config: TrainingConfig, attempt: int | None, fetched: HubConfig | None
) -> dict[str, Any]:
    """Read the configuration of a base model from its folder, or from the hub.

    `attempt` is that of the output of a base run, `fetched` what was found on the hub. For an adapter, the
    configuration is that of its base model.

    Raises:
        NoConfig: it cannot be read on this machine.
    """
    try:
        located = resolver.locate_model(settings, storage, config.base_model, attempt, config.revision)
        if located["path"] is not None:
            base = base_of(ModelFolder(storage, Path(located["path"])), settings, storage)
            return _of_hub(storage, base, None) if isinstance(base, str) else _read_json(base, "config.json")
    except resolver.BaseModelError as error:
        raise NoConfig(error.message) from error
    except StoreUnavailable as error:
        raise NoConfig(f"The storage cannot be used now: {error}.") from error
    if fetched is not None:
        if fetched.content is None:
            raise NoConfig(fetched.reason)
        return _parse_object("config.json", fetched.content)
    return _of_hub(storage, str(located["hub"]), config.revision)


def base_of(folder: ModelFolder, settings: Settings, storage: Storage, depth: int = 0) -> ModelFolder | str:
    """Return the folder of the model that an adapter changes, or its name on the hub; a model's folder itself.

    Raises:
        NoConfig: The adapter cannot be read, or its base is not on this machine.
    """
    described = "adapter_config.json"
    if not folder.has_file(described):
        return folder
    base = str(_read_json(folder, described).get("base_model_name_or_path") or "")
    if not Path(base).is_absolute():
        inside = _base_by_name(base, folder, settings, storage)
        if inside is None or depth >= 4:
            return base
        return base_of(ModelFolder(storage, inside), settings, storage, depth + 1)
    if depth < 4 and (path := _allowed_folder(base, settings, storage)) is not None:
        return base_of(ModelFolder(storage, path), settings, storage, depth + 1)
    raise NoConfig(f"The base model of the adapter {folder.path.name} is no longer on this machine.")


def _base_by_name(base: str, folder: ModelFolder, settings: Settings, storage: Storage) -> Path | None:
    """Return the folder of a base that an adapter names as users do; None for the name of a hub model."""
    if resolver.is_run(base):
        return _newest_output(storage, base)
    return resolver.base_folder(settings, storage, folder, base)


def _newest_output(storage: Storage, run_id: str) -> Path | None:
    if storage.objects is not None:
        names = [one.key.split("/") for one in storage.objects.list(f"runs/{run_id}")]
        attempts = [int(name[2][1:]) for name in names if name[3:] == ["output.manifest.json"]]
        return storage.output_dir(run_id, max(attempts)) if attempts else None
    outputs = storage.run_dir(run_id).glob("a*/output")
    return max(outputs, default=None, key=lambda path: int(path.parent.name[1:]))


def _allowed_folder(base: str, settings: Settings, storage: Storage) -> Path | None:
    """Return the folder that an adapter names, which a trainer has written, if it is one of a model."""
    with suppress(OSError, ValueError):  # too long, or with a NUL
        path = Path(os.path.realpath(base))
        for root in (*settings.model_roots, storage.root):
            if path.is_relative_to(root.resolve()) and path.is_dir():
                return root / path.relative_to(root.resolve())
    return None


def _of_hub(storage: Storage, name: str, revision: str | None) -> dict[str, Any]:
    cached = hub_config.cached_path(name, revision)
    if cached is None:
        raise NoConfig(f"The configuration of {name[:100]!r} was not found on the API's machine.")
    return _read_json(ModelFolder(storage, cached.parent), cached.name)


def _read_json(folder: ModelFolder, name: str) -> dict[str, Any]:
    try:
        content = folder.read_file(name, _MOST_BYTES)
    except OSError as error:
        raise NoConfig(f"{name} of the model cannot be read: {error.strerror or 'file not found'}.") from error
    except OutsideStorage as error:
        raise NoConfig(f"{name} of the model cannot be read: {error}.") from error
    return _parse_object(name, content)


def parse_config(content: bytes) -> dict[str, Any]:
    """Parse a config.json; empty if it is not a JSON object."""
    with suppress(NoConfig):
        return _parse_object("config.json", content)
    return {}


def _parse_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NoConfig(f"{name} of the model cannot be read: it is not valid JSON.") from error
    if not isinstance(document, dict):
        raise NoConfig(f"{name} of the model is not a JSON object.")
    return document
