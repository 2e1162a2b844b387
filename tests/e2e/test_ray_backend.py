"""The promises of a backend on a real Ray cluster, whose nodes share no folder: the storage is an object store.

`tests/app/backends/conformance.py` is the suite of all backends. Where its tests play a trainer, those here have a run
trained. Each node has two CPUs and a home of its own.
"""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.schemas.runs.reads import TrainingRun
from app.api.errors import ApiError
from app.backends.celery import CeleryBackend
from app.backends.ray import RayBackend
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, session_maker
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.events.stream import Streams
from tests.app.backends.conformance import Conformance
from tests.e2e.conftest import QLORA
from tests.e2e.ray_stack import LONG, RayStack
from tests.factories import count_runs, make_experiment
from tests.rows import run_row
from tests.stack import is_alive
from tests.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SHORT = {**QLORA, "max_steps": 6, "save_steps": 3, "logging_steps": 1}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayStack]:
    home = tmp_path_factory.mktemp("ray")
    (home / "share").mkdir()
    values = {"storage": f"file://{home / 'share'}", "secret_key_file": home / "secret.key"}
    stack = RayStack(home, cpus=2, own_homes=True, **values)
    yield stack
    stack.close()


@pytest.fixture
def stack(service: RayStack) -> Iterator[RayStack]:
    """With two nodes and nothing in training, also after a failure."""
    yield service
    service.settle()


