"""An object store that is away while runs need it: workers wait, and nothing is completed before it is sent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack
from tests.waiting import eventually

QUICK = {"steps": 6, "step_seconds": 0.02}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("share")


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, share: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), storage=f"file://{share}")
    yield stack
    stack.close()


@pytest.fixture
def away(share: Path) -> Path:
    return share.with_name("away")


def test_an_output_that_cannot_be_sent_fails_the_run_with_a_code_and_a_resume_completes_it(
    stack: Stack, share: Path, away: Path
) -> None:
    stack.add_worker(lease_seconds=1.0)
    run_id = stack.create({**QUICK, "steps": 30, "step_seconds": 0.1}, max_restarts=0)
    stack.until(run_id, "running")
    share.rename(away)
    shown = stack.until(run_id, "failed", "completed", timeout=120)
    assert (shown["status"], shown["error_code"]) == ("failed", "storage_unavailable")
    assert "Resume the run" in shown["error_message"] and shown["fine_tuned_model"] is None
    away.rename(share)
    answer = stack.client.post(f"/v1/runs/{run_id}/resume", json={})
    assert answer.status_code == 202, answer.text
    resumed = stack.until(answer.json()["id"], "completed", "failed")
    assert resumed["status"] == "completed", resumed["error_message"]
    files = stack.client.get(f"/v1/runs/{resumed['id']}/artifacts").json()["data"]
    assert [one["path"] for one in files] == ["fake_model.json", "metrics.jsonl"]


def test_an_output_is_sent_once_the_store_is_back(stack: Stack, share: Path, away: Path) -> None:
    stack.add_worker()
    run_id = stack.create({**QUICK, "steps": 30, "step_seconds": 0.1})
    stack.until(run_id, "running")
    share.rename(away)
    worker = stack.workers[-1]
    eventually(lambda: "cannot be sent now" in worker.log.read_text(), timeout=60)
    assert stack.run(run_id)["status"] not in ("completed", "failed")
    away.rename(share)
    shown = stack.until(run_id, "completed", "failed", timeout=60)
    assert (shown["status"], shown["attempt"]) == ("completed", 1)
    assert stack.client.get(f"/v1/runs/{run_id}/artifacts").status_code == 200


def test_a_run_whose_dataset_cannot_be_fetched_waits_and_says_why(
    stack: Stack, share: Path, away: Path, tmp_path: Path
) -> None:
    share.rename(away)
    try:
        stack.add_worker(home=tmp_path / "empty")
        run_id = stack.create(QUICK)
        reasons = eventually(
            lambda: [one["reason"] for one in stack.events(run_id) if "cannot be fetched" in one.get("reason", "")],
            timeout=60,
        )
        assert "the file of dataset" in reasons[0] and "waits for another try" in reasons[0]
        assert stack.run(run_id)["status"] == "pending"
    finally:
        away.rename(share)
    stack.stop(run_id)
