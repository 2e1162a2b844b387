"""A worker that was started for one run takes that and ends, or ends with a line that says why not."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.config import Settings
from app.infra.ids import new_id
from app.workers.status_files import read_statuses
from tests import programs
from tests.rows import add_run, run_row
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def storage(settings: Settings) -> Path:
    """The folder that API and nodes share."""
    (settings.storage_root / "datasets").mkdir(parents=True)
    return settings.storage_root


def start(
    settings: Settings, run_id: str, epoch: int = 0, code: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the worker of a run to its end, by its own program or by `code` that changes something first."""
    command = ["worker.single_run"] if code is None else ["tests.code_program", code]
    return run_program([*command, run_id, str(epoch)], cold(settings) | environment)


def cold(settings: Settings) -> dict[str, str]:
    """The environment of a worker that keeps no zygote."""
    return {**settings.child_environment(), "ANNEAL_LAUNCH": "cold"}


def run_program(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a module with arguments to its end."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        code = programs.start(command[0], command[1:], environment, output, errors).wait(timeout=120)
        return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())


def add(engine: Engine, **values: Any) -> str:
    run_id: str = add_run(engine, backend="ray", **values).id
    return run_id


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1]


def test_it_claims_its_run_alone_and_ends_with_the_attempt(settings: Settings, engine: Engine) -> None:
    urgent, mine = add(engine, priority=9), add(engine)
    other = add_run(engine).id
    done = start(settings, mine)
    assert done.returncode == 0, done.stderr
    row = run_row(engine, mine)
    assert (row.attempt, row.lease_owner) == (1, None), "one attempt, which fails since there is no data"
    assert {run_row(engine, one).status for one in (urgent, other)} == {"pending"}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT state, backends FROM workers")).all() == [("offline", ["ray"])]


def test_a_storage_that_is_not_mounted_is_named(settings: Settings, engine: Engine, storage: Path) -> None:
    run_id = add(engine)
    shutil.rmtree(storage)
    done = start(settings, run_id)
    assert done.returncode == 1 and f"the storage {storage} is not available" in last_line(done)
    assert run_row(engine, run_id).status == "pending"


def test_a_run_that_waits_no_more_needs_nothing(settings: Settings, engine: Engine) -> None:
    lost = add(engine)
    for run_id, epoch in ((lost, 7), (new_id("run"), 0)):
        assert start(settings, run_id, epoch).returncode == 0
    assert run_row(engine, lost).status == "pending"


def test_a_machine_that_does_not_fit_is_named(settings: Settings, engine: Engine) -> None:
    run_id = add(engine, requirements={"kind": "cuda"})
    done = start(settings, run_id, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "needs a device of kind `cuda`" in last_line(done)
    assert run_row(engine, run_id).status == "pending"


def test_missing_and_wrong_settings_are_named_without_their_values(settings: Settings) -> None:
    without = {"ANNEAL_DATABASE_URL": "", "ANNEAL_REDIS_URL": "", "ANNEAL_HOME": str(settings.home / "none")}
    assert "ANNEAL_DATABASE_URL" in last_line(start(settings, "run_1", **without))
    done = start(settings, "run_1", ANNEAL_STORAGE="s3://ada:hunter2@bucket", ANNEAL_LEASE_SECONDS="soon")
    assert done.returncode == 1 and "ANNEAL_LEASE_SECONDS" in last_line(done) and "hunter2" not in done.stderr


def test_a_database_that_cannot_be_reached_is_named(settings: Settings) -> None:
    program = "import sys\nfrom worker import single_run\nsingle_run._DATABASE_SECONDS = 0\nsys.exit(single_run.main())"
    done = start(settings, "run_1", code=program, ANNEAL_DATABASE_URL="postgresql://ada:hunter2@127.0.0.1:1/x")
    assert done.returncode == 75 and f"cannot be reached from {os.uname().nodename}" in last_line(done)
    assert "hunter2" not in done.stderr


def test_a_quota_that_is_full_meanwhile_is_no_failure(settings: Settings, engine: Engine) -> None:
    """It was free when the job was submitted."""
    run_id = add(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE experiments SET max_devices = 0"))
    program = "import sys\nfrom worker import single_run\nsingle_run._CLAIM_SECONDS = 0\nsys.exit(single_run.main())"
    done = start(settings, run_id, code=program)
    assert done.returncode == 75 and "a quota" in last_line(done), done.stderr
    assert run_row(engine, run_id).status == "pending"


def test_a_database_that_fails_after_the_start_is_no_failure(settings: Settings, engine: Engine) -> None:
    """As when another server takes over: the claim and the look at the run fail, and both are tried again."""
    run_id = add(engine)
    program = """
import sys
from sqlalchemy.exc import OperationalError
from worker import single_run
from worker.attempts import supervisor
failures = []
claim, waiting = supervisor.claim, single_run._needs_if_waiting
def away(*_):
    failures.append(1)
    raise OperationalError("SELECT 1", None, Exception("the server ends"))
supervisor.claim = lambda context: claim(context) if len(failures) > 1 else None
single_run._needs_if_waiting = lambda *given: away() if len(failures) < 2 else waiting(*given)
sys.exit(single_run.main())
"""
    done = start(settings, run_id, code=program)
    assert done.returncode == 0, done.stderr
    assert run_row(engine, run_id).attempt == 1


def test_a_check_that_hangs_ends_it(settings: Settings) -> None:
    """Otherwise the job would keep its GPUs for ever, and its run would wait."""
    program = """
import sys, threading
from worker import single_run
from worker.attempts import device_checks
assert single_run._UNCLAIMED_SECONDS == 600
single_run._UNCLAIMED_SECONDS = 1
device_checks.wait_for_devices = lambda context: threading.Event().wait()
sys.exit(single_run.main())
"""
    done = start(settings, "run_1", code=program)
    assert done.returncode == 75 and "hangs here" in last_line(done)


def test_the_command_that_drains_a_machine_ends_it(settings: Settings, engine: Engine, storage: Path) -> None:
    """As `docs/operations/ray.md` prints it for a node that leaves the cluster."""
    run_id = add(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE experiments SET max_devices = 0"))
    worker = programs.start("worker.single_run", [run_id, "0"], cold(settings), storage / "log")
    try:
        eventually(lambda: any(note.process.exists for note in read_statuses(settings.home)), timeout=60)
        line = "anneal worker --drain --timeout 0"
        assert line in (Path(__file__).parents[2] / "docs/operations/ray.md").read_text()
        done = run_program(["app.cli.main", *line.split()[1:]], cold(settings))
        assert done.returncode == 0 and "Drained: 1 worker ended." in done.stdout, done.stdout
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
    assert run_row(engine, run_id).status == "pending"
