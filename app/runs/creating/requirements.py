"""Requirements of runs on their devices, from their plans and estimates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.field_types import needs_quantizer
from anneal.contracts.schemas.runs.placement import name_words
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates import service as estimates
from app.runs.creating.estimates.inputs import Subject, read_data
from app.runs.creating.plan import RunPlan


async def estimate_requirements(
    session: AsyncSession, settings: Settings, storage: Storage, plan: RunPlan, sharded: bool | None = None
) -> dict[str, Any]:
    """Return what a device needs to train a run, from its plan and its estimate; ends the session's transaction.

    `sharded` is whether the model is divided among the devices; None: the estimate decides.
    """
    least: dict[str, int] = {}
    if plan.rules.loads_model and plan.dataset_id is not None:
        subject = Subject(plan, await read_data(session, plan.dataset_id))
        if sharded is None:
            subject = await estimates.with_sharding(session, settings, storage, subject)
        else:
            subject = replace(subject, sharded=sharded)
        least, sharded = await estimates.least_memory_of(session, settings, storage, subject), subject.sharded
    return build_requirements(plan, least, sharded=bool(sharded))


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
        **(gguf_requirements(plan.config) if rules.loads_model else {}),
        "prefers_gpu": rules.machine_matters and kind is None,
    }
    return {name: value for name, value in values.items() if value not in (None, [], {}, False)}


def gguf_requirements(config: TrainingConfig) -> dict[str, bool]:
    """Return the programs that a worker needs for the GGUF file of a run; empty if it writes none."""
    if config.gguf is None:
        return {}
    return {"gguf": True, **({"gguf_quantizer": True} if needs_quantizer(config.gguf) else {})}
