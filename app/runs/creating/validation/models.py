"""Validation of the models that a configuration names: the base model, reward models, a teacher."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import ModelRole, method_of, models_of
from anneal.contracts.run_task import RunTask
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
    teacher_conflict,
    tokenizer_conflict,
)
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates import hub_config
from app.runs.creating.estimates.hub_config import HubConfig, cached_path
from app.runs.creating.estimates.model_config import NoConfig, base_of, parse_config
from app.runs.creating.plan import RunPlan
from app.runs.creating.validation.result import ValidationResult
from app.runs.state.service import lock_runs
from app.tables.runs import Run
from app.workers.online import OnlineWorker, read_online_workers

_Role = Literal["base"] | ModelRole


@dataclass
class ModelCheck:
    """Checks of the models that a configuration names; each adds to the validation."""

    session: AsyncSession
    settings: Settings
    storage: Storage
    config: Mapping[str, Any]
    rules: BackendRules | None
    """None: there is no such backend."""
    validation: ValidationResult
    _base_folder: ModelFolder | None = field(default=None, init=False)
    """Folder of the base model, if it is on this machine."""

    @property
    def loads_model(self) -> bool:
        """True if the backend loads the models."""
        return self.rules is None or self.rules.loads_model

    async def check_base_model(self, *, needs_weights: bool, trains: bool) -> None:
        """Check that the base model can be had, and that it fits the configuration.

        Without `needs_weights`, a model is accepted that no worker can load yet.
        """
        name, validation = self.config.get("base_model"), self.validation
        if not isinstance(name, str) or validation.has_error("config.base_model"):
            return
        located = await self._locate(name, "config.base_model", "base")
        if located is None:
            return
        if resolver.is_run(name):
            validation.base_run_id = name
        if not self.loads_model:
            return
        fetched: dict[str, Any] = {}
        creates = creates_model(self.config)
        if needs_weights and not creates:
            revision = self.config.get("revision")
            fetched = await self._check_hub_model(
                "config.base_model", located, revision if isinstance(revision, str) else None
            )
        folder = await self.storage.in_thread(_folder_here, self.storage, located)
        self._base_folder = folder
        if folder is not None and located["path"] is not None:
            await self._check_files(folder, needs_weights=needs_weights)
        if (folder is not None or fetched) and not creates:
            model_config = await self.storage.in_thread(folder.read_json, "config.json") if folder else fetched
            self._check_model_config(model_config, trains=trains)
        tokenizer = self.config.get("tokenizer")
        if isinstance(tokenizer, str) and not validation.has_error("config.tokenizer"):
            await self._check_tokenizer(tokenizer, None if creates else folder)

    async def check_models_of_options(self) -> None:
        """Check that the models that the options of the method name can be had, and that they fit their role."""
        validation = self.validation
        refused = {error.field for error in validation.errors}
        for option, name, role in models_of(self.config):
            place = f"config.{option}"
            if place in refused:
                continue
            located = await self._locate(name, place, role)
            if located is None:
                continue
            if self.loads_model:
                await self._check_hub_model(place, located, None)
            path = located["path"]
            folder = None if path is None else ModelFolder(self.storage, Path(path))
            if folder is not None and not await self._check_role(place, folder, name, role):
                continue
            model_config = {} if folder is None else await self.storage.in_thread(folder.read_json, "config.json")
            if (stored := stored_quantization(model_config)) is not None and not stored.is_supported:
                validation.add_error(
                    place,
                    "not_supported",
                    f"{name[:100]!r} is stored {stored.text}, which cannot be loaded here; name the model from which "
                    "it was quantized",
                )
            elif resolver.is_run(name) and name not in validation.reward_run_ids:
                validation.reward_run_ids.append(name)

    async def _check_role(self, field: str, folder: ModelFolder, name: str, role: ModelRole) -> bool:
        """Check that a model on this machine fits its role; return False if it does not."""
        validation, scores = self.validation, await self.storage.in_thread(is_reward_model, folder)
        base = self._base_folder if role == "teacher" and self.config.get("tokenizer") is None else None
        if role == "reward" and scores is False:
            validation.add_error(
                field,
                "not_a_reward_model",
                f"{name[:100]!r} generates text and returns no score; use a run of method `reward`, or a model for "
                "sequence classification",
            )
        elif role == "teacher" and scores is True:
            message = f"{name[:100]!r} returns a score and no text; name a model that generates text"
            validation.add_error(field, "not_a_teacher", message)
        elif base is not None and (why := await self.storage.in_thread(teacher_conflict, folder, base)) is not None:
            message = (
                f"is {name[:100]!r}, which has another tokenizer: {why}; name a teacher of the same family of models"
            )
            validation.add_error(field, "other_tokenizer", message)
        else:
            return True
        return False

    async def _locate(self, name: str, field: str, role: _Role) -> resolver.ModelLocation | None:
        """Return where a model is; None if that is refused, or if the backend does not load it."""
        is_run = resolver.is_run(name)
        if not self.loads_model and not is_run:
            return None
        try:
            output_attempt = await _output_attempt(self.session, name, role) if is_run else None
            await release_connection(self.session)
            # In a thread: a storage that hangs must not block the event loop.
            return await self.storage.in_thread(
                resolver.locate_model, self.settings, self.storage, name, output_attempt
            )
        except resolver.BaseModelError as error:
            self.validation.add_error(field, error.code, error.message)
            return None

    async def _check_hub_model(
        self, field: str, located: resolver.ModelLocation, revision: str | None
    ) -> dict[str, Any]:
        """Refuse a model of the hub, also as the base of an adapter, that no worker can have; warn if one may have it.

        Return its config.json if it was fetched from the hub. What a worker has on its own machine is not known here,
        unless it looks for models in the same places.
        """
        name = located["hub"]
        if located["path"] is not None:
            try:
                folder = ModelFolder(self.storage, Path(located["path"]))
                base = await self.storage.in_thread(base_of, folder, self.settings, self.storage)
            except NoConfig:  # the worker says what is missing
                return {}
            name, revision = (base, None) if isinstance(base, str) and resolver.is_hub_name(base) else (None, None)
        answer = None
        if name is not None:
            answer = await hub_config.fetch_hub_config(self.session, self.settings, name, revision)
        if name is None or answer is None:
            return {}
        if answer.content is not None:
            # An adapter's own configuration is compared with that of its base by the trainer.
            return parse_config(answer.content) if located["path"] is None else {}
        await self._report_missing(field, _missing_hub_model(self.settings, located["name"], name, answer), answer.code)
        return {}

    async def _report_missing(self, field: str, message: str, code: str) -> None:
        """Add an error about a model that the hub does not give, or a warning if a worker may have it."""
        rules, workers = self.rules, list[OnlineWorker]()
        own = await asyncio.to_thread(sources.source_fingerprint, self.settings)
        if rules is not None and not rules.starts_workers and code:
            workers = await read_online_workers(self.session, self.settings, rules.capabilities.name)
        if own is not None and {worker.model_sources for worker in workers} == {own}:
            self.validation.add_error("config.revision" if code == "hub_revision_not_found" else field, code, message)
        else:
            text = f"{message}; a worker that has the model on its machine trains the run, and others fail it"
            self.validation.warnings.append(FieldError(field=field, code=code or "hub_not_checked", message=text))

    async def _check_files(self, folder: ModelFolder, *, needs_weights: bool) -> None:
        """Check that a model on this machine fits the configuration."""
        set_fields = given_fields(self.config)
        conflicts = await self.storage.in_thread(
            model_conflicts, folder, self.config, set_fields, needs_weights=needs_weights
        )
        for conflict in conflicts:
            self.validation.add_error(f"config.{conflict.code}", "conflict", conflict.message)
        self.validation.longest_sequence = await self.storage.in_thread(longest_sequence, folder)

    def _check_model_config(self, model_config: Mapping[str, Any], *, trains: bool) -> None:
        """Check what a model's config.json says about its kind and its quantization."""
        stored = stored_quantization(model_config)
        if (warning := masked_model_warning(model_config.get("architectures"), method_of(self.config))) is not None:
            self.validation.warnings.append(FieldError(field="config.base_model", code="masked_model", message=warning))
        for problem in stored_quantization_conflicts(stored, self.config, trains=trains):
            self.validation.add_error(f"config.{problem.field}", problem.code, problem.message)
        self.validation.stored_quantization = stored

    async def _check_tokenizer(self, name: str, base: ModelFolder | None) -> None:
        """Check the tokenizer of another model, and whether it fits the base model, if its folder is known."""
        storage = self.storage
        try:
            located = await storage.in_thread(resolver.locate_tokenizer, self.settings, storage, name)
        except resolver.BaseModelError as error:
            self.validation.add_error("config.tokenizer", error.code, error.message)
            return
        folder = await storage.in_thread(_folder_here, storage, located)
        if folder is None or base is None:
            return
        if (why := await storage.in_thread(tokenizer_conflict, folder, base)) is not None:
            message = f"is {name[:100]!r}, which does not fit the base model: {why}"
            self.validation.add_error("config.tokenizer", "conflict", message)


