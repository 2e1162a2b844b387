"""`anneal demo`: what it does when a run stops, fails, or the service does not start."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anneal.client.client import Anneal
from app.cli.demo import program
from tests.factories import Trainer
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture
def client(shared_api: ApiServer) -> Iterator[Anneal]:
    with Anneal(shared_api.url, shared_api.key) as client:
        yield client


def test_run_is_stopped_at_its_step_and_followed_to_its_end(client: Anneal, trainer: Trainer) -> None:
    run = client.runs.get(trainer.run_id)
    trainer.metric(5, loss=3.0)
    trainer.events("eval", {"step": 5, "epoch": 0.05, "metrics": {"eval_loss": 2.5}})
    trainer.metric(10, loss=2.0)

    def end_when_requested() -> None:
        eventually(lambda: client.runs.get(run.id).stop_requested_at)
        trainer.cancel()

    ending = threading.Thread(target=end_when_requested)
    ending.start()
    followed = program.follow_run(client, run, stop_at=10)
    ending.join()
    assert (followed.run.status, followed.steps, followed.held_out) == ("cancelled", [5, 10], [2.5])


def test_failed_run_ends_the_demo_with_its_error(client: Anneal, trainer: Trainer) -> None:
    run = client.runs.get(trainer.run_id)
    trainer.fail("out_of_memory", "it needs more memory")
    with pytest.raises(program.DemoError, match=r"ended as failed, expected completed \(out_of_memory: it needs more"):
        program.follow_run(client, run)


def test_service_that_does_not_start_is_reported_with_the_end_of_its_log(shared_api: ApiServer, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_text("Starting\nThe disk is full.\n")
    with subprocess.Popen(["false"]) as child:
        child.wait()
        settings = shared_api.settings.model_copy(update={"home": tmp_path})
        with pytest.raises(program.DemoError, match=r"did not start \(The disk is full\.\); see .*up\.log"):
            program.connect_client(settings, child, log)
