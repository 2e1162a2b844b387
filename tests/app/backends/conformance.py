"""What every backend promises: one suite, run against each of them by a subclass that names the backend."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.schemas.runs.reads import TrainingRun
from app.api.errors import ApiError
from app.backends.celery import CeleryBackend
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, session_maker, sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.events.stream import Streams
from tests.factories import Trainer, count_runs, make_dataset, make_experiment
from tests.rows import events_of, run_row


class Conformance:
    """Subclasses set `name` and a configuration that the backend accepts."""

    name: ClassVar[str]
    config: ClassVar[dict[str, Any]]
    wrong_config: ClassVar[dict[str, Any]]
    """Two fields that are wrong, each in its own way."""

    @pytest.fixture
    def engine(self, settings: Settings) -> Iterator[Engine]:
        engine = sync_engine(settings.database_url or "")
        yield engine
        engine.dispose()

    @pytest.fixture
    def storage(self, settings: Settings) -> Storage:
        return Storage(settings)

    @pytest.fixture
    async def backend(self, settings: Settings, storage: Storage) -> AsyncIterator[CeleryBackend]:
        database = async_engine(settings.database_url or "")
        queue = Broker(settings)
        streams = Streams(database, queue)
        await queue.start()
        yield CeleryBackend(BACKEND_RULES[self.name], session_maker(database), settings, storage, queue, streams)
        await streams.close()
        await queue.close()
        await database.dispose()

    @pytest.fixture
    def run(self, engine: Engine) -> TrainingRun:
        return TrainingRun(run_id=new_id("run"), experiment_id=make_experiment(engine), config=self.config)

    @pytest.fixture
    def data(self, engine: Engine, storage: Storage) -> Path:
        return storage.dataset_file(make_dataset(engine), "jsonl")

    async def launched(self, backend: CeleryBackend, storage: Storage, run: TrainingRun, data: Path) -> str:
        return await backend.launch(run, data, storage.run_dir(run.run_id))

    def test_backend_reports_its_capabilities(self, backend: CeleryBackend) -> None:
        can = backend.capabilities
        assert can.name and can.supported_methods
        assert set(can.supported_methods) <= set(TrainingMethod)
        assert can.supports_local or can.supports_remote

    async def test_valid_configuration_has_no_problems(self, backend: CeleryBackend) -> None:
        assert await backend.validate_config(self.config) == []

    async def test_backend_reports_all_problems_with_field_code_and_message(self, backend: CeleryBackend) -> None:
        problems = await backend.validate_config({**self.config, **self.wrong_config})
        assert {problem.field.split(".")[0] for problem in problems} == set(self.wrong_config)
        assert all(problem.code and problem.message for problem in problems)

    async def test_a_method_that_it_does_not_support_is_a_problem(self, backend: CeleryBackend) -> None:
        narrow = backend.capabilities.model_copy(update={"supported_methods": (TrainingMethod.qlora,)})
        backend.rules = replace(backend.rules, capabilities=narrow)
        for method in (TrainingMethod.full, TrainingMethod.dpo):
            problems = await backend.validate_config({**self.config, "method": method.value})
            assert [problem.field for problem in problems] == ["method"]

    async def test_estimates_what_a_run_takes_or_says_why_it_cannot(self, backend: CeleryBackend) -> None:
        estimate = await backend.estimate_resources({**self.config, "max_steps": 7}, 100)
        assert (estimate.memory_mb is None) == bool(estimate.unknown)
        assert estimate.steps == (7 if backend.rules.loads_model else None)
        with pytest.raises(ApiError) as refused:
            await backend.estimate_resources({**self.config, **self.wrong_config}, 100)
        assert refused.value.errors

    async def test_a_launched_run_is_durable_before_the_answer(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run = run.model_copy(update={"resources": Resources(kind="cpu")})
        run_id = await self.launched(backend, storage, run, data)
        row = run_row(engine, run_id)
        assert (row.id, row.status, row.backend) == (run.run_id, "pending", backend.capabilities.name)
        assert row.requirements["kind"] == "cpu"
        assert row.experiment_id == run.experiment_id and row.dataset_id == data.parent.name
        assert len(events_of(engine, run_id)) == 1

    async def test_launching_a_run_again_adds_nothing(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        ids = {await self.launched(backend, storage, run, data) for _ in range(2)}
        assert ids == {run.run_id} and count_runs(engine) == 1

    async def test_the_same_run_launched_many_times_at_once_is_one_run(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        ids = await asyncio.gather(*(self.launched(backend, storage, run, data) for _ in range(8)))
        assert set(ids) == {run.run_id} and count_runs(engine) == 1

    async def test_a_bad_launch_makes_nothing(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        bad = run.model_copy(update={"config": {**self.config, **self.wrong_config}})
        folder = storage.run_dir(run.run_id)
        for wrong in (
            (bad, data, folder),
            (run, Path("/etc/passwd"), folder),
            (run, storage.dataset_file(new_id("ds"), "jsonl"), folder),
            (run, data, folder / ".." / "elsewhere"),
            (run.model_copy(update={"run_id": "mine"}), data, folder),
        ):
            with pytest.raises(ApiError) as raised:
                await backend.launch(*wrong)
            assert raised.value.status == 422
        assert count_runs(engine) == 0

    async def test_status_follows_the_run(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        assert (await backend.get_status(run_id)).status == "pending"
        trainer = Trainer(engine, run_id).begin(total=10)
        trainer.metric(5, loss=1.25)
        status = await backend.get_status(run_id)
        assert (status.status, status.total_steps) == ("running", 10)
        assert [point.loss for point in status.metrics_history] == [1.25]
        trainer.fail("bad_data", "row 3 is empty")
        status = await backend.get_status(run_id)
        assert (status.status, status.error_message) == ("failed", "row 3 is empty")

    async def test_an_unknown_run_is_not_found(self, backend: CeleryBackend) -> None:
        missing = new_id("run")

        async def read() -> None:
            async for _ in backend.stream_logs(missing):
                pass

        for call in (backend.get_status(missing), backend.stop(missing), backend.resume(missing), read()):
            with pytest.raises(ApiError) as raised:
                await call
            assert raised.value.code == "run_not_found"

    async def test_logs_come_with_their_history_first_until_the_run_ends(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        trainer = Trainer(engine, run_id).begin()
        trainer.log("one", "two")
        lines: list[str] = []
        both = asyncio.Event()

        async def read() -> None:
            async for line in backend.stream_logs(run_id):
                lines.append(line)
                if len(lines) == 2:
                    both.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(both.wait(), 30)
        trainer.log("three")
        trainer.complete()
        await asyncio.wait_for(reading, 30)
        assert lines == ["one", "two", "three"]

    async def test_stop_is_asked_for_once_and_for_all(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        trainer = Trainer(engine, run_id).begin()
        await backend.stop(run_id, save_checkpoint=False)
        first = run_row(engine, run_id)
        await backend.stop(run_id)
        again = run_row(engine, run_id)
        assert first.stop_requested_at == again.stop_requested_at is not None
        assert (first.stop_mode, again.stop_mode) == ("discard", "discard")
        trainer.cancel()
        await backend.stop(run_id)
        assert run_row(engine, run_id).status == "cancelled"

    async def test_a_run_that_ended_by_itself_cannot_be_stopped(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        Trainer(engine, run_id).begin().complete()
        with pytest.raises(ApiError) as raised:
            await backend.stop(run_id)
        assert raised.value.status == 409 and "completed" in raised.value.detail

    async def test_resume_makes_a_new_run_that_names_its_parent(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        trainer = Trainer(engine, run_id).begin()
        early, late = trainer.checkpoint(10), trainer.checkpoint(20)
        trainer.fail()
        newest = run_row(engine, await backend.resume(run_id))
        named = run_row(engine, await backend.resume(run_id, storage.checkpoint_dir(run_id, 1, 10)))
        assert (newest.parent_run_id, newest.resume_checkpoint_id, newest.status) == (run_id, late, "pending")
        assert (named.parent_run_id, named.resume_checkpoint_id, named.current_step) == (run_id, early, 10)

    async def test_resume_refuses_live_runs_missing_checkpoints_and_foreign_folders(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        with pytest.raises(ApiError) as raised:
            await backend.resume(run_id)
        assert raised.value.code == "run_is_live"
        Trainer(engine, run_id).fail()
        codes = []
        for path in (None, Path("/etc"), Path("/"), storage.checkpoint_dir(run_id, 1, 10)):
            with pytest.raises(ApiError) as raised:
                await backend.resume(run_id, path)
            codes.append(raised.value.code)
        assert codes == ["no_checkpoint", *["checkpoint_not_found"] * 3]
        assert count_runs(engine) == 1
