"""Promise 15: slow is not hung. Whatever a trainer works at for long, its supervisor hears that it gets on."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slowness import slowness
from tests.worker.process.launching import CPU, start_launcher
from tests.worker.training.tiny import make_job, write_job
from worker.attempts.monitor import KillReason, Monitor
from worker.ingest.record_handler import RecordHandler
from worker.process.launcher import Launcher
from worker.process.training_group import TrainingGroup

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# No word between the first step and the last: what is heard in between are signs of life.
SILENT: dict[str, Any] = {
    "method": "lora",
    "max_seq_length": 64,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1000,
    "save_steps": 1000,
}


@cache
def factor() -> float:
    """Measure once how slow the machine is: silence of a busy machine is no hang."""
    return slowness()


def hang_seconds() -> float:
    """Return the limit after which a silent trainer is killed."""
    return 4.0 * factor()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A hub cache that has the tiny model, as `owner/slow`."""
    cache = tmp_path_factory.mktemp("slow-hub")
    place = cache / "models--owner--slow"
    shutil.copytree(tiny_model, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return cache


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, hub: Path) -> Iterator[Launcher]:
    """Starts trainers, warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(hub))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        launcher = start_launcher(tmp_path_factory.mktemp("home"), "zygote", preload=("tests.worker.training.slow",))
    yield launcher
    launcher.stop()


class Watched:
    """A training process followed to its end by a real supervisor's loop, with everything but the trainer pretended."""

    def __init__(self, launcher: Launcher, job: dict[str, Any], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout * factor()
        self.stored: list[Any] = []

        class Lease:
            fenced, stop, silent_seconds, run_id = False, None, 0.0, "run_test"
            requested_stop, preempted_for, leaving, actions, ended_parts = None, None, None, (), ()
            active_parts: tuple[()] = ()

            @property
            def expired(self) -> bool:  # ends a test that would wait for ever
                return time.monotonic() > deadline

        settings = SimpleNamespace(
            hang_seconds=hang_seconds(), save_after_seconds=1e9, save_grace_seconds=1e9, disk_reserve_bytes=0
        )
        storage = SimpleNamespace(attempt_dir=lambda *_: Path(job["attempt_dir"]))
        context: Any = SimpleNamespace(
            settings=settings, storage=storage, draining=threading.Event(), uploader=None, database_reserve=None
        )
        writer: Any = SimpleNamespace(
            enqueue_item=self.stored.append, raise_if_failed=lambda: None, is_full=False, progress=None
        )
        run: Any = SimpleNamespace(
            id="run_test",
            task="train",
            lease_epoch=1,
            attempt=1,
            config={},
            backend="celery",
            user_set_fields=[],
            dataset_id="ds",
            eval_dataset_id=None,
            extra_eval_datasets={},
            device_indexes=[0],
            devices_needed=1,
            requirements={},
        )
        self.record_handler = RecordHandler(context, run, writer)
        slow = job.pop("slow")
        path = write_job(job)
        path.with_name("slow.json").write_text(json.dumps(slow))
        processes = TrainingGroup([launcher.launch("tests.worker.training.slow:main", path, [CPU])])
        lease: Any = Lease()
        began = time.monotonic()
        try:
            memory_watch: Any = SimpleNamespace(sample_if_due=lambda phase: None)
            monitor = Monitor(context, lease, writer, self.record_handler, processes, memory_watch, [])
            self.killed_for = monitor.run_until_exit().killed_for
        finally:
            processes.close()
        self.seconds = time.monotonic() - began
        self.killed_for: KillReason | None

    @property
    def reported(self) -> tuple[KillReason | None, Any]:
        """Why it was killed, and how it ended by its own account."""
        return self.killed_for, (self.record_handler.state.result or {}).get("outcome")

    @property
    def types(self) -> set[str]:
        """Types of the events that would be stored."""
        events = [getattr(thing, "event", thing) for thing in self.stored]
        return {event.type for event in events if event is not None}


@pytest.mark.parametrize(
    ("slow", "config"),
    [
        pytest.param({"micro_batch": 0.7}, {"max_steps": 10}, id="steps-between-two-metrics"),
        pytest.param(
            {"micro_batch": 0.7},
            {"max_steps": 1, "gradient_accumulation_steps": 10},
            id="one-large-step",
        ),
        pytest.param({"fsync": 0.35}, {"max_steps": 1}, id="a-checkpoint-on-a-slow-disk"),
    ],
)
def test_a_slow_trainer_is_left_alone_however_long_it_has_nothing_to_report(
    slow: dict[str, float], config: dict[str, int], launcher: Launcher, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    job = make_job(tmp_path, tiny_model, chats, **{**SILENT, **config})
    watched = Watched(launcher, {**job, "slow": {name: seconds * factor() for name, seconds in slow.items()}})
    assert watched.reported == (None, "completed"), watched.record_handler.state.tail
    assert watched.seconds > hang_seconds()
    assert watched.types <= {"config", "metric", "progress", "checkpoint", "export", "log"}, (
        "a sign of life is no event"
    )


@pytest.mark.parametrize("place", ["step", "evaluation"])
def test_a_trainer_that_hangs_is_killed(
    place: str, launcher: Launcher, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    config = {**SILENT, "max_steps": 2}
    slow = {"micro_batch": 1000}
    if place == "evaluation":
        config |= {"eval_split": 0.1, "eval_steps": 1}
        slow = {"eval_batch": 1000}
    watched = Watched(launcher, {**make_job(tmp_path, tiny_model, chats, **config), "slow": slow})
    assert watched.reported == ("hang", None), watched.record_handler.state.tail


def hub_job(folder: Path, tiny_model: Path, chats: Path, slow: dict[str, Any]) -> dict[str, Any]:
    job = make_job(folder, tiny_model, chats, **SILENT, max_steps=1)
    return {**job, "base_model": {"name": "slow", "path": None, "hub": "owner/slow", "revision": None}, "slow": slow}


def test_a_download_that_takes_long_is_waited_for_as_long_as_it_gets_on(
    launcher: Launcher, hub: Path, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    coming = hub / "models--owner--slow" / "blobs" / "weights.incomplete"
    coming.parent.mkdir()
    watched = Watched(
        launcher, hub_job(tmp_path, tiny_model, chats, {"download": round(14 * factor()), "to": str(coming)})
    )
    assert watched.reported == (None, "completed"), watched.record_handler.state.tail
    assert watched.seconds > hang_seconds()


def test_a_download_that_stalls_is_not(launcher: Launcher, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    watched = Watched(launcher, hub_job(tmp_path, tiny_model, chats, {"download": 1000}))
    assert watched.reported == ("hang", None), watched.record_handler.state.tail
