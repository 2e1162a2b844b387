"""Validation of base models and reward models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import release
from app.base_models import resolver
from app.base_models.compatibility import creates_model, is_reward_model, longest_sequence, model_conflicts
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.contracts.errors import FieldError
from app.contracts.methods import method_of, rewards_of
from app.contracts.training_config.raw_config import given_fields
from app.contracts.training_config.stored_quantization import stored_quantization, stored_quantization_conflicts
from app.infra.storage import Storage
from app.runs.estimates.hub_config import cached_path
from app.runs.validation.result import ValidationResult
from app.tables.runs import Run


async def _check_base_model(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    loads_model: bool,
    found: ValidationResult,
    *,
    needs_weights: bool,
    trains: bool,
) -> None:
    name = config.get("base_model")
    if not isinstance(name, str) or any(error.field == "config.base_model" for error in found.errors):
        return
    if not loads_model and not resolver.is_run(name):
        return
    try:
        output_attempt = await _output_attempt(session, name, "base") if resolver.is_run(name) else None
        await release(session)
        # In a thread: a storage that hangs must not block the event loop.
        located = await storage.in_thread(resolver.locate, settings, storage, name, output_attempt)
    except resolver.BaseModelError as error:
        found.refuse("config.base_model", error.code, error.message)
        return
    if loads_model and located["path"] is not None:
        folder, given = ModelFolder(storage, Path(located["path"])), given_fields(config)
        wrong = await storage.in_thread(model_conflicts, folder, config, given, needs_weights=needs_weights)
        for conflict in wrong:
            found.refuse(f"config.{conflict.code}", "conflict", conflict.message)
        found.longest_sequence = await storage.in_thread(longest_sequence, folder)
    if loads_model:
        folder_here = await storage.in_thread(_folder_here, storage, located)
        if folder_here is not None and not creates_model(config):
            stored = stored_quantization(await storage.in_thread(folder_here.read_json, "config.json"))
            for problem in stored_quantization_conflicts(stored, config, trains=trains):
                found.refuse(f"config.{problem.field}", problem.code, problem.message)
            found.stored_quantization = stored
    if resolver.is_run(name):
        found.base_run_id = name


def _folder_here(storage: Storage, located: resolver.ModelLocation) -> ModelFolder | None:
    """Return the folder of a model on this machine, which for a hub model is in the hub's cache; None without one."""
    if located["path"] is not None:
        return ModelFolder(storage, Path(located["path"]))
    cached = cached_path(str(located["hub"]), located["revision"])
    return None if cached is None else ModelFolder(storage, cached.parent)


async def _check_reward_models(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    loads_model: bool,
    found: ValidationResult,
) -> None:
    refused = {error.field for error in found.errors}
    for field, reward in rewards_of(config):
        name, place = reward.get("model"), f"config.{field}.model"
        if reward.get("type") != "model" or not isinstance(name, str) or place in refused:
            continue
        is_run = resolver.is_run(name)
        if not loads_model and not is_run:
            continue
        try:
            output_attempt = await _output_attempt(session, name, "reward") if is_run else None
            await release(session)
            located = await storage.in_thread(resolver.locate, settings, storage, name, output_attempt)
        except resolver.BaseModelError as error:
            found.refuse(place, error.code, error.message)
            continue
        path = located["path"]
        folder = None if path is None else ModelFolder(storage, Path(path))
        if folder is not None and await storage.in_thread(is_reward_model, folder) is False:
            found.refuse(
                place,
                "not_a_reward_model",
                f"{name[:100]!r} generates text and returns no score; use a run of method `reward`, or a model for "
                "sequence classification",
            )
            continue
        config_here = {} if folder is None else await storage.in_thread(folder.read_json, "config.json")
        if (stored := stored_quantization(config_here)) is not None and not stored.is_supported:
            found.refuse(
                place,
                "not_supported",
                f"{name[:100]!r} is stored {stored.text}, which cannot be loaded here; name the model from which it "
                "was quantized",
            )
        elif is_run and name not in found.reward_run_ids:
            found.reward_run_ids.append(name)


async def lock_models(session: AsyncSession, config: Mapping[str, Any], found: ValidationResult) -> list[FieldError]:
    """Lock the runs whose outputs a valid configuration uses against deletion; return an error for each deleted one."""
    errors = []
    used: list[tuple[str, str, Literal["base", "reward"]]] = []
    if found.base_run_id is not None:
        used.append(("base_model", found.base_run_id, "base"))
    used += [
        (f"{field}.model", reward["model"], "reward")
        for field, reward in rewards_of(config)
        if reward.get("model") in found.reward_run_ids
    ]
    for field, run_id, role in used:
        try:
            await _output_attempt(session, run_id, role)
        except resolver.BaseModelError as error:
            errors.append(FieldError(field=f"config.{field}", code=error.code, message=error.message))
    return errors


async def _output_attempt(session: AsyncSession, run_id: str, role: Literal["base", "reward"]) -> int | None:
    query = select(Run.status, Run.output_attempt, Run.method).where(Run.id == run_id)
    run = (await session.execute(query.with_for_update(read=True, key_share=True))).one_or_none()
    if run is None:
        raise resolver.BaseModelError(
            f"{role}_run_not_found", f"There is no run {run_id}; GET /v1/runs?status=completed lists usable runs."
        )
    if run.status != "completed":
        raise resolver.BaseModelError(
            f"{role}_run_not_completed",
            f"Run {run_id} is {run.status}, not completed; "
            + ("resume it, or" if run.status in ("failed", "cancelled") else "wait until it is, or")
            + " use another model.",
        )
    if role == "reward" and not method_of({"method": run.method}).has_reward_head:
        raise resolver.BaseModelError(
            "not_a_reward_model",
            f"Run {run_id} was trained with method `{run.method}`; use a run of method `reward`.",
        )
    attempt: int | None = run.output_attempt
    return attempt
