"""An object store that is away while runs need it: workers wait, and nothing is completed before it is sent."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, update

from app.infra.files.object_store import INSTALLATION_MARK, MARK
from app.tables.runs import Run
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


def test_a_run_whose_output_cannot_be_sent_in_time_is_requeued_and_completes_by_itself(
    stack: Stack, share: Path, away: Path
) -> None:
    stack.add_worker(delivery_seconds=1.0)
    run_id = stack.create({**QUICK, "steps": 30, "step_seconds": 0.3}, config={"save_steps": 10}, max_restarts=0)
    stack.until(run_id, "running")
    eventually(lambda: checkpoints_sent(stack, run_id))
    share.rename(away)
    try:
        reasons = eventually(lambda: [text for text in pending_reasons(stack, run_id) if "cannot be used" in text], 90)
        assert "could not be sent" in pending_reasons(stack, run_id)[0], "then it is not started without the storage"
        assert "the run waits for another try" in reasons[0]
    finally:
        away.rename(share)
    with stack.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == run_id).values(not_before=func.now()))
    shown = stack.until(run_id, "failed", "completed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    steps = [line["step"] for line in stack.journal(run_id) if line["event"] == "step"]
    assert len(steps) < 60, "it has continued from a checkpoint"
    files = stack.client.get(f"/v1/runs/{run_id}/artifacts").json()["data"]
    assert [one["path"] for one in files] == ["fake_model.json", "metrics.jsonl"]


def checkpoints_sent(stack: Stack, run_id: str) -> bool:
    saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    return any("remote" in one["copies"] for one in saved)


def pending_reasons(stack: Stack, run_id: str) -> list[str]:
    events = [one for one in stack.events(run_id) if one["type"] == "status" and one["to"] == "pending"]
    return [one["reason"] for one in events[1:]]


def test_an_output_is_sent_once_the_store_is_back(stack: Stack, share: Path, away: Path) -> None:
    stack.add_worker()
    run_id = stack.create({**QUICK, "steps": 30, "step_seconds": 0.3})
    stack.until(run_id, "running")
    share.rename(away)
    worker = stack.workers[-1]
    eventually(lambda: "cannot be sent now" in worker.log.read_text(), timeout=60)
    reported = eventually(lambda: [it for it in stack.events(run_id) if "does not take the output" in str(it)])
    assert reported[0]["type"] == "progress" and "next try in" in reported[0]["message"]
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
            lambda: [one["reason"] for one in stack.events(run_id) if "cannot be used now" in one.get("reason", "")],
            timeout=60,
        )
        assert "waits for another try" in reasons[0]
        assert stack.run(run_id)["status"] == "pending"
    finally:
        away.rename(share)
    stack.stop(run_id)


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ("ins_other", "belongs to another installation"),
        pytest.param("", f"has no file {INSTALLATION_MARK}", marks=pytest.mark.full),
    ],
)
def test_a_worker_with_the_store_of_another_service_or_of_none_does_not_start(
    stack: Stack, tmp_path: Path, mark: str, reason: str
) -> None:
    def online() -> set[str]:
        workers = stack.client.get("/v1/workers").json()["data"]
        return {row["id"] for row in workers if row["state"] == "online"}

    before = online()
    (tmp_path / MARK).touch()
    if mark:
        (tmp_path / INSTALLATION_MARK).write_text(mark)
    program = (
        "import sys\nfrom worker import main\nfrom worker.presence import registration\n"
        "registration._MARK_SECONDS = 0.5\nsys.exit(main.main())"
    )
    settings = stack.settings.model_copy(update={"storage": f"file://{tmp_path}", "home": tmp_path / "home"})
    ended = subprocess.run(
        [sys.executable, "-c", program], env=settings.child_environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1 and reason in ended.stderr.splitlines()[-1], ended.stderr
    assert online() <= before
