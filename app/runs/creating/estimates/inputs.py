"""Inputs of an estimate: the run, and what the database and the hub say about its data, its model and the devices."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.gpus import Gpu
from anneal.contracts.methods import models_of
from anneal.contracts.schemas.estimates import EstimatedDevice
from anneal.contracts.schemas.runs.placement import Placement
from anneal.contracts.training_config.fields import TrainingConfig
from app.api.errors import dataset_not_found, invalid
from app.base_models import resolver
from app.config import Settings
from app.estimator.activations import LIGER_PACKAGE
from app.estimator.architecture import Architecture
from app.estimator.memory import WHOLE, Division
from app.estimator.steps import Data
from app.infra.storage import Storage
from app.runs.creating.estimates import hub_config
from app.runs.creating.estimates.devices import devices_of_gpu, online_devices, requested_words
from app.runs.creating.estimates.hub_config import HubConfig
from app.runs.creating.plan import RunPlan
from app.tables.datasets import Dataset
from app.tables.runs import Run
from app.workers.online import OnlineWorker, have_package, read_online_workers


@dataclass(frozen=True)
class Subject:
    """Planned run to estimate, and its data."""

    plan: RunPlan
    data: Data
    sharded: bool = False
    """True: weights, gradients and optimizer state are divided among the devices; else each has a replica."""
    gpu: Gpu | None = None
    """GPU to estimate for, whether a worker has it or not; None: those of online workers."""
    fixed_fields: frozenset[str] = frozenset()
    """Fields that cannot be replaced, beside those that a user has set."""

    @property
    def user_set_fields(self) -> frozenset[str]:
        """Fields of the configuration that cannot be replaced."""
        return self.plan.user_set_fields | self.fixed_fields

    @property
    def placement(self) -> Placement:
        """Devices that the request allows, of the kind that its configuration needs."""
        return self.plan.resources.model_copy(update={"kind": self.plan.device_kind})

    @property
    def division(self) -> Division:
        """Division of the model among the devices."""
        resources = self.plan.resources
        return Division(resources.devices, resources.expert_parallel) if self.sharded else WHOLE

    @property
    def data_parallel(self) -> int:
        """Number of devices, or groups of them, that the rows of a step are divided among."""
        return max(self.plan.resources.devices // self.plan.resources.sequence_parallel, 1)


@dataclass(frozen=True)
class EstimateInputs:
    """Inputs of an estimate that are read from the database."""

    devices: list[EstimatedDevice]
    """Kinds of devices that online workers offer and the request allows."""
    attempt: int | None
    """Attempt whose output is the base model, if the base model is a run."""
    missing: str | None = None
    """Sentence that names what the request asks for, if workers are online and none has it."""
    hub_config: HubConfig | None = None
    """Configuration of a hub model that is not on this machine, if it was requested."""
    workers: Sequence[OnlineWorker] = ()
    """Online workers of the backend."""
    has_liger: bool = False
    """True if every online worker with a GPU that the request allows has liger-kernel."""
    teacher_attempt: int | None = None
    """Attempt whose output is the teacher, if that is a run."""
    teacher_hub_config: HubConfig | None = None
    """Configuration of a teacher that is on the hub and not on this machine, if it was requested."""
    teacher: Architecture | None = None
    """Teacher of the run; None: there is none, or it is not known on this machine."""


async def read_inputs(session: AsyncSession, settings: Settings, subject: Subject) -> EstimateInputs:
    """Read what the formulas need from the database."""
    plan, placement = subject.plan, subject.placement
    attempt = await find_output_attempt(session, plan.config.base_model)
    teacher = teacher_config(plan.config)
    teacher_attempt = None if teacher is None else await find_output_attempt(session, teacher.base_model)
    workers = await read_online_workers(session, settings, plan.backend)
    if subject.gpu is not None:
        return EstimateInputs(devices_of_gpu(workers, subject.gpu), attempt, teacher_attempt=teacher_attempt)
    devices = online_devices(workers, placement)
    missing = None
    if workers and not devices and not plan.rules.starts_workers:  # a cluster has devices without workers
        missing = f"No online worker of backend `{plan.backend}` has {requested_words(placement)}."
    has_liger = have_package(workers, "cuda", placement, LIGER_PACKAGE)
    return EstimateInputs(
        devices, attempt, missing, workers=workers, has_liger=has_liger, teacher_attempt=teacher_attempt
    )


def teacher_config(config: TrainingConfig) -> TrainingConfig | None:
    """Return a configuration whose base model is the teacher of a run; None if the run has none."""
    names = [name for _, name, role in models_of(config.model_dump()) if role == "teacher"]
    return config.model_copy(update={"base_model": names[0], "revision": None}) if names else None


async def find_output_attempt(session: AsyncSession, base_model: str) -> int | None:
    """Return the attempt whose output is the base model, if the base model is a run."""
    if not resolver.is_run(base_model):
        return None
    attempt: int | None = await session.scalar(select(Run.output_attempt).where(Run.id == base_model))
    return attempt


async def read_data(session: AsyncSession, dataset_id: str | None) -> Data:
    """Return the known figures of a dataset; raises 422 if it was deleted since the validation of the request."""
    dataset = None if dataset_id is None else await session.get(Dataset, dataset_id)
    if dataset is None:
        missing = dataset_not_found("dataset_id", str(dataset_id))
        raise invalid([missing], code=missing.code)
    return Data(dataset.rows, dataset.bytes, dataset.token_statistics)


async def fetch_base_config(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, config: TrainingConfig
) -> HubConfig | None:
    """Fetch the configuration of a base model that is on the hub, and not on this machine; otherwise None."""
    if resolver.is_run(config.base_model):
        return None
    try:
        located = await asyncio.to_thread(
            resolver.locate_model, settings, storage, config.base_model, None, config.revision
        )
    except resolver.BaseModelError:
        return None
    if located["hub"] is None:
        return None
    async with sessions() as session:
        return await hub_config.fetch_hub_config(session, settings, located["hub"], located["revision"])
