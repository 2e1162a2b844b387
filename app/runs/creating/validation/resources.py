"""Validation of the devices that a request asks for, and what they have to offer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.placement import MOST_DEVICES, Resources, name_words
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import sharding_obstacles
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates.service import architecture_of
from app.runs.creating.plan import RunPlan
from app.runs.creating.validation.expert_parallel import expert_parallel_problems
from app.runs.creating.validation.sequence_parallel import sequence_parallel_problems
from app.runs.queue.fit import Needs, pending_reason
from app.runs.queue.fleet import read_fleet
from app.workers.online import OnlineWorker, count_devices, gpu_names
from app.workers.queries import known_labels

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
    resources = plan.resources
    problems = [*_config_conflicts(plan)]
    if resources.devices > 1 or resources.hosts > 1:
        problems += _sharding_problems(plan, fixed_fields)
        problems += shared_file_problems(settings, plan.config, resources)
    if resources.sequence_parallel > 1 or resources.expert_parallel > 1:
        model = await architecture_of(session, settings, storage, plan.config)
        problems += sequence_parallel_problems(plan, model)
        problems += expert_parallel_problems(plan, model)
    return problems


async def use_all_devices(
    session: AsyncSession, settings: Settings, workers: Sequence[OnlineWorker], plan: RunPlan
) -> tuple[RunPlan, list[FieldError]]:
    """Return the plan with the number of all devices that its run may use, or why that is not known."""
    rules, resources, kind = plan.rules, plan.resources, plan.device_kind
    backend, hosts = rules.capabilities.name, resources.hosts
    counts = count_devices(workers, kind, resources, joining=hosts > 1)
    enough = {kind: each[hosts - 1] for kind, each in counts.items() if len(each) >= hosts}
    if enough:
        # A CPU takes a run of no certain kind only where the backend has no GPU.
        prefers_gpu = rules.machine_matters and "cuda" in enough
        most = enough["cuda"] if prefers_gpu else max(enough.values())
        devices = min(most, MOST_DEVICES // hosts) * hosts
        return replace(plan, resources=resources.model_copy(update={"devices": devices})), []
    if resources.gpu is not None and (unknown_gpu := list(_gpu_problems(workers, rules, resources.gpu))):
        return plan, unknown_gpu
    message = f"cannot be `all`: backend `{backend}` starts a worker for each run; give the number"
    if not rules.starts_workers:
        gpu = name_words(resources.gpu).strip() if resources.gpu is not None else None
        labels = frozenset(resources.labels)
        needs = Needs(backend, kind, gpu, resources.memory_mb, labels=labels, devices=hosts, hosts=hosts)
        reason = pending_reason(needs, await read_fleet(session, settings.lease_seconds))
        why = reason.message if reason is not None else "Such a worker has come online meanwhile; repeat the request."
        message = f"cannot be `all`, because their number is not known. {why} With a number, the run would wait."
    return plan, [FieldError(field="resources.devices", code="no_worker_online", message=message)]


async def label_problems(session: AsyncSession, rules: BackendRules, labels: Sequence[str]) -> list[FieldError]:
    """Return the requested labels that no worker of the backend is known to have had; a run would wait for ever."""
    known = None if rules.starts_workers else await known_labels(session, rules.capabilities.name)
    if known is None:
        return []
    named = ", ".join(f"`{label}`" for label in sorted(known)[:_MOST_NAMED])
    others = f"use one of the {len(known)} known ones, such as {named}; or" if known else "leave it out, or"
    return [
        FieldError(
            field="resources.labels",
            code="unknown_label",
            message=f"no worker of backend `{rules.capabilities.name}` has had the label `{label}`: {others} start "
            "a worker with it in ANNEAL_WORKER_LABELS first",
        )
        for label in sorted({*labels} - known)
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


def _config_conflicts(plan: RunPlan) -> Iterator[FieldError]:
    """Yield the resources that contradict the configuration or the backend."""
    resources, backend = plan.resources, plan.rules.capabilities
    if resources.kind == "cpu" and (fields := plan.gpu_fields):
        names = ", ".join(f"`{name}`" for name in fields)
        message = (
            f"contradicts the value of {names} in `config`, which needs a GPU; leave `resources.kind` out, or change "
            "the configuration"
        )
        yield FieldError(field="resources.kind", code="conflict", message=message)
    if resources.devices > 1 and not backend.supports_distributed:
        message = f"must be 1: backend `{backend.name}` trains on one device; leave the field out, or set 1"
        yield FieldError(field="resources.devices", code="not_supported", message=message)


def placement_problems(
    workers: Sequence[OnlineWorker], rules: BackendRules, resources: Resources
) -> Iterator[FieldError]:
    """Yield the requested resources that contradict each other, or that no online worker has."""
    if resources.gpu is not None:
        yield from _gpu_problems(workers, rules, resources.gpu)
    if resources.kind == "cpu" and resources.gpu is not None:
        message = "contradicts `resources.kind`, which is `cpu`: leave one of the two out"
        yield FieldError(field="resources.gpu", code="conflict", message=message)
    devices, hosts = resources.devices, resources.hosts
    if hosts > devices:
        message = (
            f"is {hosts}, and `devices`, the devices of all hosts together, is only {devices}: set "
            f"`resources.devices` to a multiple of {hosts}, or use fewer hosts"
        )
        yield FieldError(field="resources.hosts", code="too_many_hosts", message=message)
    elif devices % hosts:
        message = (
            f"is {devices}, which {hosts} hosts cannot divide, and each has the same number: set "
            f"{devices - devices % hosts} or {devices + hosts - devices % hosts}"
        )
        yield FieldError(field="resources.devices", code="does_not_divide", message=message)
    if devices > 1 and rules.capabilities.supports_distributed and not rules.starts_workers:  # a cluster may grow
        yield from _count_problems(workers, resources)


def _sharding_problems(plan: RunPlan, fixed_fields: frozenset[str]) -> Iterator[FieldError]:
    """Yield the reasons why the model of a run cannot be divided among its devices, if the request asks for it."""
    if plan.requires_sharding:
        otherwise = "set `none`, with which each device has a replica"
        if plan.resources.expert_parallel > 1:
            otherwise = f"leave out `resources.expert_parallel`, and {otherwise}"
        for why in sharding_obstacles(plan.config, {*plan.user_set_fields, *fixed_fields}):
            message = f"cannot be `full`: {why}; otherwise {otherwise}"
            yield FieldError(field="resources.sharding", code="not_supported", message=message)


def _count_problems(workers: Sequence[OnlineWorker], resources: Resources) -> Iterator[FieldError]:
    """Yield why no online worker has the requested number of devices."""
    # Those of its kind, model and memory: a machine with many CPUs does not help a run that needs GPUs.
    kind = resources.kind or ("cuda" if resources.gpu is not None else None)
    hosts = resources.hosts
    counts = count_devices(workers, kind, resources, joining=False)
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
        yield FieldError(field="resources.devices", code="too_many_devices", message=message)


def _gpu_problems(workers: Sequence[OnlineWorker], rules: BackendRules, gpu: str) -> Iterator[FieldError]:
    """Yield why no online GPU is the one that a run asks for; nothing if no worker with a GPU is online."""
    names = [] if rules.starts_workers else gpu_names(workers)
    if names and not any(name_words(gpu) in name_words(name) for name in names):
        message = (
            f"no online worker of backend `{rules.capabilities.name}` has a GPU `{gpu}`; there are "
            f"{', '.join(f'`{name}`' for name in names)}: name one of them, or start a worker with such a GPU"
        )
        yield FieldError(field="resources.gpu", code="unknown_gpu", message=message)
