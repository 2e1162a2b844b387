"""Validation of base models and reward models."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import method_of, rewards_of
from anneal.contracts.training_config.masked_model import masked_model_warning
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.stored_quantization import stored_quantization, stored_quantization_conflicts
from app.api.dependencies import release_connection
from app.base_models import resolver, sources
from app.base_models.compatibility import (
    creates_model,
    is_reward_model,
    longest_sequence,
    model_conflicts,
    tokenizer_conflict,
)
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates import hub_config
from app.runs.creating.estimates.hub_config import HubConfig, cached_path
from app.runs.creating.estimates.model_config import NoConfig, base_of, parse_config
from app.runs.creating.validation.result import ValidationResult
from app.tables.runs import Run
from app.workers.queries import all_look_for_models_in


async def check_base_model(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    rules: BackendRules | None,
    validation: ValidationResult,
    *,
    needs_weights: bool,
    trains: bool,
) -> None:
    """Check that the base model can be had, and that it fits the configuration.

    Without `needs_weights`, a model is accepted that no worker can load yet.
    """
    loads_model = rules is None or rules.loads_model
    name = config.get("base_model")
    if not isinstance(name, str) or any(error.field == "config.base_model" for error in validation.errors):
        return
    if not loads_model and not resolver.is_run(name):
        return
    try:
        output_attempt = await _output_attempt(session, name, "base") if resolver.is_run(name) else None
        await release_connection(session)
        # In a thread: a storage that hangs must not block the event loop.
        located = await storage.in_thread(resolver.locate_model, settings, storage, name, output_attempt)
    except resolver.BaseModelError as error:
        validation.add_error("config.base_model", error.code, error.message)
        return
    fetched: dict[str, Any] = {}
    if loads_model and needs_weights and not creates_model(config):
        revision = config.get("revision")
        fetched = await _check_hub_model(
            session, settings, storage, "config.base_model", located, revision if isinstance(revision, str) else None,
            rules, validation,
        )  # fmt: skip
    if loads_model and located["path"] is not None:
        folder, user_set_fields = ModelFolder(storage, Path(located["path"])), given_fields(config)
        wrong = await storage.in_thread(model_conflicts, folder, config, user_set_fields, needs_weights=needs_weights)
        for conflict in wrong:
            validation.add_error(f"config.{conflict.code}", "conflict", conflict.message)
        validation.longest_sequence = await storage.in_thread(longest_sequence, folder)
    if loads_model:
        folder_here = await storage.in_thread(_folder_here, storage, located)
        if (folder_here is not None or fetched) and not creates_model(config):
            described = await storage.in_thread(folder_here.read_json, "config.json") if folder_here else fetched
            stored = stored_quantization(described)
            if (warning := masked_model_warning(described.get("architectures"), method_of(config))) is not None:
                validation.warnings.append(FieldError(field="config.base_model", code="masked_model", message=warning))
            for problem in stored_quantization_conflicts(stored, config, trains=trains):
                validation.add_error(f"config.{problem.field}", problem.code, problem.message)
            validation.stored_quantization = stored
        await _check_tokenizer(settings, storage, config, folder_here, validation)
    if resolver.is_run(name):
        validation.base_run_id = name


async def _check_hub_model(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    field: str,
    located: resolver.ModelLocation,
    revision: str | None,
    rules: BackendRules | None,
    validation: ValidationResult,
) -> dict[str, Any]:
    """Refuse a model of the hub, also as the base of an adapter, that no worker can have; warn if one may have it.

    Return its config.json if it was fetched from the hub. What a worker has on its own machine is not known here,
    unless it looks for models in the same places.
    """
    name = located["hub"]
    if located["path"] is not None:
        try:
            folder = ModelFolder(storage, Path(located["path"]))
            base = await storage.in_thread(base_of, folder, settings, storage)
        except NoConfig:  # the worker says what is missing
            return {}
        name, revision = (base, None) if isinstance(base, str) and resolver.is_hub_name(base) else (None, None)
    if name is None:
        return {}
    answer = await hub_config.fetch_hub_config(session, settings, name, revision)
    if answer is None:
        return {}
    if answer.content is not None:
        # An adapter's own configuration is compared with that of its base by the trainer.
        return parse_config(answer.content) if located["path"] is None else {}
    message = _missing_hub_model(settings, located["name"], name, answer)
    own = await asyncio.to_thread(sources.source_fingerprint, settings)
    backend = None if rules is None or rules.starts_workers or not answer.code else rules.capabilities.name
    if backend is not None and await all_look_for_models_in(session, settings, backend, own):
        validation.add_error(
            "config.revision" if answer.code == "hub_revision_not_found" else field, answer.code, message
        )
    else:
        text = f"{message}; a worker that has the model on its machine trains the run, and others fail it"
        validation.warnings.append(FieldError(field=field, code=answer.code or "hub_not_checked", message=text))
    return {}


def _missing_hub_model(settings: Settings, name: str, hub_name: str, answer: HubConfig) -> str:
    """Return the sentence about a model that the hub does not give."""
    if answer.code not in ("hub_not_allowed", "hub_offline", "hub_unreachable"):
        return answer.message or answer.reason.rstrip(".")
    what = f"the base model {hub_name!r} of the adapter" if name != hub_name else repr(hub_name)
    return (
        f"there is no folder {what} below {settings.models_folder}, none in the hub's cache, and {answer.message}: put "
        "the model there, use one of `anneal models list`, or make a small one with `anneal models create tiny`"
    )


async def _check_tokenizer(
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    base: ModelFolder | None,
    validation: ValidationResult,
) -> None:
    """Check the tokenizer of another model; with `base`, the folder of the base model, also whether it fits that."""
    name = config.get("tokenizer")
    if not isinstance(name, str) or any(error.field == "config.tokenizer" for error in validation.errors):
        return
    try:
        located = await storage.in_thread(resolver.locate_tokenizer, settings, storage, name)
    except resolver.BaseModelError as error:
        validation.add_error("config.tokenizer", error.code, error.message)
        return
    folder = await storage.in_thread(_folder_here, storage, located)
    if folder is None or base is None or creates_model(config):
        return
    if (why := await storage.in_thread(tokenizer_conflict, folder, base)) is not None:
        validation.add_error(
            "config.tokenizer", "conflict", f"is {name[:100]!r}, which does not fit the base model: {why}"
        )


def _folder_here(storage: Storage, located: resolver.ModelLocation) -> ModelFolder | None:
    """Return the folder of a model on this machine, which for a hub model is in the hub's cache; None without one."""
    if located["path"] is not None:
        return ModelFolder(storage, Path(located["path"]))
    cached = cached_path(str(located["hub"]), located["revision"])
    return None if cached is None else ModelFolder(storage, cached.parent)