class TestConformance(Conformance):
    name = "ray"
    config = {"base_model": "tiny"}
    wrong_config = {"epochs": -1, "extra": {"unheard_of": 1}}

    @pytest.fixture
    def settings(self, stack: RayStack) -> Settings:
        for run in stack.client.get("/v1/runs").json()["data"]:  # newest first: no run that another needs
            assert stack.client.delete(f"/v1/runs/{run['id']}").status_code == 204
        return stack.settings

    @pytest.fixture
    def storage(self, settings: Settings) -> Storage:
        return Storage.shared(settings)

    @pytest.fixture
    async def backend(self, settings: Settings, storage: Storage) -> AsyncIterator[RayBackend]:
        """As the API has it, whose loop submits the jobs."""
        database = async_engine(settings.database_url or "")
        queue = Broker(settings)
        streams = Streams(database, queue)
        await queue.start()
        arguments = (BACKEND_RULES[self.name], session_maker(database), settings, storage, queue, streams)
        yield RayBackend(*arguments, wake=lambda: None)
        await streams.close()
        await queue.close()
        await database.dispose()

    @pytest.fixture
    def run(self, engine: Engine) -> TrainingRun:
        return self.request(engine)

    @pytest.fixture
    def data(self, stack: RayStack, storage: Storage) -> Path:
        return storage.dataset_file(stack.chats, "jsonl")

    def request(self, engine: Engine, **config: Any) -> TrainingRun:
        """A run on the CPUs of the cluster, since there are no GPUs."""
        return TrainingRun(
            run_id=new_id("run"),
            experiment_id=make_experiment(engine),
            config={**SHORT, **config},
            resources=Resources(kind="cpu"),
        )

    async def test_status_follows_the_run(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path, stack: RayStack
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        assert (await backend.get_status(run_id)).status == "pending"
        await asyncio.to_thread(stack.completed, run_id)
        status = await backend.get_status(run_id)
        assert (status.status, status.attempt, status.current_step, status.total_steps) == ("completed", 1, 6, 6)
        assert len(status.metrics_history) == 6 and all(point.loss for point in status.metrics_history)
        rows = b'{"prompt": "%s", "completion": "x"}\n' % (b"a long question " * 50) * 2
        questions = storage.dataset_file(stack.upload(rows, "questions.jsonl"), "jsonl")
        cut_off = self.request(engine, max_seq_length=16, loss_on="completion")
        await self.launched(backend, storage, cut_off, questions)
        await asyncio.to_thread(stack.until, cut_off.run_id, "failed", "completed", timeout=180)
        status = await backend.get_status(cut_off.run_id)
        assert (status.status, status.error_code) == ("failed", "bad_data")
        assert "nothing to train on" in (status.error_message or "")

    async def test_logs_come_with_their_history_first_until_the_run_ends(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        lines = await asyncio.wait_for(self._lines(backend, run_id), 180)
        assert run_row(engine, run_id).status == "completed" and lines
        assert await asyncio.wait_for(self._lines(backend, run_id), 30) == lines

    async def _lines(self, backend: CeleryBackend, run_id: str) -> list[str]:
        return [line async for line in backend.stream_logs(run_id)]

    async def test_stop_is_asked_for_once_and_for_all(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path, stack: RayStack
    ) -> None:
        run_id = await self.launched(backend, storage, self.request(engine, **LONG), data)
        await asyncio.to_thread(stack.until_training, run_id)
        await backend.stop(run_id, save_checkpoint=False)
        first = run_row(engine, run_id)
        await backend.stop(run_id)
        again = run_row(engine, run_id)
        assert first.stop_requested_at == again.stop_requested_at is not None
        assert (first.stop_mode, again.stop_mode) == ("discard", "discard")
        await asyncio.to_thread(stack.until, run_id, "cancelled", "failed", "completed")
        await backend.stop(run_id)
        assert run_row(engine, run_id).status == "cancelled"

    async def test_a_run_that_ended_by_itself_cannot_be_stopped(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path, stack: RayStack
    ) -> None:
        run_id = await self.launched(backend, storage, run, data)
        await asyncio.to_thread(stack.completed, run_id)
        with pytest.raises(ApiError) as raised:
            await backend.stop(run_id)
        assert raised.value.status == 409 and "completed" in raised.value.detail

    async def test_resume_makes_a_new_run_that_names_its_parent(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path, stack: RayStack
    ) -> None:
        """Both children train to the end, from checkpoints that another node may have written."""
        run_id = await self.launched(backend, storage, self.request(engine, max_steps=200, save_steps=10), data)
        await asyncio.to_thread(stack.until_training, run_id, 25)
        await backend.stop(run_id)
        await asyncio.to_thread(stack.until, run_id, "cancelled")
        saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        by_step = {one["step"]: one["id"] for one in saved}
        late = max(by_step)
        newest = run_row(engine, await backend.resume(run_id))
        named = run_row(engine, await backend.resume(run_id, storage.checkpoint_dir(run_id, 1, 20)))
        assert (newest.parent_run_id, newest.resume_checkpoint_id, newest.status) == (run_id, by_step[late], "pending")
        assert (named.parent_run_id, named.resume_checkpoint_id, named.current_step) == (run_id, by_step[20], 20)
        for child in (newest, named):
            await asyncio.to_thread(stack.completed, child.id, 300)

    async def test_resume_refuses_live_runs_missing_checkpoints_and_foreign_folders(
        self, backend: CeleryBackend, engine: Engine, storage: Storage, run: TrainingRun, data: Path, stack: RayStack
    ) -> None:
        run_id = await self.launched(backend, storage, self.request(engine, **LONG), data)
        with pytest.raises(ApiError) as raised:
            await backend.resume(run_id)
        assert raised.value.code == "run_is_live"
        await asyncio.to_thread(stack.until_training, run_id)
        await backend.stop(run_id, save_checkpoint=False)
        await asyncio.to_thread(stack.until, run_id, "cancelled")
        codes = []
        for path in (None, Path("/etc"), storage.checkpoint_dir(run_id, 1, 10)):
            with pytest.raises(ApiError) as raised:
                await backend.resume(run_id, path)
            codes.append(raised.value.code)
        assert codes == ["no_checkpoint", "checkpoint_not_found", "checkpoint_not_found"]
        assert count_runs(engine) == 1


def test_a_run_trains_on_two_devices_of_a_node(stack: RayStack) -> None:
    run_id = stack.train(devices=2, max_steps=30, save_steps=10)
    stack.until_training(run_id)
    worker_id = stack.run(run_id)["worker_id"]
    (worker,) = [one for one in stack.client.get("/v1/workers").json()["data"] if one["id"] == worker_id]
    assert [device["run_id"] for device in worker["devices"]] == [run_id] * 2, worker
    shown = stack.completed(run_id)
    assert (shown["attempt"], shown["current_step"], shown["resources"]["devices"]) == (1, 30, 2)


def test_a_run_that_no_node_can_hold_waits_and_says_what_there_is(stack: RayStack) -> None:
    large, elsewhere = stack.train(devices=3), stack.train(labels=("zone=b",))
    assert "has 3 CPUs and the label `zone=a`: the most is 2" in stack.waits(large, "ray_no_node")
    assert "has the label `zone=b`" in stack.waits(elsewhere, "ray_no_node")
    eventually(lambda: stack.job_status(large) == "RUNNING", timeout=60, what="its driver waits for a place")


def test_a_job_that_waits_and_is_stopped_in_ray_is_followed_by_another(stack: RayStack) -> None:
    first = [stack.train(devices=2, **LONG) for _ in range(2)]
    for run_id in first:
        stack.until_training(run_id)
    waiting = stack.train(max_steps=3)
    eventually(lambda: stack.job_status(waiting) == "RUNNING", timeout=60, what="its driver waits for a place")
    stack.waits(waiting, "ray_placing")
    answer = stack.cluster.client.post(f"/api/jobs/anneal-{waiting}-0/stop")
    assert answer.status_code == 200, answer.text
    eventually(lambda: stack.job_status(waiting) == "STOPPED", timeout=20, what="its driver ends")
    assert "It is tried again at" in stack.waits(waiting, "ray_job_failed")
    assert stack.run(waiting)["attempt"] == 0
    stack.stop(first[0], save_checkpoint=False)
    shown = stack.completed(waiting)
    assert shown["attempt"] == 1 and stack.job_status(waiting, 1) in ("RUNNING", "SUCCEEDED")
    assert stack.reasons(waiting) == ["ray_placing", "ray_job_failed", "ray_placing"]


def test_a_node_with_a_wrong_database_lets_its_run_wait_and_is_named(stack: RayStack) -> None:
    url = "postgresql://ada:hunter2@127.0.0.1:1/anneal"
    node = stack.cluster.add_node("zone=c", ANNEAL_DATABASE_URL=url)
    try:
        run_id = stack.train(labels=("zone=c",))
        message = stack.waits(run_id, "ray_job_failed", timeout=300)
        assert "ANNEAL_DATABASE_URL of" in message and "`ray job logs" in message and "hunter2" not in message
        assert "restarts" not in message, "it costs none"
        assert "hunter2" not in stack.logs(run_id)
        assert stack.run(run_id)["status"] == "pending"
    finally:
        node.stop()


def test_a_run_of_a_dead_node_goes_on_from_the_store_on_another(stack: RayStack) -> None:
    run_id = stack.train(max_steps=400, save_steps=20)

    def copied() -> int:
        saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        return max((one["step"] for one in saved if "remote" in one["copies"]), default=0)

    eventually(lambda: copied() >= 20, timeout=180, what="a checkpoint in the store")
    node = stack.node_of_worker(run_id)
    (worker,) = [one for one in node.processes() if "worker.single_run" in one.cmdline()]
    copies = copied()
    node.raylet.kill()
    eventually(lambda: not is_alive(worker.pid), timeout=30, what="the worker of the dead node is gone")
    shown = stack.completed(run_id, timeout=300)
    assert shown["attempt"] == 2
    attempts = {one["attempt"]: one for one in stack.client.get(f"/v1/runs/{run_id}/attempts").json()["data"]}
    assert attempts[2]["start_step"] >= copies
    answer = stack.client.get(f"/v1/runs/{run_id}/artifacts.tar")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert any(name.endswith("adapter_model.safetensors") for name in archive.getnames())
    assert not (stack.home / "storage").exists(), "nothing is in a folder that all would share"
    stack.replace(node)
