"""Validation of a request for a run: reports all errors at once, before anything is written."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import release
from app.api.errors import dataset_not_found
from app.config import Settings
from app.contracts.backends import BACKEND_RULES, BackendRules
from app.contracts.errors import FieldError
from app.contracts.methods import EVALUATION_METRICS
from app.contracts.run_task import RunTask
from app.contracts.schemas.runs.placement import MOST_DEVICES, ResourceRequest, Resources, name_words
from app.contracts.schemas.runs.requests import RunCreate
from app.contracts.training_config.fields import TrainingConfig
from app.contracts.training_config.raw_config import given_fields, named_fields, normalize_numbers
from app.contracts.training_config.resolution import resolve
from app.contracts.training_config.rules import DeviceCapabilities, machine_conflicts, sharding_obstacles
from app.infra.storage import Storage
from app.runs.queue.fit import Needs, pending_reason
from app.runs.scheduler.fleet import read_fleet
from app.runs.validation.config import about_config, config_problems, default_warnings, unusual_warnings
from app.runs.validation.dataset import data_problems
from app.runs.validation.destinations import destination_problems
from app.runs.validation.expert_parallel import expert_parallel_problems
from app.runs.validation.models import check_base_model, check_reward_models, lock_models
from app.runs.validation.packages import package_problems
from app.runs.validation.plugins import plugin_problems
from app.runs.validation.result import ValidationResult, validation_failed
from app.runs.validation.sequence_parallel import sequence_parallel_problems
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.workers.queries import device_counts, gpu_names, is_any_online, known_labels, online, online_machines

_MOST_NAMED = 10


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
        found.errors += wrong + resource_problems(rules, asked, given, resources)
        if request.resources.devices == "all" and not wrong:
            found.errors += await placement_problems(session, settings, rules, resources)
        found.errors += sharding_problems(asked, given, resources)
        found.errors += shared_file_problems(settings, asked, resources)
        found.errors += await sequence_parallel_problems(session, settings, storage, asked, resources)
        found.errors += await expert_parallel_problems(session, settings, storage, asked, resources)
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


def requirements(
    rules: BackendRules,
    config: TrainingConfig,
    given: Iterable[str],
    resources: Resources,
    least: Mapping[str, int],
    *,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return the requirements on a device from the request, the configuration and the estimate.

    `least` is the estimated memory by kind of device, in MiB; empty if it is not known. `sharded` is the decision
    whether the model is divided among the devices.
    """
    kind = _kind(rules, config, given, resources)
    found: dict[str, Any] = {
        "kind": kind,
        "gpu": name_words(resources.gpu).strip() if resources.gpu is not None else None,
        "memory_mb": resources.memory_mb,
        "estimated_mb": {name: mb for name, mb in least.items() if kind in (None, name)},
        "labels": sorted(set(resources.labels)),
        "sharded": sharded,
        "sequence_parallel": resources.sequence_parallel if resources.sequence_parallel > 1 else None,
        "expert_parallel": resources.expert_parallel if resources.expert_parallel > 1 else None,
        "gguf": rules.loads_model and config.gguf is not None,
        "prefers_gpu": rules.machine_matters and kind is None,
    }
    return {name: value for name, value in found.items() if value not in (None, [], {}, False)}


