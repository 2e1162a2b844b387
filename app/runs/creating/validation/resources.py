"""Validation of the devices that a request asks for, and what they have to offer."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.placement import MOST_DEVICES, ResourceRequest, Resources, name_words
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import sharding_obstacles
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.plan import RunPlan, device_kind, gpu_fields
from app.runs.creating.validation.expert_parallel import expert_parallel_problems
from app.runs.creating.validation.sequence_parallel import sequence_parallel_problems
from app.runs.queue.fit import Needs, pending_reason
from app.runs.queue.fleet import read_fleet
from app.workers.queries import device_counts, gpu_names, known_labels

_MOST_NAMED = 10


async def check_resources(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    plan: RunPlan,
    fixed_fields: frozenset[str] = frozenset(),
) -> list[FieldError]:
    """Return the resources of a plan that contradict its configuration or its base model.

    A sharded run can replace the values of `fixed_fields` as little as those that a user has set.
    """
    config, resources = plan.config, plan.resources
    return [
        *resource_problems(plan.rules, config, plan.user_set_fields, resources),
        *sharding_problems(config, plan.user_set_fields | fixed_fields, resources),
        *shared_file_problems(settings, config, resources),
        *await sequence_parallel_problems(session, settings, storage, config, resources),
        *await expert_parallel_problems(session, settings, storage, config, resources),
    ]


def build_requirements(plan: RunPlan, least: Mapping[str, int], *, sharded: bool = False) -> dict[str, Any]:
    """Return the requirements on a device from a plan and its estimate.

    `least` is the estimated memory by kind of device, in MiB; empty if it is not known. `sharded` is the decision
    whether the model is divided among the devices.
    """
    rules, resources = plan.rules, plan.resources
    kind = plan.device_kind
    values: dict[str, Any] = {
        "kind": kind,
        "gpu": name_words(resources.gpu).strip() if resources.gpu is not None else None,
        "memory_mb": resources.memory_mb,
        "estimated_mb": {name: mb for name, mb in least.items() if kind in (None, name)},
        "labels": sorted(set(resources.labels)),
        "sharded": sharded,
        "sequence_parallel": resources.sequence_parallel if resources.sequence_parallel > 1 else None,
        "expert_parallel": resources.expert_parallel if resources.expert_parallel > 1 else None,
        "gguf": rules.loads_model and plan.config.gguf is not None,
        "prefers_gpu": rules.machine_matters and kind is None,
    }
    return {name: value for name, value in values.items() if value not in (None, [], {}, False)}


async def fixed_resources(
    session: AsyncSession,
    settings: Settings,
    rules: BackendRules,
    config: TrainingConfig,
    user_set_fields: Iterable[str],
    request: ResourceRequest,
) -> tuple[Resources, list[FieldError]]:
    """Return the resources with a number of devices, and the reason why there is none for `all`."""
    if request.devices != "all":
        return request.with_devices(request.devices), []
    kind = device_kind(rules, config, user_set_fields, request)
    backend, hosts = rules.capabilities.name, request.hosts
    counts = await device_counts(session, settings, backend, kind, request, joining=hosts > 1)
    enough = {kind: each[hosts - 1] for kind, each in counts.items() if len(each) >= hosts}
    if enough:
        # A CPU takes a run of no certain kind only where the backend has no GPU.
        prefers_gpu = rules.machine_matters and "cuda" in enough
        most = enough["cuda"] if prefers_gpu else max(enough.values())
        return request.with_devices(min(most, MOST_DEVICES // request.hosts) * request.hosts), []
    if unknown_gpu := await _gpu_problems(session, settings, rules, request.gpu):
        return request.with_devices(1), unknown_gpu
    message = f"cannot be `all`: backend `{backend}` starts a worker for each run; give the number"
    if not rules.starts_workers:
        gpu = name_words(request.gpu).strip() if request.gpu is not None else None
        labels = frozenset(request.labels)
        needs = Needs(backend, kind, gpu, request.memory_mb, labels=labels, devices=hosts, hosts=hosts)
        reason = pending_reason(needs, await read_fleet(session, settings.lease_seconds))
        why = reason.message if reason is not None else "Such a worker has come online meanwhile; repeat the request."
        message = f"cannot be `all`, because their number is not known. {why} With a number, the run would wait."
    return request.with_devices(1), [FieldError(field="resources.devices", code="no_worker_online", message=message)]


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
    rules: BackendRules, config: TrainingConfig, user_set_fields: Iterable[str], resources: Resources
) -> list[FieldError]:
    """Return the requested resources that contradict the configuration."""
    problems = []
    if resources.kind == "cpu" and (fields := gpu_fields(rules, config, set(user_set_fields))):
        names = ", ".join(f"`{name}`" for name in fields)
        message = (
            f"contradicts the value of {names} in `config`, which needs a GPU; leave `resources.kind` out, or change "
            "the configuration"
        )
        problems.append(FieldError(field="resources.kind", code="conflict", message=message))
    if resources.devices > 1 and not rules.capabilities.supports_distributed:
        backend = rules.capabilities.name
        message = f"must be 1: backend `{backend}` trains on one device; leave the field out, or set 1"
        problems.append(FieldError(field="resources.devices", code="not_supported", message=message))
    return problems


async def placement_problems(
    session: AsyncSession, settings: Settings, rules: BackendRules, resources: Resources
) -> list[FieldError]:
    """Return the requested resources that contradict each other, or that no online worker has."""
    problems = await _gpu_problems(session, settings, rules, resources.gpu)
    if resources.kind == "cpu" and resources.gpu is not None:
        message = "contradicts `resources.kind`, which is `cpu`: leave one of the two out"
        problems.append(FieldError(field="resources.gpu", code="conflict", message=message))
    devices, hosts = resources.devices, resources.hosts
    if hosts > devices:
        message = (
            f"is {hosts}, and `devices`, the devices of all hosts together, is only {devices}: set "
            f"`resources.devices` to a multiple of {hosts}, or use fewer hosts"
        )
        problems.append(FieldError(field="resources.hosts", code="too_many_hosts", message=message))
    elif devices % hosts:
        message = (
            f"is {devices}, which {hosts} hosts cannot divide, and each has the same number: set "
            f"{devices - devices % hosts} or {devices + hosts - devices % hosts}"
        )
        problems.append(FieldError(field="resources.devices", code="does_not_divide", message=message))
    return problems + await _count_problems(session, settings, rules, resources)


def is_divided(resources: Resources) -> bool:
    """Return True if a run with these resources is sharded whatever its estimate is."""
    return (resources.sharding == "full" or resources.expert_parallel > 1) and resources.devices > 1


def sharding_problems(config: TrainingConfig, user_set_fields: Iterable[str], resources: Resources) -> list[FieldError]:
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
        for why in sharding_obstacles(config, set(user_set_fields))
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
