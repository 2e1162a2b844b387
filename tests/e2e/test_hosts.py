"""Promises about a run on several hosts: workers with homes of their own that share database, Redis and storage."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import TrainingStack
from tests.stack import WorkerProcess
from tests.waiting import eventually
from tests.worker.training.tiny import make_tiny_model

pytestmark = pytest.mark.usefixtures("idle")

TWO: dict[str, Any] = {"devices": 2, "hosts": 2}


class Hosts:
    """A service, and workers that each stand for a host."""

    def __init__(self, home: Path) -> None:
        self.stack = TrainingStack(home, lease_seconds=9)
        make_tiny_model(self.stack.settings.models_folder / "plain", hidden=64)
        self.homes: dict[WorkerProcess, Path] = {}

    def add(self, count: int = 1, **values: Any) -> None:
        """Start workers, each with a slot; wait until they have loaded what they fork training processes from."""
        for _ in range(count):
            home = self.stack.home / f"host-{len(self.homes)}"
            home.mkdir()
            values = {"slots": 1, "group_interface": "lo", **values}
            self.homes[self.stack.add_worker(home=home, **values)] = home

    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.homes if worker.process.poll() is None]

    def id_of(self, worker: WorkerProcess) -> str:
        workers = self.stack.client.get("/v1/workers").json()["data"]
        return next(str(one["id"]) for one in workers if one["pid"] == worker.process.pid)

    def of(self, run_id: str) -> tuple[WorkerProcess, list[WorkerProcess]]:
        """The lead of a live run, and the other workers that train it."""
        lead = self.lead_id(run_id)
        workers = self.stack.client.get("/v1/workers").json()["data"]
        pids = {one["pid"]: one["id"] for one in workers if run_id in one["runs"]}
        those = {pids[worker.process.pid]: worker for worker in self.alive() if worker.process.pid in pids}
        return those.pop(lead), list(those.values())

    def lead_id(self, run_id: str) -> str:
        return str(self.stack.run(run_id)["worker_id"])

    def trainers(self, worker: WorkerProcess) -> list[int]:
        """Ids of the training processes of a worker."""
        records = (self.homes[worker] / "run" / "trainers").glob("*.json")
        return [json.loads(path.read_text())["trainer"]["pid"] for path in records]

    def start(self, resources: dict[str, Any] | None = None, **config: Any) -> str:
        config = {
            "base_model": "plain", "method": "lora", "lora_r": 4, "learning_rate": 1e-2, "max_seq_length": 64,
            "packing": False, "batch_size": 2, "max_steps": 100_000, "save_steps": 10, "logging_steps": 1, **config,
        }  # fmt: skip
        return self.stack.create(
            config=config, backend="celery", dataset_id=self.stack.chats, resources=resources or TWO
        )

    def reasons(self, run_id: str) -> list[str]:
        return [str(event["reason"]) for event in self.stack.events(run_id) if event["type"] == "status"]

    def completes_again(self, run_id: str, earlier: list[int], timeout: float = 120) -> dict[str, Any]:
        """Wait until another attempt has started, with no process of the earlier one left, and has completed."""
        eventually(lambda: self.stack.run(run_id)["attempt"] > 1, timeout=timeout, what="another attempt")
        assert [pid for pid in earlier if is_running(pid)] == []
        shown = self.stack.until(run_id, "completed", "failed", timeout=timeout)
        assert shown["status"] == "completed", shown["error_message"]
        return shown


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    hosts.add(2)
    yield hosts
    hosts.stack.close()


@pytest.fixture
def idle(hosts: Hosts) -> Iterator[None]:
    """Leave nothing in training, no training process, and two workers."""
    yield
    live = {"status": ["pending", "initializing", "running", "checkpointing"]}
    for run in hosts.stack.client.get("/v1/runs", params=live).json()["data"]:
        hosts.stack.stop(run["id"], save_checkpoint=False)
        hosts.stack.until(run["id"], "cancelled", "completed", "failed", timeout=60)
    eventually(lambda: all(hosts.trainers(worker) == [] for worker in hosts.alive()), what="no training process")
    hosts.add(2 - len(hosts.alive()))


def test_two_hosts_train_as_one_process_with_twice_the_batch(hosts: Hosts) -> None:
    same: dict[str, Any] = {"lora_dropout": 0.0, "max_steps": 6, "save_steps": 3, "eval_split": 0.1, "eval_steps": 3}
    run_id = hosts.start(**same)
    stack = hosts.stack
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    assert (shown["resources"]["hosts"], shown["attempt"]) == (2, 1)
    lines = stack.client.get(f"/v1/runs/{run_id}/logs").text.splitlines()
    printed = [line for line in lines if "  loss " in line]
    assert len(printed) == 6 and not any(line.startswith("[rank") for line in printed), "one process prints the metrics"
    alone = hosts.start({"devices": 1}, batch_size=4, **same)
    shown = stack.until(alone, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    together, single = stack.steps(run_id), stack.steps(alone)
    assert [sorted(rows) for _, rows in together.values()] == [sorted(rows) for _, rows in single.values()]
    losses = [[float.fromhex(loss) for loss, _ in steps.values()] for steps in (together, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    files = {file["path"] for file in stack.client.get(f"/v1/runs/{run_id}/artifacts").json()["data"]}
    assert "adapter_model.safetensors" in files


def test_run_on_two_hosts_listens_on_its_interface_only_and_resumes_exactly(
    hosts: Hosts,
) -> None:
    run_id = hosts.start(base_model="tiny")
    hosts.stack.until_step(run_id, 12, timeout=120)
    before = [pid for worker in hosts.alive() for pid in hosts.trainers(worker)]
    assert len(before) == 2
    connections = [one for pid in before for one in psutil.Process(pid).net_connections("inet")]
    listening = {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}, "rank 0 and gloo listen"
    hosts.stack.stop(run_id)
    stopped = hosts.stack.until(run_id, "cancelled", "failed", timeout=60)
    assert stopped["status"] == "cancelled", stopped["error_message"]
    eventually(lambda: not any(map(is_running, before)), timeout=60, what="the processes of both hosts have ended")
    child = hosts.stack.client.post(f"/v1/runs/{run_id}/resume", json={"stop_after_steps": 3}).json()
    assert child["resources"]["hosts"] == 2
    shown = hosts.stack.until(child["id"], "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    facts = [event for event in hosts.stack.events(child["id"]) if event["type"] == "config"][-1]["facts"]
    assert facts["fidelity"] == "exact", facts["fidelity_reasons"]


def test_a_killed_process_of_another_host_ends_all_and_is_named(hosts: Hosts) -> None:
    with hosts.stack.pace.slow_from(11):
        run_id = hosts.start(max_steps=20, gradient_accumulation_steps=2)
        hosts.stack.until_step(run_id, 11, timeout=120)
        lead, (other,) = hosts.of(run_id)
        before = hosts.trainers(lead) + hosts.trainers(other)
        os.kill(hosts.trainers(other)[0], signal.SIGKILL)
    hosts.completes_again(run_id, before)
    assert any("rank 1 ended with signal 9" in reason for reason in hosts.reasons(run_id)), hosts.reasons(run_id)


@pytest.mark.full
def test_a_killed_worker_of_a_part_is_replaced_once_its_lease_has_expired(hosts: Hosts) -> None:
    hosts.add()
    run_id = hosts.start(max_steps=60)
    hosts.stack.until_step(run_id, 15, timeout=120)
    lead, (other,) = hosts.of(run_id)
    before, lost = hosts.trainers(lead) + hosts.trainers(other), hosts.id_of(other)
    other.kill()
    hosts.completes_again(run_id, before)
    with hosts.stack.engine.connect() as connection:
        query = "SELECT lease_epoch, worker_id, outcome FROM run_parts WHERE run_id = %(run)s ORDER BY lease_epoch"
        first, *rest = connection.exec_driver_sql(query, {"run": run_id}).all()
    assert (first.worker_id, first.outcome) == (lost, None), "reaped, since its worker stored no end"
    assert any(f"worker {lost}, which trained rank 1 of the run, was lost" in why for why in hosts.reasons(run_id))
    assert lost not in {one.worker_id for one in rest}


@pytest.mark.full
def test_a_killed_worker_of_the_lead_ends_the_other_parts_and_the_run_goes_on(hosts: Hosts) -> None:
    hosts.add()
    run_id = hosts.start(max_steps=60)
    hosts.stack.until_step(run_id, 15, timeout=120)
    lead, (other,) = hosts.of(run_id)
    before = hosts.trainers(lead) + hosts.trainers(other)
    lead.kill()
    hosts.completes_again(run_id, before)
    assert any("worker lost" in reason for reason in hosts.reasons(run_id))


@pytest.mark.full
def test_a_worker_of_a_part_that_is_frozen_for_three_lease_times_writes_nothing_afterwards(hosts: Hosts) -> None:
    hosts.add()
    # More steps than the two hosts train until the lease of the frozen worker has expired.
    run_id = hosts.start(max_steps=round(250 * hosts.stack.slowness))
    hosts.stack.until_step(run_id, 15, timeout=120)
    lead, (other,) = hosts.of(run_id)
    before, lost = hosts.trainers(lead) + hosts.trainers(other), hosts.id_of(other)
    frozen_at = time.monotonic()
    other.freeze()
    try:
        hosts.completes_again(run_id, before)
        lease = hosts.stack.settings.lease_seconds
        eventually(lambda: time.monotonic() - frozen_at > 3 * lease, timeout=5 * lease, what="three lease times")
        said, seen = len(other.log.read_text()), written(hosts, run_id)
    finally:
        other.thaw()
    eventually(lambda: "its part has ended" in other.log.read_text()[said:], timeout=60, what="the part has ended")
    now = written(hosts, run_id)
    assert [what for what in now if now[what] != seen[what]] == []
    eventually(lambda: hosts.trainers(other) == [], what="no training process")
    assert any(f"worker {lost}, which trained rank 1 of the run, was lost" in why for why in hosts.reasons(run_id))


def written(hosts: Hosts, run_id: str) -> dict[str, Any]:
    """Everything that is stored of a run."""
    paths = hosts.stack.settings.storage_root.glob(f"runs/{run_id}/**/*")
    files = {path: path.stat().st_mtime_ns for path in paths if path.is_file()}
    queries = {
        "run": "SELECT status, attempt, lease_epoch, event_seq, current_step FROM runs WHERE id = %(run)s",
        "events": "SELECT seq, type, data::text FROM run_events WHERE run_id = %(run)s ORDER BY seq",
        "parts": "SELECT lease_epoch, ended_at, outcome::text FROM run_parts WHERE run_id = %(run)s ORDER BY 1",
        "checkpoints": "SELECT id, deleted_at FROM checkpoints WHERE run_id = %(run)s ORDER BY 1",
    }
    with hosts.stack.engine.connect() as connection:
        rows = {what: connection.exec_driver_sql(query, {"run": run_id}).all() for what, query in queries.items()}
    return {**rows, "files": files}


@pytest.mark.full
def test_a_rank_of_another_host_that_hangs_while_it_loads_is_found_and_named(hosts: Hosts) -> None:
    for worker in hosts.alive():
        assert worker.terminate() == 0
    hosts.add(2, hang_seconds=6.0 * hosts.stack.slowness)
    run_id = hosts.start(max_steps=20)
    first = eventually(lambda: [pid for worker in hosts.alive() for pid in hosts.trainers(worker)], timeout=60)
    lead, (other,) = hosts.of(run_id)
    (hanging,) = eventually(lambda: hosts.trainers(other), timeout=60, what="the process of the other host")
    os.kill(hanging, signal.SIGSTOP)
    assert not [line for line in hosts.stack.journal(run_id) if line["event"] == "step"], "it still loads"
    hosts.completes_again(run_id, [*first, hanging, *hosts.trainers(lead)])
    (reason,) = [why for why in hosts.reasons(run_id) if "hung" in why]
    assert "during loading and was killed" in reason
    assert f"the others waited for rank 1 on worker {hosts.id_of(other)}; the process of rank 1 was suspended" in reason


@pytest.mark.full
def test_a_worker_of_a_part_that_shuts_down_releases_the_run_with_a_checkpoint(hosts: Hosts) -> None:
    hosts.add()
    run_id = hosts.start()
    hosts.stack.until_step(run_id, 15, timeout=120)
    lead, (other,) = hosts.of(run_id)
    before, name = hosts.trainers(lead) + hosts.trainers(other), hosts.id_of(other)
    assert other.terminate() == 0
    eventually(lambda: hosts.stack.run(run_id)["attempt"] == 2, timeout=60, what="another attempt")
    assert not any(map(is_running, before))
    assert any(f"worker {name}" in reason and "shutting down" in reason for reason in hosts.reasons(run_id))
    with hosts.stack.engine.connect() as connection:
        query = "SELECT lost_count, checkpoint_step FROM runs WHERE id = %(run)s"
        row = connection.exec_driver_sql(query, {"run": run_id}).one()
    assert row.lost_count == 0 and row.checkpoint_step > 10


@pytest.mark.full
def test_a_divided_model_trains_and_resumes_exactly_on_two_hosts(hosts: Hosts) -> None:
    run_id = hosts.start({**TWO, "sharding": "full"}, method="full", lora_r=None, max_steps=40)
    hosts.stack.until_step(run_id, 15, timeout=120)
    lead, (other,) = hosts.of(run_id)
    before = hosts.trainers(lead) + hosts.trainers(other)
    os.kill(hosts.trainers(lead)[0], signal.SIGKILL)
    hosts.completes_again(run_id, before)
    facts = [event for event in hosts.stack.events(run_id) if event["type"] == "config"][-1]["facts"]
    assert facts["fidelity"] == "exact", facts["fidelity_reasons"]
