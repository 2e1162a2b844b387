"""The driver of a job waits for a bounded time, and the worker that its actor starts has the settings of the node."""

import argparse
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.infra.errors import TryLater
from worker import ray_node
from worker.ray_node import Bundle, Driver

_ACTOR = """
import json, os
from app.config import placed_worker_environment
os.environ["OMP_NUM_THREADS"] = "2"  # as Ray does in an actor with two CPUs
print(json.dumps(placed_worker_environment("cpu", 2, ["zone=a"])))
"""
_NODE = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"


@pytest.mark.parametrize("threads", [None, "7"])
def test_threads_are_those_of_the_node_and_not_those_that_ray_sets(threads: str | None) -> None:
    """Otherwise each of two trainers, or one on a GPU, would compute with a number that Ray has chosen."""
    node = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    node |= {"ANNEAL_WORKER_LABELS": "site-b"} | ({} if threads is None else {"OMP_NUM_THREADS": threads})
    done = subprocess.run([sys.executable, "-c", _NODE, _ACTOR], env=node, capture_output=True, text=True, check=True)
    environment = json.loads(done.stdout)
    assert environment.get("OMP_NUM_THREADS") == threads
    assert (environment["ANNEAL_SLOTS"], environment["ANNEAL_WORKER_LABELS"]) == ("2", "site-b,zone=a")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


class _Ray:
    """A cluster in which calls end after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.looks -= 1
        return (pending, []) if self.looks < 0 else ([], pending)

    def get(self, done: Any) -> Any:
        return done


class _Call:
    """A method of an actor, or `ready` of a placement group."""

    def ready(self) -> str:
        return "ready"

    def remote(self, *_: Any) -> str:
        return "node"


@pytest.fixture
def driver() -> Driver:
    return Driver(argparse.Namespace(run="run_1", lease_epoch=0, kind="cpu", devices=1, label=[]))


def test_a_job_without_a_place_ends_after_an_hour(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its service is gone, nothing else would ever stop it, and an autoscaler would add a node for it."""
    assert driver._is_placed(_Ray(looks=3), _Call())
    assert ray_node._PLACE_SECONDS == 3600
    monkeypatch.setattr(ray_node, "_PLACE_SECONDS", 0.0)
    with pytest.raises(TryLater, match="no node had room"):
        driver._is_placed(_Ray(looks=1000), _Call())


def test_a_worker_that_is_not_started_ends_the_job(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_START_SECONDS", 0.0)
    with pytest.raises(TryLater, match="started no worker"):
        driver._train_run(_Ray(looks=1000), argparse.Namespace(start=_Call()))


def test_a_stop_is_handled_in_every_wait(driver: Driver) -> None:
    driver.request_stop()
    assert not driver._is_placed(_Ray(looks=1000), _Call())
    driver._train_run(_Ray(looks=1000), argparse.Namespace(start=_Call()))  # which would ask the worker for its end


def test_a_full_disk_of_its_log_never_makes_the_worker_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that waits for a reader of its output renews no lease."""
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it raises too
    monkeypatch.setattr(sys, "stderr", full)
    bundle = Bundle()
    prints = "print('x' * 1_000_000)\nprint('the last line')"
    with subprocess.Popen([sys.executable, "-c", prints], stdout=subprocess.PIPE) as bundle._worker:
        bundle._reader = threading.Thread(target=bundle._copy_output, args=[bundle._worker.stdout], daemon=True)
        bundle._reader.start()
        ended = bundle.wait(30)
        bundle._worker.kill()
    with suppress(OSError):
        full.close()
    assert ended == (0, "the last line")
