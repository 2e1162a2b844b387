"""Backend for Anneal's workers, on this machine or on any machine that shares database, broker and storage."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.config import Settings
from app.contracts.backends import BACKEND_RULES, TrainingBackend
from app.contracts.errors import FieldError
from app.contracts.schemas.estimates import RunEstimate
from app.contracts.schemas.runs import RunCreate, RunRead, RunResume, TrainingRun
from app.contracts.training_config.fields import TrainingConfig
from app.contracts.training_config.raw_config import given_fields, normalize_numbers
from app.estimator.steps import Data
from app.infra.broker import Broker
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.runs import serializers, service
from app.runs.creation import RunContext, create
from app.runs.estimates import service as estimates
from app.runs.estimates.store import estimate_and_store
from app.runs.events.stream import Streams
from app.runs.logs import lines
from app.runs.resume import resume
from app.runs.validation.config import config_problems
from app.runs.validation.result import validation_failed
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from app.workers.queries import online_machines


class CeleryBackend(TrainingBackend):
    """Backend that launches a run by inserting a pending row; a worker claims it after a hint over the broker."""

    rules = BACKEND_RULES["celery"]

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        settings: Settings,
        storage: Storage,
        queue: Broker,
        streams: Streams,
    ) -> None:
        self._sessions = sessions
        self._storage = storage
        self._queue = queue
        self._streams = streams
        self._around = RunContext(settings, storage, {self.capabilities.name: self.rules})

    async def validate_config(self, config: Mapping[str, Any]) -> list[FieldError]:
        """Return the problems of the configuration, also with regard to the devices of online workers."""
        name = self.capabilities.name
        async with self._sessions() as session:
            machines = await online_machines(session, self._around.settings, name, self.rules)
        problems, _ = await asyncio.to_thread(config_problems, self.rules, config, machines=machines)
        return problems

    async def estimate_resources(self, config: Mapping[str, Any], dataset_size: int) -> RunEstimate:
        """Estimate by formula and from earlier runs, for the devices of online workers."""
        problems = await self.validate_config(config)
        if problems:
            raise validation_failed(
                [FieldError(field=f"config.{one.field}", code=one.code, message=one.message) for one in problems]
            )
        asked = normalize_numbers(config)
        given = sorted(given_fields(asked))
        options = asked if self.rules.options is None else {k: v for k, v in asked.items() if k != "extra"}
        subject = estimates.Subject(
            TrainingConfig.model_validate(options),
            given,
            self.capabilities.name,
            Data(dataset_size, None),
            self.rules.loads_model,
        )
        settings, storage = self._around.settings, self._storage
        return await estimates.estimate(self._sessions, settings, storage, subject)

    async def launch(self, run: TrainingRun, dataset_path: Path, output_dir: Path) -> str:
        """Insert the run; raise 422 for a data set or folder outside the storage."""
        request = RunCreate(
            experiment_id=run.experiment_id,
            backend=self.capabilities.name,
            dataset_id=self._dataset_id(dataset_path),
            config=run.config,
        )
        if not is_id(run.run_id, "run") or output_dir != self._storage.run_dir(run.run_id):
            message = f"must be the run's folder below {self._storage.root}, and the run's id must have the form run_…"
            raise validation_failed([FieldError(field="output_dir", code="outside_storage", message=message)])
        async with self._sessions() as session, session.begin():
            known = await session.scalar(select(Run.id).where(Run.id == run.run_id))
            made = None
            if known is None:
                made = await create(session, self._around, request, created_by=None, run_id=run.run_id)
        await self._queue.hint()
        if made is not None and self.rules.loads_model:
            await estimate_and_store(self._sessions, self._around.settings, self._storage, made)
        return run.run_id

    async def get_status(self, run_id: str) -> RunRead:
        """Return the run with its newest metrics."""
        async with self._sessions() as session:
            return await serializers.run_read(session, self._storage, await service.get(session, run_id))

    async def stream_logs(self, run_id: str) -> AsyncIterator[str]:
        """Yield stored lines, then new ones until the run has ended."""
        async with self._sessions() as session:
            run = await service.get(session, run_id)
        async for line in lines.lines(self._streams.batches(run_id, run.first_seq - 1), grep=None):
            yield line

    async def stop(self, run_id: str, save_checkpoint: bool = True) -> None:
        """Request a stop; raise 409 if the run has already ended by itself."""
        async with self._sessions() as session, session.begin():
            await service.stop(session, run_id, "checkpoint" if save_checkpoint else "discard")
        await self._queue.call_worker(run_id)
        await self._queue.wake(run_id)

    async def resume(self, run_id: str, checkpoint_path: Path | None = None) -> str:
        """Create a run that resumes from the checkpoint in that folder, or from the newest restorable one."""
        async with self._sessions() as session, session.begin():
            wanted = await self._checkpoint_id(session, checkpoint_path) if checkpoint_path else None
            request = RunResume(checkpoint_id=wanted)
            child = await resume(session, self._around, run_id, request, created_by=None)
        await self._queue.hint()
        return child.id

    def _dataset_id(self, path: Path) -> str:
        dataset_id, extension = path.parent.name, path.suffix.removeprefix(".")
        if is_id(dataset_id, "ds") and path == self._storage.dataset_file(dataset_id, extension):
            return dataset_id
        message = f"must be a file of a stored data set below {self._storage.root}; upload it first"
        raise validation_failed([FieldError(field="dataset_path", code="outside_storage", message=message)])

    async def _checkpoint_id(self, session: AsyncSession, path: Path) -> str:
        run_id = path.parent.parent.name
        query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.name == path.name)
        for saved in (await session.scalars(query.order_by(Checkpoint.id.desc()))).all():
            if path == self._storage.checkpoint_dir(run_id, saved.attempt, saved.step):
                return saved.id
        message = "is not the folder of a checkpoint; list the existing ones with GET …/checkpoints"
        raise validation_failed([FieldError(field="checkpoint_path", code="checkpoint_not_found", message=message)])
