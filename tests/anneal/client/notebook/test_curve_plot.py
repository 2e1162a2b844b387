"""Promises about `client.runs.plot`, in a real shell of IPython: what a notebook would show of a cell."""

import base64
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image
from sqlalchemy import Engine

from anneal.client.client import Anneal
from anneal.client.notebook.curve_plot import CurvePlot
from anneal.contracts.events import EvalEvent, MetricEvent
from app.infra.db import sync_engine
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    yield engine
    engine.dispose()


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.display_pub = CapturingDisplayPublisher()
    yield shell
    InteractiveShell.clear_instance()


def images(shell: InteractiveShell) -> list[bytes]:
    """The pictures that the cell has shown, the newest last; each takes the place of the one before."""
    outputs: list[dict[str, Any]] = list(shell.display_pub.outputs)
    assert [output.get("update", False) for output in outputs] == [index > 0 for index in range(len(outputs))]
    assert len({output["transient"]["display_id"] for output in outputs}) <= 1
    return [_decoded(output["data"]["image/png"]) for output in outputs]


def _decoded(data: bytes | str) -> bytes:
    return base64.b64decode(data) if isinstance(data, str) else data


def test_a_cell_shows_the_curves_and_again_as_they_grow_until_the_run_ends(
    shared_api: ApiServer, engine: Engine, shell: InteractiveShell
) -> None:
    trainer = Trainer(engine, make_run(shared_api.client, make_dataset(engine), name="plotted")["id"]).begin()
    trainer.metric(1, loss=3.0)
    with Anneal(shared_api.url, shared_api.key) as client:
        shell.user_ns |= {"client": client, "run_id": trainer.run_id}
        cell = threading.Thread(target=shell.run_cell, args=["client.runs.plot(run_id)"])
        cell.start()
        eventually(lambda: len(images(shell)) == 1, what="the first picture")
        for step in range(2, 200):
            trainer.metric(step, loss=3.0 / step)
            if len(images(shell)) > 2:
                break
        trainer.complete()
        cell.join(timeout=30)
    assert not cell.is_alive(), "the cell ends with the run"
    shown = images(shell)
    # The last one is drawn in any case.
    assert len(shown) > 2 and len(set(shown[:-1])) == len(shown) - 1, "each picture has something new"


def test_an_ended_run_is_drawn_once_with_axes_for_each_unit(
    shared_api: ApiServer, engine: Engine, shell: InteractiveShell, tmp_path: Any
) -> None:
    trainer = Trainer(engine, make_run(shared_api.client, make_dataset(engine))["id"]).begin()
    trainer.metric(1, loss=3.0, learning_rate=1e-4)
    trainer.metric(2, loss=None, learning_rate=1e-4, non_finite=["loss"])
    trainer.complete()
    heights = []
    with Anneal(shared_api.url, shared_api.key) as client:
        for names in (["loss", "eval_loss"], ["loss", "learning_rate"]):
            client.runs.plot(trainer.run_id, names=names)
            picture = tmp_path / "picture.png"
            picture.write_bytes(_decoded(shell.display_pub.outputs[-1]["data"]["image/png"]))
            heights.append(Image.open(picture).height)
    assert heights[1] == 2 * heights[0], "losses share their axes"


def test_several_runs_are_drawn_in_one_picture_until_all_have_ended(
    shared_api: ApiServer, engine: Engine, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anneal.client.runs._SECONDS_BETWEEN_READS", 0.05)
    ended, live = (
        Trainer(engine, make_run(shared_api.client, make_dataset(engine), name=name)["id"]).begin()
        for name in ("ended", "live")
    )
    ended.metric(1, loss=3.0)
    ended.complete()
    live.metric(1, loss=2.0)
    with Anneal(shared_api.url, shared_api.key) as client:
        client.runs.plot([ended.run_id, live.run_id], follow=False)
        assert len(images(shell)) == 1
        shell.display_pub.outputs.clear()
        shell.user_ns |= {"client": client, "ids": [ended.run_id, live.run_id]}
        cell = threading.Thread(target=shell.run_cell, args=["client.runs.plot(ids)"])
        cell.start()
        eventually(lambda: len(images(shell)) > 1, what="another picture")
        live.complete()
        cell.join(timeout=30)
    assert not cell.is_alive(), "the cell ends with the runs"


def test_a_step_that_is_trained_again_replaces_what_came_after_it() -> None:
    plot = CurvePlot("a run", ["loss", "eval_loss", "extra.speed"])
    base = {"run_id": "run_x", "seq": 1, "attempt": 1, "ts": "2026-01-02T03:04:05Z"}
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 1.5)):
        plot.add_event(MetricEvent(type="metric", step=step, loss=loss, extra={"speed": step}, **base))
    plot.add_event(EvalEvent(type="eval", step=2, metrics={"eval_loss": 1.7}, **base))
    assert plot._points == {
        ("", "loss"): ([1, 2], [3.0, 1.5]), ("", "eval_loss"): ([2], [1.7]), ("", "extra.speed"): ([1, 2], [1.0, 2.0]),
    }  # fmt: skip
