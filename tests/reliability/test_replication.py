"""Two machines with storages of their own, and a place that both reach."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.reliability.test_deaths import SLOW, losses
from tests.stack import Stack
from tests.waiting import eventually
from worker.wire.journal import read_journal


@contextmanager
def links_planted(attempt: Path, outside: Path) -> Iterator[None]:
    """Put links at the places of checkpoints and of all else that appears, as a trainer's user can."""
    over = threading.Event()
    for step in range(10, 70, 10):
        (attempt / f"checkpoint-{step}").symlink_to(outside)

    def plant() -> None:
        while not over.wait(0.001):
            for path in attempt.iterdir():
                if not path.is_symlink() and not path.name.startswith(("moved-", "checkpoint-")):
                    with suppress(FileNotFoundError):
                        path.rename(attempt / f"moved-{time.monotonic_ns()}")
                        path.symlink_to(outside)

    planting = threading.Thread(target=plant)
    planting.start()
    try:
        yield
    finally:
        over.set()
        planting.join()


def test_a_run_whose_machine_is_lost_goes_on_exactly_on_another_one(stack: Stack, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    (tmp_path / "shared").mkdir()
    first = stack.add_worker(checkpoint_url=url)
    undisturbed = stack.create(SLOW, {"save_steps": 10})
    stack.until(undisturbed, "completed")
    saved = stack.client.get(f"/v1/runs/{undisturbed}/checkpoints").json()["data"]
    assert {tuple(one["copies"]) for one in saved} == {("local", "remote")}, "the end of a run waits for its copies"

    run_id = stack.create(SLOW, {"save_steps": 10})
    path = f"/v1/runs/{run_id}/checkpoints"
    eventually(lambda: [one for one in stack.client.get(path).json()["data"] if "remote" in one["copies"]])
    first.kill()
    second = tmp_path / "second"
    shutil.copytree(stack.settings.storage_root / "datasets", second / "datasets")
    attempt, outside = second / "runs" / run_id / "a1", tmp_path / "outside"
    attempt.mkdir(parents=True)
    outside.mkdir()
    with links_planted(attempt, outside):
        stack.add_worker(checkpoint_url=url, storage=second)
        shown = stack.until(run_id, "completed")
    assert shown["attempt"] == 2
    assert any(path.is_symlink() for path in attempt.iterdir()) and list(outside.iterdir()) == []
    journal = second / "runs" / run_id / "journal.jsonl"
    steps = {line["step"]: line["loss_hex"] for line in read_journal(journal) if line["event"] == "step"}
    assert min(steps) > 10, "it did not begin anew"
    expected = losses(stack, undisturbed)
    assert steps == {step: expected[step] for step in range(min(steps), 61)}
    assert any("was fetched" in event.get("line", "") for event in stack.events(run_id))
