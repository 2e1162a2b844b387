"""Validation of a request for a run: reports all errors at once, before anything is written."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import release
from app.api.errors import dataset_not_found
from app.config import Settings
from app.contracts.errors import FieldError
from app.contracts.methods import EVALUATION_METRICS
from app.contracts.run_task import RunTask
from app.contracts.schemas.runs.requests import RunCreate
from app.contracts.training_config.fields import TrainingConfig
from app.contracts.training_config.raw_config import given_fields, named_fields, normalize_numbers
from app.contracts.training_config.resolution import resolve
from app.contracts.training_config.rules import DeviceCapabilities
from app.infra.storage import Storage
from app.runs.plan import RunPlan
from app.runs.validation.backends import backend_problems, shown_backends
from app.runs.validation.config import about_config, config_problems, default_warnings, unusual_warnings
from app.runs.validation.dataset import data_problems
from app.runs.validation.destinations import destination_problems
from app.runs.validation.models import check_base_model, check_reward_models, lock_models
from app.runs.validation.packages import package_problems
from app.runs.validation.plugins import plugin_problems
from app.runs.validation.resources import (
    check_resources,
    fixed_resources,
    is_divided,
    label_problems,
    placement_problems,
)
from app.runs.validation.result import ValidationResult, validation_failed
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.workers.queries import is_any_online, online, online_machines


async def validate_request(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    request: RunCreate,
    wrong_rewards: Sequence[FieldError],
    *,
    needs_weights: bool = True,
    has_known_gpu: bool = False,
    task: RunTask = RunTask.train,
) -> ValidationResult:
    """Validate a whole request, in several transactions: no connection is held while a thread works.

    The rows that it refers to may be deleted meanwhile; `lock_references` locks them before they are used.
    `wrong_rewards` is the result of `reward_problems`. Without `needs_weights`, the weights of the base model may be
    missing. With `has_known_gpu`, the run is for a GPU that no worker need have. A run that evaluates does so on its
    dataset.
    """
    has_eval_dataset = request.eval_dataset_id is not None or task is RunTask.evaluate
    found = ValidationResult()
    backends = shown_backends(settings)
    rules = backends.get(request.backend)
    if rules is None:
        names = ", ".join(f"`{name}`" for name in sorted(backends))
        found.refuse("backend", "unknown_backend", f"unknown backend; choose one of {names}")
    else:
        found.errors += backend_problems(settings, rules, request.resources)
        if request.resources.devices != "all" and not has_known_gpu:
            asked_for = request.resources.with_devices(request.resources.devices)
            found.errors += await placement_problems(session, settings, rules, asked_for)
        found.errors += await label_problems(session, rules, request.resources)
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, found)
    datasets = {place: await _dataset(session, place, id, found) for place, id in _dataset_ids(request).items()}
    for place, item in datasets.items():
        found.errors += data_problems(request.config, place, item, splits=rules is None or rules.loads_model)
    config = normalize_numbers(request.config)
    _check_extra_eval_datasets(request, has_eval_dataset or bool(config.get("eval_split")), found)
    dataset = datasets.get("dataset_id")
    wants_gpu = has_known_gpu or request.resources.kind == "cuda" or request.resources.gpu is not None
    machines = await online_machines(session, settings, request.backend, rules, wants_gpu=wants_gpu)
    data_format = dataset.format if dataset else None
    # In a thread, here and below: a configuration of a megabyte takes a while, which must not block other requests.
    await release(session)
    wrong, machine = await asyncio.to_thread(
        config_problems, rules, request.config, has_eval_dataset, data_format, machines
    )
    wrong += wrong_rewards
    reported = {problem.field for problem in wrong}
    wrong += [one for one in await destination_problems(session, settings, request.config) if one.field not in reported]
    if rules is not None and rules.options is None:
        for check in (plugin_problems, package_problems):
            refused, warned = await check(session, online(settings, request.backend), request.config)
            wrong += [one for one in refused if one.field not in reported]
            found.warnings += [about_config(problem) for problem in warned]
    found.errors += [about_config(problem) for problem in wrong]
    trains = task is RunTask.train
    await check_base_model(session, settings, storage, config, rules, found, needs_weights=needs_weights, trains=trains)
    await check_reward_models(session, settings, storage, request.config, rules, found)
    if rules is not None and not rules.starts_workers and not await is_any_online(session, settings, request.backend):
        found.warnings.append(
            FieldError(
                field="backend",
                code="no_worker_online",
                message=f"No worker of backend `{request.backend}` is online: the run waits until one starts, "
                "and settings that depend on its device are checked then.",
            )
        )
    if not found.errors and rules is not None:
        asked = TrainingConfig.model_validate(dict(request.config))
        given = given_fields(request.config)
        resources, wrong = await fixed_resources(session, settings, rules, asked, given, request.resources)
        found.resources = resources
        found.errors += wrong
        if request.resources.devices == "all" and not wrong:
            found.errors += await placement_problems(session, settings, rules, resources)
        plan = RunPlan(
            backend=request.backend, config=asked, user_set_fields=frozenset(given), resources=resources, task=task
        )
        found.errors += await check_resources(session, settings, storage, plan)
    if not found.errors:
        await release(session)
        ignored = await asyncio.to_thread(default_warnings, rules, request.config, has_eval_dataset, data_format)
        found.warnings += [about_config(problem) for problem in ignored]
        await asyncio.to_thread(_resolve, request.config, machine, found, is_divided(found.resources), data_format)
    return found


async def lock_references(session: AsyncSession, request: RunCreate, valid: ValidationResult) -> None:
    """Lock the rows that a valid request refers to against deletion until the commit.

    Raises 422 for those that were deleted since the validation.
    """
    found = ValidationResult()
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, found)
    for place, dataset_id in _dataset_ids(request).items():
        await _dataset(session, place, dataset_id, found)
    found.errors += await lock_models(session, request.config, valid)
    if found.errors:
        raise validation_failed(found.errors)


def _dataset_ids(request: RunCreate) -> dict[str, str]:
    """Return the ids of the datasets of a request, by the fields that name them."""
    # An estimate may have the size of a dataset instead.
    ids = {} if request.dataset_id is None else {"dataset_id": request.dataset_id}
    if request.eval_dataset_id is not None:
        ids["eval_dataset_id"] = request.eval_dataset_id
    return ids | {f"extra_eval_datasets.{name}": id for name, id in request.extra_eval_datasets.items()}


async def _check_experiment(session: AsyncSession, experiment_id: str, found: ValidationResult) -> None:
    query = select(Experiment.id).where(Experiment.id == experiment_id)
    if await session.scalar(query.with_for_update(read=True, key_share=True)) is None:
        found.refuse(
            "experiment_id",
            "experiment_not_found",
            "there is no such experiment; create one with POST /v1/experiments, or leave the field out to use the "
            "default one",
        )


async def _dataset(session: AsyncSession, name: str, dataset_id: str, found: ValidationResult) -> Dataset | None:
    query = select(Dataset).where(Dataset.id == dataset_id).with_for_update(read=True, key_share=True)
    dataset = await session.scalar(query)
    if dataset is None:
        found.errors.append(dataset_not_found(name, dataset_id))
    return dataset


def _check_extra_eval_datasets(request: RunCreate, has_eval_data: bool, found: ValidationResult) -> None:
    """Check what the datasets themselves do not determine: their names, and that there is main evaluation data."""
    for name in request.extra_eval_datasets:
        if name in EVALUATION_METRICS:
            message = (
                f"`{name}` is the name of a metric, so `eval_{name}_loss` would be misleading; choose another name"
            )
            found.refuse(f"extra_eval_datasets.{name}", "reserved_name", message)
    if request.extra_eval_datasets and not has_eval_data:
        message = (
            "are evaluated beside the evaluation data that decides about the best checkpoint and early stopping, and "
            "there is none; set `eval_dataset_id` or `eval_split`"
        )
        found.refuse("extra_eval_datasets", "needs_eval_data", message)


def _resolve(
    config: Mapping[str, Any],
    machine: DeviceCapabilities | None,
    found: ValidationResult,
    sharded: bool,
    dataset_format: str | None,
) -> None:
    given = given_fields(config)
    found.config = TrainingConfig.model_validate(dict(config))
    found.given = sorted(given)
    named = named_fields(config)
    found.warnings += unusual_warnings(found.config)
    effective = resolve(
        found.config, given, machine, found.longest_sequence, sharded=sharded, dataset_format=dataset_format,
        stored=found.stored_quantization,
    )  # fmt: skip
    found.effective = effective.config
    found.warnings += [
        FieldError(
            field=f"config.{item.field}",
            code="replaced",
            message=f"`{item.field}` will be {_shown(item.used)} instead of {_shown(item.requested)}: {item.reason}",
        )
        for item in effective.replaced
        if item.field in named  # `effective_config` shows the others, which the request does not name
    ]


def _shown(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower()
