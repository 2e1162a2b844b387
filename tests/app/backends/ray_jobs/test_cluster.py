"""A Ray cluster that is full, away, slow or wrongly configured: runs wait with a reason, and nothing is lost."""

import asyncio
import logging
import socket
from typing import Any

import pytest
from sqlalchemy import Engine

from app.backends import ray_jobs
from app.backends.ray_jobs import RayJobs
from app.config import Settings
from tests.app.backends.ray_jobs.waiting_runs import add, job, waits_because
from tests.app.ray_server import RayServer
from tests.factories import make_dataset, make_run
from tests.rows import events_of, run_row
from tests.server import ThreadServer
from tests.waiting import eventually


class TestNodes:
    """The resources of the cluster only explain why a job waits."""

    @staticmethod
    def node(state: str = "ALIVE", labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
        return {"state": state, "resources_total": resources, "labels": labels or {}}

    async def test_a_run_that_no_node_can_hold_says_what_there_is(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        large = add(engine, devices_needed=8)
        elsewhere = add(engine, requirements={"kind": "cuda", "labels": ["zone=b"]})
        ray.nodes = [self.node(GPU=4.0, CPU=32.0, labels={"zone": "a"}), self.node("DEAD", GPU=8.0)]
        await jobs.do_round()
        code, message = waits_because(engine, large)
        assert code == "ray_no_node" and "has 8 GPUs: the most is 4" in message and "`resources.devices`" in message
        assert "has the label `zone=b`" in waits_because(engine, elsewhere)[1]
        ray.nodes.append(self.node(GPU=8.0, labels={"zone": "b"}))
        for _ in range(2):
            await jobs.do_round()
        for run_id in (large, elsewhere):
            assert waits_because(engine, run_id)[0] == "ray_placing"
            assert [kind for _, kind, _, _ in events_of(engine, run_id)] == ["status", "pending", "pending"]

    async def test_a_cluster_without_gpus_is_named(self, jobs: RayJobs, ray: RayServer, engine: Engine) -> None:
        run_id = add(engine)
        ray.nodes = [self.node(CPU=2.0)]
        await jobs.do_round()
        code, message = waits_because(engine, run_id)
        assert code == "ray_no_node" and "there are none" in message and "`resources.kind`" in message

    @pytest.mark.parametrize("nodes", [None, [{"state": "ALIVE"}], "none"])
    async def test_unreadable_node_list_lets_the_run_wait_for_its_place(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, nodes: Any
    ) -> None:
        run_id = add(engine)
        ray.nodes = nodes
        await jobs.do_round()
        assert waits_because(engine, run_id)[0] == "ray_placing" and ray.submissions == [job(run_id)]


class TestACluster:
    async def test_unreachable_cluster_lets_runs_wait_and_logs_once(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_id = add(engine)
        ray.loses_responses = True
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                await jobs.do_round()
            code, message = waits_because(engine, run_id)
            assert code == "ray_unreachable" and "ANNEAL_RAY_URL" in message and ray.url not in message
            ray.loses_responses = False
            await jobs.do_round()
        assert waits_because(engine, run_id)[0] == "ray_placing"
        logged = [record.message for record in caplog.records if record.message.startswith("ray: ")]
        assert ["does not respond" in one for one in logged][:2] == [True, False] and len(logged) == 3
        assert ray.url in logged[0], "for the operator"

    async def test_cluster_that_rejects_the_token_is_the_pending_reason(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        ray.token = "another"
        await jobs.do_round()
        assert "set ANNEAL_RAY_TOKEN" in waits_because(engine, run_id)[1]

    async def test_cluster_that_redirects_is_the_pending_reason(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """The token of the operator is not sent to where a redirect leads."""
        run_id = add(engine)
        ray.failing["POST"] = 307
        await jobs.do_round()
        code, message = waits_because(engine, run_id)
        assert code == "ray_unreachable" and "status 307" in message

    async def test_cluster_that_rejects_only_submissions_is_the_pending_reason(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        ray.failing["POST"] = 403
        await jobs.do_round()
        assert "set ANNEAL_RAY_TOKEN" in waits_because(engine, run_id)[1]

    async def test_slow_cluster_ends_the_round(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_jobs, "_ROUND_SECONDS", 0.5)
        run_id, ray.delay = add(engine), 60.0
        await asyncio.wait_for(jobs.do_round(), 30)
        code, message = waits_because(engine, run_id)
        assert code == "ray_unreachable" and "takes too long" in message

    async def test_cluster_whose_head_accepts_no_jobs_is_asked_for_each_and_events_are_written_once(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """As when the agent of the head is down: jobs can be read, and neither submitted nor stopped."""
        first, second, ended = (add(engine) for _ in range(3))
        await jobs.do_round()
        ray.jobs.pop(job(first))
        ray.failing["POST"] = 500
        new = add(engine)
        ray.end(job(ended), "FAILED", "No module named worker")
        for _ in range(3):
            await jobs.do_round()
        for run_id in (first, new):
            code, message = waits_because(engine, run_id)
            assert code == "ray_unreachable" and "status 500: No available agent" in message
        assert waits_because(engine, second)[0] == "ray_placing"
        assert run_row(engine, ended).lease_epoch == 1, "a job behind one that cannot be submitted is handled"
        event_counts = [
            len([1 for _, kind, _, _ in events_of(engine, run_id) if kind == "pending"]) for run_id in (first, new)
        ]
        assert event_counts == [2, 1], "one event for each change"

    async def test_slow_cluster_gets_every_job_within_some_rounds(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_jobs, "_ROUND_SECONDS", 0.9)
        expected = {job(add(engine)) for _ in range(4)}
        ray.delay = 0.3  # a submission takes twice this, so that a round is enough for one of them
        for _ in range(40):  # four on an idle machine
            await jobs.do_round()
            if set(ray.submissions) == expected:
                break
        assert set(ray.submissions) == expected

    def test_hanging_ray_request_does_not_block_other_runs(self, settings: Settings, engine: Engine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            with ThreadServer(settings.model_copy(update={"ray_url": url})) as api:
                add(engine)
                deaf.settimeout(20)
                held = deaf.accept()[0]
                dataset = make_dataset(engine, "text", ["text"])
                other = make_run(api.client, dataset)["id"]
                eventually(lambda: run_row(engine, other).notified_at, timeout=10, what="a hint")
                held.close()