async def fixed_resources(
    session: AsyncSession,
    settings: Settings,
    rules: BackendRules,
    config: TrainingConfig,
    given: Iterable[str],
    asked: ResourceRequest,
) -> tuple[Resources, list[FieldError]]:
    """Return the resources with a number of devices, and the reason why there is none for `all`."""
    if asked.devices != "all":
        return asked.with_devices(asked.devices), []
    kind = _kind(rules, config, given, asked)
    backend, hosts = rules.capabilities.name, asked.hosts
    counts = await device_counts(session, settings, backend, kind, asked, joining=hosts > 1)
    enough = {kind: each[hosts - 1] for kind, each in counts.items() if len(each) >= hosts}
    if enough:
        # A CPU takes a run of no certain kind only where the backend has no GPU.
        prefers_gpu = rules.machine_matters and "cuda" in enough
        most = enough["cuda"] if prefers_gpu else max(enough.values())
        return asked.with_devices(min(most, MOST_DEVICES // asked.hosts) * asked.hosts), []
    if unknown_gpu := await _gpu_problems(session, settings, rules, asked.gpu):
        return asked.with_devices(1), unknown_gpu
    message = f"cannot be `all`: backend `{backend}` starts a worker for each run; give the number"
    if not rules.starts_workers:
        gpu = name_words(asked.gpu).strip() if asked.gpu is not None else None
        labels = frozenset(asked.labels)
        needs = Needs(backend, kind, gpu, asked.memory_mb, labels=labels, devices=hosts, hosts=hosts)
        reason = pending_reason(needs, await read_fleet(session, settings.lease_seconds))
        why = reason.message if reason is not None else "Such a worker has come online meanwhile; repeat the request."
        message = f"cannot be `all`, because their number is not known. {why} With a number, the run would wait."
    return asked.with_devices(1), [FieldError(field="resources.devices", code="no_worker_online", message=message)]


def _kind(
    rules: BackendRules, config: TrainingConfig, given: Iterable[str], resources: Resources | ResourceRequest
) -> str | None:
    # A cluster has nodes of every kind, and may add some: without a request, a run would go to the CPUs of a GPU node.
    is_gpu = rules.machine_matters and rules.starts_workers
    needs_gpu = is_gpu or resources.gpu is not None or _gpu_fields(rules, config, set(given))
    return resources.kind or ("cuda" if needs_gpu else None)


def _gpu_fields(rules: BackendRules, config: TrainingConfig, given: set[str]) -> list[str]:
    """Return the fields of the configuration whose values need a GPU."""
    if not rules.machine_matters:
        return []
    return [problem.field for problem in machine_conflicts(config, given, DeviceCapabilities(kind="cpu"))]


def backend_problems(
    settings: Settings, rules: BackendRules, resources: Resources | ResourceRequest
) -> list[FieldError]:
    """Return why no run with these resources can be created for a backend now."""
    if why := unavailable_reason(settings, rules):
        return [FieldError(field="backend", code="backend_not_configured", message=why)]
    if not rules.starts_workers:
        return []
    if resources.hosts > 1:
        message = f"must be 1: backend `{rules.capabilities.name}` starts one worker for a run; leave the field out"
        return [FieldError(field="resources.hosts", code="not_supported", message=message)]
    if resources.gpu is not None:
        message = (
            "is not a resource of Ray: leave the field out, and ask for the label that Ray gives its nodes, as in "
            "`labels: [ray.io/accelerator-type=H100]`"
        )
        return [FieldError(field="resources.gpu", code="not_supported", message=message)]
    return [
        FieldError(
            field="resources.labels",
            code="not_a_ray_label",
            message=f"`{label}` is not a label of Ray nodes: write `key=value`, as in `ray start --labels`",
        )
        for label in resources.labels
        if not all(label.partition("="))
    ]


async def label_problems(
    session: AsyncSession, rules: BackendRules, resources: Resources | ResourceRequest
) -> list[FieldError]:
    """Return the requested labels that no worker of the backend is known to have had; a run would wait for ever."""
    if rules.starts_workers or not resources.labels:
        return []
    known = await known_labels(session, rules.capabilities.name)
    if known is None:
        return []
    named = ", ".join(f"`{one}`" for one in sorted(known)[:_MOST_NAMED])
    others = f"use one of the {len(known)} known ones, such as {named}; or" if known else "leave it out, or"
    return [
        FieldError(
            field="resources.labels",
            code="unknown_label",
            message=f"no worker of backend `{rules.capabilities.name}` has had the label `{label}`: {others} start "
            "a worker with it in ANNEAL_WORKER_LABELS first",
        )
        for label in sorted({*resources.labels} - known)
    ]


def shown_backends(settings: Settings) -> dict[str, BackendRules]:
    """Return the backends of this service by name, also those that lack a setting, but not those for tests."""
    return {
        name: rules
        for name, rules in BACKEND_RULES.items()
        if not rules.is_hidden or unavailable_reason(settings, rules) is None
    }


def unavailable_reason(settings: Settings, rules: BackendRules) -> str | None:
    """Return which setting a backend lacks; None if it is available."""
    if rules.setting is None or getattr(settings, rules.setting):
        return None
    variable = f"ANNEAL_{rules.setting.upper()}"
    return (
        f"backend `{rules.capabilities.name}` is not available: set {variable} in the environment of the API and "
        "restart it"
    )


def shared_file_problems(settings: Settings, config: TrainingConfig, resources: Resources) -> list[FieldError]:
    """Return the plugins that do not work on several hosts without a shared folder: rank 0 writes for the others."""
    if resources.hosts == 1 or settings.storage_url is None:
        return []
    message = (
        "does not work on several hosts here: rank 0 writes files that the others read, and the storage of this "
        "service is an object store; leave it or `resources.hosts` out, or let the operator set ANNEAL_STORAGE to a "
        "shared folder"
    )
    return [
        FieldError(field=f"config.extra.{name}", code="not_supported", message=message)
        for name in ("data_source", "checkpoint_engine")
        if getattr(config.trainer_options, name) is not None
    ]


def resource_problems(
    rules: BackendRules, config: TrainingConfig, given: Iterable[str], resources: Resources
) -> list[FieldError]:
    """Return the requested resources that contradict the configuration."""
    found = []
    if resources.kind == "cpu" and (fields := _gpu_fields(rules, config, set(given))):
        names = ", ".join(f"`{name}`" for name in fields)
        message = (
            f"contradicts the value of {names} in `config`, which needs a GPU; leave `resources.kind` out, or change "
            "the configuration"
        )
        found.append(FieldError(field="resources.kind", code="conflict", message=message))
    if resources.devices > 1 and (why := _needs_one_device(rules, config)):
        message = f"must be 1: {why}; leave the field out, or set 1"
        found.append(FieldError(field="resources.devices", code="not_supported", message=message))
    return found


async def placement_problems(
    session: AsyncSession, settings: Settings, rules: BackendRules, resources: Resources
) -> list[FieldError]:
    """Return the requested resources that contradict each other, or that no online worker has."""
    found = await _gpu_problems(session, settings, rules, resources.gpu)
    if resources.kind == "cpu" and resources.gpu is not None:
        message = "contradicts `resources.kind`, which is `cpu`: leave one of the two out"
        found.append(FieldError(field="resources.gpu", code="conflict", message=message))
    devices, hosts = resources.devices, resources.hosts
    if hosts > devices:
        message = (
            f"is {hosts}, and `devices`, the devices of all hosts together, is only {devices}: set "
            f"`resources.devices` to a multiple of {hosts}, or use fewer hosts"
        )
        found.append(FieldError(field="resources.hosts", code="too_many_hosts", message=message))
    elif devices % hosts:
        message = (
            f"is {devices}, which {hosts} hosts cannot divide, and each has the same number: set "
            f"{devices - devices % hosts} or {devices + hosts - devices % hosts}"
        )
        found.append(FieldError(field="resources.devices", code="does_not_divide", message=message))
    return found + await _count_problems(session, settings, rules, resources)


def is_divided(resources: Resources) -> bool:
    """Return True if a run with these resources is sharded whatever its estimate is."""
    return (resources.sharding == "full" or resources.expert_parallel > 1) and resources.devices > 1


def sharding_problems(config: TrainingConfig, given: Iterable[str], resources: Resources) -> list[FieldError]:
    """Return the reasons why the model of a run cannot be divided among its devices, if the request asks for it."""
    if not is_divided(resources):
        return []
    otherwise = "set `none`, with which each device has a replica"
    if resources.expert_parallel > 1:
        otherwise = f"leave out `resources.expert_parallel`, and {otherwise}"
    return [
        FieldError(
            field="resources.sharding",
            code="not_supported",
            message=f"cannot be `full`: {why}; otherwise {otherwise}",
        )
        for why in sharding_obstacles(config, set(given))
    ]


async def _count_problems(
    session: AsyncSession, settings: Settings, rules: BackendRules, resources: Resources
) -> list[FieldError]:
    """Return why no online worker has the requested number of devices."""
    if resources.devices == 1 or rules.starts_workers or not rules.capabilities.supports_distributed:
        return []  # a cluster may grow
    # Those of its kind, model and memory: a machine with many CPUs does not help a run that needs GPUs.
    kind = resources.kind or ("cuda" if resources.gpu is not None else None)
    backend, hosts = rules.capabilities.name, resources.hosts
    counts = await device_counts(session, settings, backend, kind, resources, joining=False)
    # With fewer workers than hosts, it waits for others.
    most = max((each[min(hosts, len(each)) - 1] for each in counts.values()), default=None)
    each = math.ceil(resources.devices / hosts)
    if most is not None and each > most:
        on_each = f", {each} on each host" if hosts > 1 else ""
        who = "no online worker has" if hosts == 1 else f"no {hosts} online workers each have"
        is_certain = kind or resources.memory_mb or resources.labels
        of_kind = " such devices" if is_certain else ""
        message = (
            f"is {resources.devices}{on_each}, and {who} more than {most}{of_kind}: ask for at most "
            f"{most * hosts}, or start "
        )
        message += "a worker on a machine with more devices (on a CPU, ANNEAL_SLOTS is their number)"
        return [FieldError(field="resources.devices", code="too_many_devices", message=message)]
    return []


async def _gpu_problems(
    session: AsyncSession, settings: Settings, rules: BackendRules, gpu: str | None
) -> list[FieldError]:
    """Return why no online GPU is the one that a run asks for; nothing if no worker with a GPU is online."""
    if gpu is None or rules.starts_workers:
        return []
    names = await gpu_names(session, settings, rules.capabilities.name)
    if not names or any(name_words(gpu) in name_words(name) for name in names):
        return []
    message = (
        f"no online worker of backend `{rules.capabilities.name}` has a GPU `{gpu}`; there are "
        f"{', '.join(f'`{name}`' for name in names)}: name one of them, or start a worker with such a GPU"
    )
    return [FieldError(field="resources.gpu", code="unknown_gpu", message=message)]


def _needs_one_device(rules: BackendRules, config: TrainingConfig) -> str | None:
    if not rules.capabilities.supports_distributed:
        return f"backend `{rules.capabilities.name}` trains on one device"
    if config.trainer_options.recipe is not None:
        return "a recipe (`extra.recipe`) trains on one device"
    return None


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