async def check_reward_models(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    rules: BackendRules | None,
    validation: ValidationResult,
) -> None:
    """Check that the models of rewards can be had, and that they return a score."""
    loads_model = rules is None or rules.loads_model
    refused = {error.field for error in validation.errors}
    for field, reward in rewards_of(config):
        name, place = reward.get("model"), f"config.{field}.model"
        if reward.get("type") != "model" or not isinstance(name, str) or place in refused:
            continue
        is_run = resolver.is_run(name)
        if not loads_model and not is_run:
            continue
        try:
            output_attempt = await _output_attempt(session, name, "reward") if is_run else None
            await release_connection(session)
            located = await storage.in_thread(resolver.locate_model, settings, storage, name, output_attempt)
        except resolver.BaseModelError as error:
            validation.add_error(place, error.code, error.message)
            continue
        if loads_model:
            await _check_hub_model(session, settings, storage, place, located, None, rules, validation)
        path = located["path"]
        folder = None if path is None else ModelFolder(storage, Path(path))
        if folder is not None and await storage.in_thread(is_reward_model, folder) is False:
            validation.add_error(
                place,
                "not_a_reward_model",
                f"{name[:100]!r} generates text and returns no score; use a run of method `reward`, or a model for "
                "sequence classification",
            )
            continue
        config_here = {} if folder is None else await storage.in_thread(folder.read_json, "config.json")
        if (stored := stored_quantization(config_here)) is not None and not stored.is_supported:
            validation.add_error(
                place,
                "not_supported",
                f"{name[:100]!r} is stored {stored.text}, which cannot be loaded here; name the model from which it "
                "was quantized",
            )
        elif is_run and name not in validation.reward_run_ids:
            validation.reward_run_ids.append(name)


async def lock_models(
    session: AsyncSession, config: Mapping[str, Any], validation: ValidationResult
) -> list[FieldError]:
    """Lock the runs whose outputs a valid configuration uses against deletion; return an error for each deleted one."""
    errors = []
    used: list[tuple[str, str, Literal["base", "reward"]]] = []
    if validation.base_run_id is not None:
        used.append(("base_model", validation.base_run_id, "base"))
    used += [
        (f"{field}.model", reward["model"], "reward")
        for field, reward in rewards_of(config)
        if reward.get("model") in validation.reward_run_ids
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
