"""Validation of a request for a run: reports all errors at once, before anything is written."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import EVALUATION_METRICS
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields, named_fields, normalize_numbers
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.api.dependencies import release_connection
from app.api.errors import dataset_not_found
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.plan import RunPlan
from app.runs.creating.validation.backends import backend_problems, shown_backends
from app.runs.creating.validation.config import about_config, config_problems, default_warnings, unusual_warnings
from app.runs.creating.validation.dataset import data_problems
from app.runs.creating.validation.destinations import destination_problems
from app.runs.creating.validation.models import check_base_model, check_reward_models, lock_models
from app.runs.creating.validation.packages import package_problems
from app.runs.creating.validation.plugins import plugin_problems
from app.runs.creating.validation.resources import (
    check_resources,
    fixed_resources,
    is_divided,
    label_problems,
    placement_problems,
)
from app.runs.creating.validation.result import ValidationResult, validation_failed
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.workers.queries import is_any_online, online_conditions, online_machines


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
    validation = ValidationResult()
    backends = shown_backends(settings)
    rules = backends.get(request.backend)
    if rules is None:
        names = ", ".join(f"`{name}`" for name in sorted(backends))
        validation.add_error("backend", "unknown_backend", f"unknown backend; choose one of {names}")
    else:
        validation.errors += backend_problems(settings, rules, request.resources)
        if request.resources.devices != "all" and not has_known_gpu:
            asked_for = request.resources.with_devices(request.resources.devices)
            validation.errors += await placement_problems(session, settings, rules, asked_for)
        validation.errors += await label_problems(session, rules, request.resources)
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, validation)
    datasets = {
        place: await _lock_dataset(session, place, id, validation) for place, id in _dataset_ids(request).items()
    }
    for place, item in datasets.items():
        validation.errors += data_problems(request.config, place, item, splits=rules is None or rules.loads_model)
    config = normalize_numbers(request.config)
    _check_extra_eval_datasets(request, has_eval_dataset or bool(config.get("eval_split")), validation)
    dataset = datasets.get("dataset_id")
    wants_gpu = has_known_gpu or request.resources.kind == "cuda" or request.resources.gpu is not None
    machines = await online_machines(session, settings, request.backend, rules, wants_gpu=wants_gpu)
    data_format = dataset.format if dataset else None
    # In a thread, here and below: a configuration of a megabyte takes a while, which must not block other requests.
    await release_connection(session)
    wrong, machine = await asyncio.to_thread(
        config_problems, rules, request.config, has_eval_dataset, data_format, machines
    )
    wrong += wrong_rewards
    reported = {problem.field for problem in wrong}
    wrong += [one for one in await destination_problems(session, settings, request.config) if one.field not in reported]
    if rules is not None and rules.options is None:
        for check in (plugin_problems, package_problems):
            refused, warned = await check(session, online_conditions(settings, request.backend), request.config)
            wrong += [one for one in refused if one.field not in reported]
            validation.warnings += [about_config(problem) for problem in warned]
    validation.errors += [about_config(problem) for problem in wrong]
    trains = task is RunTask.train
    await check_base_model(
        session, settings, storage, config, rules, validation, needs_weights=needs_weights, trains=trains
    )
    await check_reward_models(session, settings, storage, request.config, rules, validation)
    if rules is not None and not rules.starts_workers and not await is_any_online(session, settings, request.backend):
        validation.warnings.append(
            FieldError(
                field="backend",
                code="no_worker_online",
                message=f"No worker of backend `{request.backend}` is online: the run waits until one starts, "
                "and settings that depend on its device are checked then.",
            )
        )
    if not validation.errors and rules is not None:
        run_config = TrainingConfig.model_validate(dict(request.config))
        user_set_fields = given_fields(request.config)
        resources, wrong = await fixed_resources(
            session, settings, rules, run_config, user_set_fields, request.resources
        )
        validation.resources = resources
        validation.errors += wrong
        if request.resources.devices == "all" and not wrong:
            validation.errors += await placement_problems(session, settings, rules, resources)
        plan = RunPlan(
            backend=request.backend,
            config=run_config,
            user_set_fields=frozenset(user_set_fields),
            resources=resources,
            task=task,
        )
        validation.errors += await check_resources(session, settings, storage, plan)
    if not validation.errors:
        await release_connection(session)
        ignored = await asyncio.to_thread(default_warnings, rules, request.config, has_eval_dataset, data_format)
        validation.warnings += [about_config(problem) for problem in ignored]
        await asyncio.to_thread(
            _resolve_config, request.config, machine, validation, is_divided(validation.resources), data_format
        )
    return validation


async def lock_references(session: AsyncSession, request: RunCreate, valid: ValidationResult) -> None:
    """Lock the rows that a valid request refers to against deletion until the commit.

    Raises 422 for those that were deleted since the validation.
    """
    validation = ValidationResult()
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, validation)
    for place, dataset_id in _dataset_ids(request).items():
        await _lock_dataset(session, place, dataset_id, validation)
    validation.errors += await lock_models(session, request.config, valid)
    if validation.errors:
        raise validation_failed(validation.errors)


def _dataset_ids(request: RunCreate) -> dict[str, str]:
    """Return the ids of the datasets of a request, by the fields that name them."""
    # An estimate may have the size of a dataset instead.
    ids = {} if request.dataset_id is None else {"dataset_id": request.dataset_id}
    if request.eval_dataset_id is not None:
        ids["eval_dataset_id"] = request.eval_dataset_id
    return ids | {f"extra_eval_datasets.{name}": id for name, id in request.extra_eval_datasets.items()}


async def _check_experiment(session: AsyncSession, experiment_id: str, validation: ValidationResult) -> None:
    query = select(Experiment.id).where(Experiment.id == experiment_id)
    if await session.scalar(query.with_for_update(read=True, key_share=True)) is None:
        validation.add_error(
            "experiment_id",
            "experiment_not_found",
            "there is no such experiment; create one with POST /v1/experiments, or leave the field out to use the "
            "default one",
        )


async def _lock_dataset(
    session: AsyncSession, name: str, dataset_id: str, validation: ValidationResult
) -> Dataset | None:
    query = select(Dataset).where(Dataset.id == dataset_id).with_for_update(read=True, key_share=True)
    dataset = await session.scalar(query)
    if dataset is None:
        validation.errors.append(dataset_not_found(name, dataset_id))
    return dataset


def _check_extra_eval_datasets(request: RunCreate, has_eval_data: bool, validation: ValidationResult) -> None:
    """Check what the datasets themselves do not determine: their names, and that there is main evaluation data."""
    for name in request.extra_eval_datasets:
        if name in EVALUATION_METRICS:
            message = (
                f"`{name}` is the name of a metric, so `eval_{name}_loss` would be misleading; choose another name"
            )
            validation.add_error(f"extra_eval_datasets.{name}", "reserved_name", message)
    if request.extra_eval_datasets and not has_eval_data:
        message = (
            "are evaluated beside the evaluation data that decides about the best checkpoint and early stopping, and "
            "there is none; set `eval_dataset_id` or `eval_split`"
        )
        validation.add_error("extra_eval_datasets", "needs_eval_data", message)


def _resolve_config(
    config: Mapping[str, Any],
    machine: DeviceCapabilities | None,
    validation: ValidationResult,
    sharded: bool,
    dataset_format: str | None,
) -> None:
    user_set_fields = given_fields(config)
    validation.config = TrainingConfig.model_validate(dict(config))
    validation.user_set_fields = sorted(user_set_fields)
    named = named_fields(config)
    validation.warnings += unusual_warnings(validation.config)
    effective = resolve_config(
        validation.config, user_set_fields, machine, validation.longest_sequence, sharded=sharded,
        dataset_format=dataset_format, stored=validation.stored_quantization,
    )  # fmt: skip
    validation.effective = effective.config
    validation.warnings += [
        FieldError(
            field=f"config.{item.field}",
            code="replaced",
            message=(
                f"`{item.field}` will be {_format_value(item.used)} instead of {_format_value(item.requested)}: "
                f"{item.reason}"
            ),
        )
        for item in effective.replaced
        if item.field in named  # `effective_config` shows the others, which the request does not name
    ]


def _format_value(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower()
