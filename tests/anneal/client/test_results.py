"""Promises about what the client returns: the end of a run, data frames, and objects that a line shows."""

import sys
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from anneal.client.client import Anneal, AsyncAnneal
from anneal.contracts.events import LogEvent
from anneal.contracts.run_status import TrainingStatus
from app.infra.db import sync_engine
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    yield engine
    engine.dispose()


@pytest.fixture
def client(shared_api: ApiServer) -> Iterator[Anneal]:
    with Anneal(shared_api.url, shared_api.key) as client:
        yield client


def begun(api: ApiServer, engine: Engine, name: str = "a run") -> Trainer:
    return Trainer(engine, make_run(api.client, make_dataset(engine), name=name)["id"]).begin()


async def test_wait_returns_the_run_when_it_has_ended(shared_api: ApiServer, engine: Engine, client: Anneal) -> None:
    trainer = begun(shared_api, engine)
    statuses: list[TrainingStatus] = []
    waiting = threading.Thread(target=lambda: statuses.append(client.runs.wait(trainer.run_id).status))
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive() and not statuses
    trainer.fail()
    waiting.join(timeout=30)
    async with AsyncAnneal(shared_api.url, shared_api.key) as asynchronous:
        statuses.append((await asynchronous.runs.wait(trainer.run_id)).status)
    assert statuses == ["failed", "failed"]


def test_metrics_are_a_data_frame_by_step_and_of_several_runs_by_run(
    shared_api: ApiServer, engine: Engine, client: Anneal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = []
    for first in (3.0, 5.0):
        trainer = begun(shared_api, engine)
        trainer.metric(1, loss=first, learning_rate=1e-4)
        trainer.metric(2, loss=None, learning_rate=2e-4, non_finite=["loss"])
        trainer.events("eval", {"step": 2, "metrics": {"eval_loss": 1.5}})
        trainer.complete()
        ids.append(trainer.run_id)
    frame = client.runs.data_frame(ids[0])
    assert frame.index.name == "step" and frame["loss"].dropna().to_dict() == {1: 3.0}
    assert frame["learning_rate"].to_dict() == {1: 1e-4, 2: 2e-4}
    assert [name for name in frame.columns if name.endswith("eval_loss")]
    both = client.runs.data_frame(ids, names=["loss"])
    assert both.index.names == ["run_id", "step"] and list(both.columns) == ["loss"]
    assert both["loss"].dropna().to_dict() == {(ids[0], 1): 3.0, (ids[1], 1): 5.0}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        client.runs.data_frame(ids[0])


def test_objects_are_shown_in_a_line_that_names_them(shared_api: ApiServer, engine: Engine, client: Anneal) -> None:
    trainer = begun(shared_api, engine, name="n" * 150)
    trainer.log("x" * 5000)
    for step in range(1, 100):
        trainer.metric(step, loss=1.0)
    run = client.runs.get(trainer.run_id)
    shown = [
        run, *client.runs.list(full=True), client.runs.metrics(run.id), client.datasets.get(run.dataset_id),
        *client.experiments.list(), *client.workers.list(), *client.runs.events(run.id, follow=False),
    ]  # fmt: skip
    assert max(len(repr(one)) for one in shown) <= 200 and all(str(one) == repr(one) for one in shown)
    assert repr(run).startswith(f"RunRead(id='{run.id}', name='nnn") and "running" in repr(run)
    line = LogEvent(type="log", run_id=run.id, seq=4, line="loss is nan")
    assert (
        repr(line)
        == f"LogEvent(type='log', run_id='{run.id}', seq=4, line='loss is nan', stream='stdout', level='info')"
    )
