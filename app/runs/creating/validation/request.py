"""Validation of a request for a run: reports all errors at once, before anything is written."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import EVALUATION_METRICS, predict_options
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields, named_fields, normalize_numbers
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities, field_error
from app.api.dependencies import release_connection
from app.api.errors import dataset_not_found
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.plan import RunPlan
from app.runs.creating.validation.backends import backend_problems, shown_backends
from app.runs.creating.validation.config import about_config, config_problems, default_warnings, unusual_warnings
from app.runs.creating.validation.dataset import data_problems
from app.runs.creating.validation.destinations import destination_problems
from app.runs.creating.validation.models import ModelCheck, lock_models
from app.runs.creating.validation.packages import package_problems
from app.runs.creating.validation.plugins import plugin_problems
from app.runs.creating.validation.resources import (
    check_resources,
    label_problems,
    placement_problems,
    use_all_devices,
)
from app.runs.creating.validation.result import ValidationResult, validation_failed
from app.runs.creating.validation.rewards import reward_problems
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.workers.online import OnlineWorker, online_machines, read_online_workers


async def validate_request(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    request: RunCreate,
    *,
    needs_weights: bool = True,
    has_known_gpu: bool = False,
    task: RunTask = RunTask.train,
) -> ValidationResult:
    """Validate a whole request, in several transactions: no connection is held while a thread works.

    The rows that it refers to may be deleted meanwhile; `lock_references` locks them before they are used. Without
    `needs_weights`, the weights of the base model may be missing. With `has_known_gpu`, the run is for a GPU that no
    worker need have. A run that evaluates does so on its dataset.
    """
    rules = shown_backends(settings).get(request.backend)
    workers = [] if rules is None else await read_online_workers(session, settings, request.backend)
    check = _RequestCheck(session, settings, storage, request, task, rules, workers, has_known_gpu)
    result = check.result
    await check.check_placement()
    await check.check_data()
    await check.check_config()
    models = ModelCheck(session, settings, storage, normalize_numbers(request.config), rules, result)
    await models.check_base_model(needs_weights=needs_weights, trains=task is RunTask.train)
    await models.check_models_of_options()
    if rules is not None and not rules.starts_workers and not workers:
        message = (
            f"No worker of backend `{request.backend}` is online: the run waits until one starts, and settings that "
            "depend on its device are checked then."
        )
        result.warnings.append(FieldError(field="backend", code="no_worker_online", message=message))
    if not result.errors and rules is not None:
        await check.plan_run(rules)
    if result.plan is not None:
        await release_connection(session)
        await asyncio.to_thread(check.add_warnings, result.plan)
    return result


@dataclass
class _RequestCheck:
    """Checks of one request, in the order of their errors; each adds to the result."""

    session: AsyncSession
    settings: Settings
    storage: Storage
    request: RunCreate
    task: RunTask
    rules: BackendRules | None
    """None: there is no such backend."""
    workers: Sequence[OnlineWorker]
    has_known_gpu: bool
    result: ValidationResult = field(default_factory=ValidationResult)
    data_format: str | None = None
    """Format of the dataset; None: it does not exist, or has not been checked yet."""
    machine: DeviceCapabilities | None = None
    """First kind of device online that supports the configuration."""

    @property
    def has_eval_dataset(self) -> bool:
        """True if the run evaluates on a dataset of its own."""
        return self.request.eval_dataset_id is not None or self.task is RunTask.evaluate

    async def check_placement(self) -> None:
        """Check the backend, and the requested resources apart from the configuration."""
        result, rules, resources = self.result, self.rules, self.request.resources
        if rules is None:
            names = ", ".join(f"`{name}`" for name in sorted(shown_backends(self.settings)))
            result.add_error("backend", "unknown_backend", f"unknown backend; choose one of {names}")
        else:
            result.errors += backend_problems(self.settings, rules, resources)
            if resources.devices != "all" and not self.has_known_gpu:
                result.errors += placement_problems(self.workers, rules, resources.with_devices(resources.devices))
            if resources.labels:
                result.errors += await label_problems(self.session, rules, resources.labels)

    async def check_data(self) -> None:
        """Check the experiment and the datasets, and that they fit the configuration."""
        request, result = self.request, self.result
        if request.experiment_id is not None:
            await _check_experiment(self.session, request.experiment_id, result)
        datasets = {
            place: await _lock_dataset(self.session, place, dataset_id, result)
            for place, dataset_id in _dataset_ids(request).items()
        }
        splits = self.rules is None or self.rules.loads_model
        for place, dataset in datasets.items():
            if dataset is not None:
                result.errors += data_problems(request.config, place, dataset, splits)
        has_eval_split = bool(normalize_numbers(request.config).get("eval_split"))
        _check_extra_eval_datasets(request, self.has_eval_dataset or has_eval_split, result)
        if (dataset := datasets.get("dataset_id")) is not None:
            self.data_format = dataset.format

    async def check_config(self) -> None:
        """Check the configuration, and that workers and this server have what it names."""
        config, result, resources = self.request.config, self.result, self.request.resources
        wants_gpu = self.has_known_gpu or resources.kind == "cuda" or resources.gpu is not None
        machines = online_machines(self.workers, self.rules, wants_gpu=wants_gpu)
        # In a thread, also below: a configuration of a megabyte takes a while, which must not block other requests.
        await release_connection(self.session)
        errors, self.machine = await asyncio.to_thread(
            config_problems, self.rules, config, self.has_eval_dataset, self.data_format, machines
        )
        if self.task is not RunTask.predict and predict_options(config) is not None:
            errors.append(field_error("extra.predict", "conflict", "is for predictions: send it to /v1/runs/predict"))
        errors += await reward_problems(self.settings, config)
        reported = {problem.field for problem in errors}
        missing = await destination_problems(self.session, self.settings, config)
        if self.rules is not None and self.rules.options is None:
            for check in (plugin_problems, package_problems):
                refused, warned = check(self.workers, config)
                missing += refused
                result.warnings += [about_config(problem) for problem in warned]
        errors += [problem for problem in missing if problem.field not in reported]
        result.errors += [about_config(problem) for problem in errors]

    async def plan_run(self, rules: BackendRules) -> None:
        """Plan the run, and check its resources; for a request that is valid otherwise."""
        request, result = self.request, self.result
        config, set_fields = TrainingConfig.model_validate(request.config), given_fields(request.config)
        devices = request.resources.devices
        plan = RunPlan(
            backend=request.backend,
            config=config,
            user_set_fields=frozenset(set_fields),
            resources=request.resources.with_devices(1 if devices == "all" else devices),
            task=self.task,
            dataset_id=request.dataset_id,
            eval_dataset_id=request.eval_dataset_id,
            extra_eval_datasets=request.extra_eval_datasets,
            base_run_id=result.base_run_id,
            reward_run_ids=result.reward_run_ids,
        )
        errors = list[FieldError]()
        if devices == "all":
            plan, errors = await use_all_devices(self.session, self.settings, self.workers, plan)
            if not errors:
                errors += placement_problems(self.workers, rules, plan.resources)
        errors += await check_resources(self.session, self.settings, self.storage, plan)
        result.errors += errors
        result.plan = None if errors else plan

    def add_warnings(self, plan: RunPlan) -> None:
        """Resolve the configuration for the machines that are online, and warn of what is unusual or replaced."""
        result, named = self.result, named_fields(self.request.config)
        ignored = default_warnings(self.rules, self.request.config, self.has_eval_dataset, self.data_format)
        effective = resolve_config(
            plan.config, plan.user_set_fields, self.machine, result.longest_sequence, sharded=plan.requires_sharding,
            dataset_format=self.data_format, stored=result.stored_quantization,
        )  # fmt: skip
        result.effective = effective.config
        result.warnings += [about_config(problem) for problem in ignored]
        result.warnings += unusual_warnings(plan.config)
        result.warnings += [
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


async def lock_references(session: AsyncSession, request: RunCreate, plan: RunPlan) -> None:
    """Lock the rows that a valid request refers to against deletion until the commit.

    Raises 422 for those that were deleted since the validation.
    """
    # Runs first, as the deletion of an experiment locks them: neither then waits for the other.
    validation = ValidationResult(errors=await lock_models(session, request.config, plan))
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, validation)
    for place, dataset_id in _dataset_ids(request).items():
        await _lock_dataset(session, place, dataset_id, validation)
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


def _format_value(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower()
