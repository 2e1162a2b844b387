"""Mixes: datasets made of rows of other datasets, in the order of `datasets.interleave_datasets`."""

import json
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.datasets import DatasetMix, MixRecipe, MixSource, UsedSource
from app.api.errors import invalid
from app.config import Settings
from app.datasets import service
from app.datasets.importer import ImportedFile, StoredFile, run_with_slot
from app.datasets.row_writer import MOST_BAD_ROWS, MOST_COLUMNS, PREVIEW_ROWS, shorten_row
from app.infra.files.disk_space import DiskReserve
from app.infra.process.sandbox import SandboxBusy
from app.infra.storage import Storage
from app.infra.strict_json import parse_json
from app.tables.datasets import Dataset

MOST_ROWS = 10_000_000
"""Rows of a mix, and of its sources together: their positions are in memory, 16 bytes for each."""
MOST_WEIGHT = 1000.0
_slots = threading.BoundedSemaphore(2)
"""Mixes that are written at a time: each may take 300 MB of memory, and a processor."""
_PICKS_AT_ONCE = 1000
"""Picks that the random generator makes in one call, as in `datasets`: another number gives another order."""


@dataclass(frozen=True)
class _Source:
    """Rows of a source, each as often as its weight says."""

    file: int
    """File descriptor."""
    positions: "array[int]"
    """Offset of each row's line in the file, in bytes."""
    ends: "array[int]"
    """Offset of the end of each row's line."""


async def write_mix(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, folder: Path, request: DatasetMix
) -> ImportedFile:
    """Write the rows of a mix into `folder`; raises `ApiError` if its sources do not fit together."""
    async with sessions() as session:
        datasets = await _find_datasets(session, request)
    disk_reserve = DiskReserve(folder, settings.disk_reserve_bytes)
    return await run_with_slot(
        _write_in_slot, request, datasets, storage, folder, settings.max_upload_bytes, disk_reserve
    )


async def _find_datasets(session: AsyncSession, request: DatasetMix) -> list[Dataset]:
    """Return the dataset of each source; raises a 422 error that names what is wrong with them."""
    query = select(Dataset).where(Dataset.id.in_({source.dataset_id for source in request.sources}))
    known = {dataset.id: dataset for dataset in await session.scalars(query)}
    errors, datasets = [], []
    for number, source in enumerate(request.sources):
        place, dataset = f"sources.{number}", known.get(source.dataset_id)
        if dataset is None:
            message = f"there is no dataset with the id {source.dataset_id[:60]!r}; upload one with POST /v1/datasets"
            errors.append(FieldError(field=f"{place}.dataset_id", code="dataset_not_found", message=message))
            continue
        datasets.append(dataset)
        if dataset.format != datasets[0].format:
            message = (
                f"{dataset.id} has the format {dataset.format}, and {datasets[0].id} {datasets[0].format}: "
                "mix one format"
            )
            errors.append(FieldError(field=f"{place}.dataset_id", code="format_mismatch", message=message))
        if source.weight_column is not None and source.weight_column not in dataset.columns:
            known_columns = ", ".join(f"`{name[:40]}`" for name in dataset.columns[:20])
            message = f"{dataset.id} has no column `{source.weight_column[:40]}`; it has {known_columns}"
            errors.append(FieldError(field=f"{place}.weight_column", code="unknown_column", message=message))
    if sum(dataset.rows for dataset in datasets) > MOST_ROWS:
        errors.append(_too_many_rows())
    # Otherwise mixes of mixes would have any number of columns, all of them in their row of the database.
    if len({name for dataset in datasets for name in dataset.columns}) > MOST_COLUMNS:
        message = f"the sources together have more than {MOST_COLUMNS:,} columns; mix datasets with the same columns"
        errors.append(FieldError(field="sources", code="too_many_columns", message=message))
    if errors:
        raise invalid(errors)
    return datasets


def _write_in_slot(
    request: DatasetMix,
    datasets: list[Dataset],
    storage: Storage,
    folder: Path,
    most_bytes: int,
    disk_reserve: DiskReserve,
) -> ImportedFile:
    if not _slots.acquire(blocking=False):
        raise SandboxBusy
    try:
        files = _local_files(datasets, storage, folder, disk_reserve)
        return _write_rows(request, datasets, files, StoredFile(folder / "data", most_bytes, disk_reserve))
    finally:
        _slots.release()


def _local_files(datasets: list[Dataset], storage: Storage, folder: Path, disk_reserve: DiskReserve) -> list[Path]:
    """Return the file of each source on this machine, each dataset fetched once from an object store.

    Raises:
        OSError: They do not fit on the disk.
    """
    distinct = {dataset.id: dataset for dataset in datasets}
    if storage.objects is not None:
        disk_reserve.ensure_room(sum(dataset.bytes for dataset in distinct.values()))
    local = {id: service.local_content(storage, dataset, folder) for id, dataset in distinct.items()}
    return [local[dataset.id] for dataset in datasets]