async def lock_models(session: AsyncSession, config: Mapping[str, Any], plan: RunPlan) -> list[FieldError]:
    """Lock the runs whose outputs a valid configuration uses against deletion; return an error for each deleted one."""
    errors = []
    used: list[tuple[str, str, _Role]] = []
    if plan.base_run_id is not None:
        used.append(("base_model", plan.base_run_id, "base"))
    used += [(name, run_id, role) for name, run_id, role in models_of(config) if run_id in plan.reward_run_ids]
    await lock_runs(session, {run_id for _, run_id, _ in used}, for_child=True)
    for name, run_id, role in used:
        try:
            await _output_attempt(session, run_id, role)
        except resolver.BaseModelError as error:
            errors.append(FieldError(field=f"config.{name}", code=error.code, message=error.message))
    return errors


async def _output_attempt(session: AsyncSession, run_id: str, role: _Role) -> int | None:
    query = select(Run.status, Run.output_attempt, Run.method, Run.task).where(Run.id == run_id)
    run = (await session.execute(query)).one_or_none()
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
    if run.task in (RunTask.predict, RunTask.serve):
        raise resolver.BaseModelError(
            "not_a_model", f"Run {run_id} only answers (task `{run.task}`); use the model that it has used."
        )
    if role == "reward" and not method_of({"method": run.method}).has_reward_head:
        raise resolver.BaseModelError(
            "not_a_reward_model",
            f"Run {run_id} was trained with method `{run.method}`; use a run of method `reward`.",
        )
    if role == "teacher" and method_of({"method": run.method}).has_reward_head:
        raise resolver.BaseModelError(
            "not_a_teacher", f"Run {run_id} has trained a reward model; use a run whose model generates text."
        )
    attempt: int | None = run.output_attempt
    return attempt


def _missing_hub_model(settings: Settings, name: str, hub_name: str, answer: HubConfig) -> str:
    """Return the sentence about a model that the hub does not give."""
    if answer.code not in ("hub_not_allowed", "hub_offline", "hub_unreachable"):
        return answer.message or answer.reason.rstrip(".")
    what = f"the base model {hub_name!r} of the adapter" if name != hub_name else repr(hub_name)
    return (
        f"there is no folder {what} below {settings.models_folder}, none in the hub's cache, and {answer.message}: put "
        "the model there, use one of `anneal models list`, or make a small one with `anneal models create tiny`"
    )


def _folder_here(storage: Storage, located: resolver.ModelLocation) -> ModelFolder | None:
    """Return the folder of a model on this machine, which for a hub model is in the hub's cache; None without one."""
    if located["path"] is not None:
        return ModelFolder(storage, Path(located["path"]))
    cached = cached_path(str(located["hub"]), located["revision"])
    return None if cached is None else ModelFolder(storage, cached.parent)
