"""Lists the base models below the models roots, by their files."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anneal.contracts.field_types import ModelName
from anneal.contracts.schemas.models import ModelRead
from app.base_models import resolver
from app.base_models.compatibility import longest_sequence
from app.base_models.model_folder import ModelFolder
from app.base_models.resolver import BaseModelError
from app.config import Settings
from app.estimator.architecture import UnknownArchitecture, read_architecture
from app.estimator.parameters import total_parameters
from app.infra.storage import Storage

MOST_MODELS = 1000
_NAME: TypeAdapter[str] = TypeAdapter(ModelName)
_MOST_FOLDERS = 20_000
"""Folders that are looked at in all; a root with more is not meant for models."""
_DEPTH = 3
"""Levels of folders below a root: `owner/collection/model`."""


def list_models(settings: Settings, storage: Storage) -> list[ModelRead]:
    """Return the allowed models below all roots, by name, at most `MOST_MODELS`; reads files, so call it in a thread.

    A folder that is a link counts if it leads below a root; a folder that cannot be read is left out.
    """
    models: list[ModelRead] = []
    for name, path in _model_folders(settings, storage):
        if not _is_usable(name):
            continue
        if len(models) == MOST_MODELS:
            break
        with suppress(OSError):
            models.append(_describe_model(name, ModelFolder(storage, path)))
    return sorted(models, key=lambda model: model.id)


def _is_usable(name: str) -> bool:
    """Return True if `base_model` takes the name."""
    try:
        _NAME.validate_python(name)
    except ValidationError:
        return False
    return True


def _model_folders(settings: Settings, storage: Storage) -> Iterator[tuple[str, Path]]:
    seen = 0
    for at, root in enumerate(settings.model_roots):
        levels = [root]
        for _ in range(_DEPTH):
            below: list[Path] = []
            for folder in levels:
                for path in _list_subfolders(folder):
                    seen += 1
                    if seen > _MOST_FOLDERS:
                        return
                    name = str(path) if at else path.relative_to(root).as_posix()
                    try:
                        place = resolver.folder_of(settings, name)
                    except BaseModelError:  # a link that leads out of the roots
                        continue
                    if resolver.holds_model(ModelFolder(storage, place)):
                        if resolver.is_allowed(settings, name):
                            yield name, place
                    elif not path.is_symlink():
                        below.append(path)
            levels = below


def _list_subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def _describe_model(name: str, folder: ModelFolder) -> ModelRead:
    config, is_adapter = folder.read_json("config.json"), folder.has_file("adapter_config.json")
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelRead(
        id=name,
        is_adapter=is_adapter,
        architecture=architecture and architecture[:200],
        parameters=None if is_adapter else _count_parameters(config),
        dtype=dtype[:50] if isinstance(dtype, str) else None,
        bytes=sum(folder.weight_sizes().values()),
        has_chat_template=folder.has_file("chat_template.jinja")
        or folder.has_file("chat_template.json")
        or "chat_template" in folder.read_json("tokenizer_config.json"),
        max_seq_length=longest_sequence(folder),
    )


def _count_parameters(config: dict[str, Any]) -> int | None:
    try:
        return total_parameters(read_architecture(config))
    except UnknownArchitecture:
        return None