def _write_rows(request: DatasetMix, datasets: list[Dataset], files: list[Path], stored: StoredFile) -> ImportedFile:
    with ExitStack() as stack:
        stack.callback(stored.close)
        sources: list[_Source] = []
        for number, (source, file) in enumerate(zip(request.sources, files, strict=True)):
            descriptor = os.open(file, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            most = MOST_ROWS - sum(len(one.positions) for one in sources)
            sources.append(_weighted_rows(descriptor, source, number, request.seed, most))
        taken = [0] * len(sources)
        preview: list[Any] = []
        for number, row in _mix_order(request, [len(source.positions) for source in sources]):
            rows = sources[number]
            start = rows.positions[row]
            line = os.pread(rows.file, rows.ends[row] - start, start)
            stored.write(line if line.endswith(b"\n") else line + b"\n")
            taken[number] += 1
            if len(preview) < PREVIEW_ROWS:
                preview.append(shorten_row(parse_json(line)))
        stored.flush_to_disk()
    used = [
        UsedSource(**one.model_dump(), name=dataset.name, rows=rows)
        for one, dataset, rows in zip(request.sources, datasets, taken, strict=True)
    ]
    recipe = MixRecipe(mixed_from=used, stopping_strategy=request.stopping_strategy, seed=request.seed)
    return ImportedFile(
        path=stored.path,
        name=request.name,
        format=datasets[0].format,
        rows=sum(taken),
        bytes=stored.bytes,
        sha256=stored.sha256.hexdigest(),
        columns=list(dict.fromkeys(name for dataset in datasets for name in dataset.columns)),
        preview=preview,
        source=recipe.model_dump(mode="json"),
        digest=json.dumps(request.model_dump(mode="json"), sort_keys=True),
    )


def _weighted_rows(descriptor: int, source: MixSource, number: int, seed: int, most: int) -> _Source:
    """Find the lines of a source, each as often as its weight says.

    Raises a 422 error for unusable weights, and for more than `most` rows.
    """
    import numpy as np  # takes longer to import than most requests take

    chance = np.random.default_rng([seed, number])
    positions, ends = array("q"), array("q")
    errors: list[FieldError] = []
    place, column = f"sources.{number}", source.weight_column
    end = 0
    with os.fdopen(os.dup(descriptor), "rb") as file:
        for row, line in enumerate(file, 1):
            start, end = end, end + len(line)
            weight = 1.0 if column is None else _row_weight(line, column)
            if weight is None:
                message = f"row {row}: a weight is a number from 0 to {MOST_WEIGHT:,.0f}, a boolean or null"
                errors.append(FieldError(field=f"{place}.weight_column", code="bad_weight", message=message))
                if len(errors) == MOST_BAD_ROWS:
                    break
                continue
            times = int(weight) + int(weight % 1 > 0 and chance.random() < weight % 1)
            if len(positions) + times > most:
                raise invalid([_too_many_rows()])
            positions.extend([start] * times)
            ends.extend([end] * times)
    if not positions and not errors:
        message = f"each row of {source.dataset_id} has the weight 0; leave the source out"
        errors.append(FieldError(field=f"{place}.weight_column", code="no_rows", message=message))
    if errors:
        raise invalid(errors)
    return _Source(descriptor, positions, ends)


def _row_weight(line: bytes, column: str) -> float | None:
    """Return the weight of a row; None if it is unusable."""
    value = parse_json(line).get(column)
    try:
        weight = float(0 if value is None else value)  # the cells of a CSV file are text
    except (TypeError, ValueError, OverflowError):
        return None
    return weight if 0 <= weight <= MOST_WEIGHT else None


def _mix_order(request: DatasetMix, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the source and row of each row of the mix.

    Without weights the sources follow each other. With weights each row is the next one of a random source, chosen in
    proportion to the weights; a source that is exhausted starts again from its first row.

    Source: `interleave_datasets(…, probabilities=…, seed=…, stopping_strategy=…)` of the package `datasets`.
    """
    weights = [source.weight for source in request.sources if source.weight is not None]
    if not weights:
        for source, length in enumerate(lengths):
            yield from ((source, row) for row in range(length))
        return
    import numpy as np

    decisive = max if request.stopping_strategy == "all_exhausted" else min
    shares = np.array(weights) / sum(weights)
    chance = np.random.default_rng(request.seed)
    picked = [0] * len(lengths)
    while sum(picked) <= MOST_ROWS:
        picks = chance.choice(len(lengths), size=_PICKS_AT_ONCE, p=shares)
        rows = np.empty(_PICKS_AT_ONCE, dtype=np.int64)
        exhausted_at = []
        for source, length in enumerate(lengths):
            places = np.flatnonzero(picks == source)
            rows[places] = (picked[source] + np.arange(len(places))) % length
            left = length - picked[source]
            exhausted_at.append(-1 if left <= 0 else int(places[left - 1]) if left <= len(places) else _PICKS_AT_ONCE)
            picked[source] += len(places)
        end = decisive(exhausted_at) + 1
        yield from zip(picks[:end].tolist(), rows[:end].tolist(), strict=True)
        if end <= _PICKS_AT_ONCE:
            return
    raise invalid([_too_many_rows()])


def _too_many_rows() -> FieldError:
    message = f"a mix and its sources may have at most {MOST_ROWS:,} rows; mix fewer rows, or weights that differ less"
    return FieldError(field="sources", code="too_many_rows", message=message)
