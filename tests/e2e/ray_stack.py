"""A service without workers of its own, whose API submits jobs to a local Ray cluster of two nodes."""

from pathlib import Path
from typing import Any

from tests.e2e.conftest import QLORA, TrainingStack
from tests.ports import free_port
from tests.ray_cluster import TOKEN, RayCluster, RayNode
from tests.waiting import eventually

LONG = {"max_steps": 100_000, "save_steps": 200}
LIVE = ["pending", "initializing", "running", "checkpointing"]

STEPS = 120


class RayStack(TrainingStack):
    """A stack with a cluster, each of whose nodes has so many CPUs and, if wanted, a home of its own."""

    def __init__(self, home: Path, *, cpus: int = 1, own_homes: bool = False, **values: Any) -> None:
        dashboard = free_port()
        super().__init__(home, lease_seconds=6, ray_url=f"http://127.0.0.1:{dashboard}", ray_token=TOKEN, **values)
        self.cluster = RayCluster(self.settings, dashboard, cpus=cpus, own_homes=own_homes)

    def train(self, devices: int = 1, labels: tuple[str, ...] = ("zone=a",), **config: Any) -> str:
        """Create a QLoRA run of backend `ray` and return its id."""
        resources = {"kind": "cpu", "labels": list(labels), "devices": devices}
        config = {**QLORA, "max_steps": STEPS, "save_steps": 20, **config}
        return self.create(config=config, backend="ray", dataset_id=self.chats, resources=resources)

    def until_training(self, run_id: str, step: int = 1, timeout: float = 300) -> dict[str, Any]:
        """Wait until the API shows a step; the journal of a node may be in its own home."""
        return eventually(lambda: (shown := self.run(run_id))["current_step"] >= step and shown, timeout)

    def node_of_worker(self, run_id: str) -> RayNode:
        """Return the node of the worker that trains a run."""
        worker_id = self.run(run_id)["worker_id"]
        workers = self.client.get("/v1/workers").json()["data"]
        (pid,) = [one["pid"] for one in workers if one["id"] == worker_id]
        return next(node for node in self.cluster.nodes if node.holds(pid))

    def completed(self, run_id: str, timeout: float = 300) -> dict[str, Any]:
        """Wait until a run is completed."""
        shown = self.until(run_id, "completed", "failed", "cancelled", timeout=timeout)
        assert shown["status"] == "completed", (shown["error_message"], self.logs(run_id))
        return shown

    def waits(self, run_id: str, code: str, timeout: float = 60) -> str:
        """Wait until a run waits for that reason; return the message."""

        def message() -> str | None:
            reason = self.run(run_id)["pending_reason"]
            return reason["message"] if reason and reason["code"] == code else None

        return eventually(message, timeout, what=f"{run_id} waits: {code}")

    def reasons(self, run_id: str) -> list[str]:
        """Return the codes of the reasons why a run has waited."""
        return [event["code"] for event in self.events(run_id) if event["type"] == "pending"]

    def job_status(self, run_id: str, epoch: int = 0) -> str | None:
        """Return the status of a job of a run in Ray; None if there is none."""
        job = self.cluster.jobs().get(f"anneal-{run_id}-{epoch}")
        return None if job is None else str(job["status"])

    def logs(self, run_id: str) -> str:
        """Return the output of the jobs of a run."""
        return "\n".join(self.cluster.log_of(job)[-2000:] for job in self.cluster.jobs() if run_id in job)

    def settle(self) -> None:
        """Stop what is left of a test, and wait until the cluster is free."""
        for run in self.client.get("/v1/runs", params={"status": LIVE}).json()["data"]:
            self.stop(run["id"], save_checkpoint=False)
            self.until(run["id"], "cancelled", "completed", "failed", timeout=60)
        eventually(lambda: not self._live_jobs(), timeout=60, what="all jobs ended")

    def replace(self, node: RayNode) -> None:
        """Kill a node and add another."""
        node.stop()
        self.cluster.nodes.remove(node)
        self.cluster.nodes.append(self.cluster.add_node())

    def close(self) -> None:
        """Stop all processes."""
        self.cluster.stop()
        super().close()

    def _live_jobs(self) -> list[str]:
        return [name for name, job in self.cluster.jobs().items() if job["status"] in ("PENDING", "RUNNING")]
