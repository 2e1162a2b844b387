"""Backend for Anneal's workers, on this machine or on any machine that shares database, broker and storage."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.background import BackgroundTasks

from anneal.contracts.backends import BackendRules, TrainingBackend
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.checkpoints import CheckpointExport
from anneal.contracts.schemas.estimates import RunEstimate
from anneal.contracts.schemas.runs.placement import ResourceRequest, Resources
from anneal.contracts.schemas.runs.reads import RunRead, TrainingRun
from anneal.contracts.schemas.runs.requests import EvaluationCreate, PredictionCreate, RunCreate, RunResume
from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields, normalize_numbers
from app.config import Settings
from app.estimator.steps import Data
from app.infra.broker import Broker
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction, create_run
from app.runs.creating.estimates import service as estimates
from app.runs.creating.estimates.inputs import Subject
from app.runs.creating.estimates.store import estimate_and_store
from app.runs.creating.evaluation import create_evaluation
from app.runs.creating.export import create_export
from app.runs.creating.plan import RunPlan
from app.runs.creating.prediction import create_prediction
from app.runs.creating.resume import resume_run
from app.runs.creating.validation.config import config_problems
from app.runs.creating.validation.result import validation_failed
from app.runs.creating.validation.rewards import reward_problems
from app.runs.events.sources import RunSource
from app.runs.events.stream import Streams
from app.runs.reading import serializers
from app.runs.reading.logs import lines
from app.runs.state import service
from app.tables.runs import Run
from app.workers.online import online_machines, read_online_workers


class CeleryBackend(TrainingBackend[RunTransaction, Run]):
    """Backend that launches a run by inserting a pending row; a worker claims it after a hint over the broker.

    `celery` and `fake` have the same workers and differ only in their rules and trainers.
    """

    def __init__(
        self,
        rules: BackendRules,
        sessions: async_sessionmaker[AsyncSession],
        settings: Settings,
        storage: Storage,
        queue: Broker,
        streams: Streams,
    ) -> None:
        self.rules = rules
        self._sessions = sessions
        self._settings = settings
        self._storage = storage
        self._queue = queue
        self._streams = streams

    async def validate_config(self, config: Mapping[str, Any]) -> list[FieldError]:
        """Return the problems of the configuration, also with regard to the devices of online workers."""
        name = self.capabilities.name
        wrong_rewards = await reward_problems(self._settings, config)
        async with self._sessions() as session:
            workers = await read_online_workers(session, self._settings, name)
        machines = online_machines(workers, self.rules)
        problems, _ = await asyncio.to_thread(config_problems, self.rules, config, machines=machines)
        return problems + wrong_rewards

    async def estimate_resources(self, config: Mapping[str, Any], dataset_size: int) -> RunEstimate:
        """Estimate by formula and from earlier runs, for the devices of online workers."""
        problems = await self.validate_config(config)
        if problems:
            raise validation_failed(
                [FieldError(field=f"config.{one.field}", code=one.code, message=one.message) for one in problems]
            )
        normalized = normalize_numbers(config)
        options = normalized if self.rules.options is None else {k: v for k, v in normalized.items() if k != "extra"}
        plan = RunPlan(
            backend=self.capabilities.name,
            config=TrainingConfig.model_validate(options),
            user_set_fields=frozenset(given_fields(normalized)),
            resources=Resources(),
        )
        subject = Subject(plan, Data(dataset_size, None))
        return await estimates.estimate_run(self._sessions, self._settings, self._storage, subject)

    async def create_run(self, transaction: RunTransaction, request: RunCreate, run_id: str | None = None) -> Run:
        """Insert the run; after the commit, send a hint to the workers and estimate the run."""
        run = await create_run(transaction, self._settings, self._storage, request, run_id)
        self._announce_run(transaction)
        if self.rules.loads_model:
            transaction.after_commit.add_task(estimate_and_store, self._sessions, self._settings, self._storage, run)
        return run

    async def evaluate_model(self, transaction: RunTransaction, request: EvaluationCreate) -> Run:
        """Insert the run; after the commit, send a hint to the workers."""
        run = await create_evaluation(transaction, self._settings, self._storage, request)
        self._announce_run(transaction)
        return run

    async def predict_rows(self, transaction: RunTransaction, request: PredictionCreate) -> Run:
        """Insert the run; after the commit, send a hint to the workers."""
        run = await create_prediction(transaction, self._settings, self._storage, request)
        self._announce_run(transaction)
        return run

    async def stop_run(
        self, transaction: RunTransaction, run_id: str, mode: StopMode, grace_seconds: float | None = None
    ) -> Run:
        """Store the request; after the commit, notify the run's worker and its readers."""
        run = await service.stop_run(transaction.session, run_id, mode, grace_seconds)
        transaction.after_commit.add_task(self._queue.call_worker, run_id)
        transaction.after_commit.add_task(self._queue.wake_streams, run_id)
        return run

    async def resume_run(self, transaction: RunTransaction, run_id: str, request: RunResume) -> Run:
        """Insert the run that continues `run_id`; after the commit, send a hint to the workers."""
        run = await resume_run(transaction, self._settings, self._storage, run_id, request)
        self._announce_run(transaction)
        return run

    async def export_checkpoint(
        self, transaction: RunTransaction, run_id: str, checkpoint_id: str, request: CheckpointExport
    ) -> Run:
        """Insert the run that exports a checkpoint; after the commit, send a hint to the workers."""
        run = await create_export(transaction, self._settings, run_id, checkpoint_id, request)
        self._announce_run(transaction)
        return run

    async def launch(self, run: TrainingRun, dataset_path: Path, output_dir: Path) -> str:
        """Insert the run; raise 422 for a dataset or folder outside the storage."""
        request = RunCreate(
            experiment_id=run.experiment_id,
            backend=self.capabilities.name,
            dataset_id=self._dataset_id(dataset_path),
            config=run.config,
            resources=ResourceRequest(**run.resources.model_dump()),
        )
        if not is_id(run.run_id, "run") or output_dir != self._storage.run_dir(run.run_id):
            message = f"must be the run's folder below {self._storage.root}, and the run's id must have the form run_…"
            raise validation_failed([FieldError(field="output_dir", code="outside_storage", message=message)])
        async with self._begin_transaction() as transaction:
            await self.create_run(transaction, request, run.run_id)
        return run.run_id

    async def get_status(self, run_id: str) -> RunRead:
        """Return the run with its newest metrics."""
        async with self._sessions() as session:
            return await serializers.run_read(session, self._storage, await service.get_run(session, run_id))

    async def stream_logs(self, run_id: str) -> AsyncIterator[str]:
        """Yield stored lines, then new ones until the run has ended."""
        async with self._sessions() as session:
            run = await service.get_run(session, run_id)
        async for line in lines.follow_lines(
            self._streams.stream_batches(RunSource(run_id), run.first_seq - 1), grep=None
        ):
            yield line

    async def stop(self, run_id: str, save_checkpoint: bool = True) -> None:
        """Request a stop; raise 409 if the run has already ended by itself."""
        async with self._begin_transaction() as transaction:
            await self.stop_run(transaction, run_id, "checkpoint" if save_checkpoint else "discard")

    async def resume(self, run_id: str, checkpoint_path: Path | None = None) -> str:
        """Create a run that resumes from the checkpoint in that folder, or from the newest restorable one."""
        path = None if checkpoint_path is None else str(checkpoint_path)
        async with self._begin_transaction() as transaction:
            child = await self.resume_run(transaction, run_id, RunResume(checkpoint_path=path))
        return child.id

    def _announce_run(self, transaction: RunTransaction) -> None:
        """After the commit, send a hint to the workers."""
        transaction.after_commit.add_task(self._queue.wake_workers)

    @asynccontextmanager
    async def _begin_transaction(self) -> AsyncIterator[RunTransaction]:
        """Provide a transaction of its own, followed by the tasks for after its commit."""
        after_commit = BackgroundTasks()
        async with self._sessions() as session:
            yield RunTransaction(session, after_commit)
            await session.commit()
        await after_commit()

    def _dataset_id(self, path: Path) -> str:
        dataset_id, extension = path.parent.name, path.suffix.removeprefix(".")
        if is_id(dataset_id, "ds") and path == self._storage.dataset_file(dataset_id, extension):
            return dataset_id
        message = f"must be a file of a stored dataset below {self._storage.root}; upload it first"
        raise validation_failed([FieldError(field="dataset_path", code="outside_storage", message=message)])
