"""The loop that submits jobs to a Ray cluster: each waiting run has one, whatever the cluster does."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.backends import ray_api, ray_jobs
from app.backends.ray_jobs import RayJobs
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.holds import StoredHolds, StoredQuotaHold
from app.runs.queue.holds_table import store_holds
from app.runs.state import machine
from app.tables.runs import Run
from tests import rows
from tests.app.ray_server import RayServer, ray_server
from tests.factories import make_dataset, make_run
from tests.rows import add_key, add_run, add_worker, events_of, run_row
from tests.server import ThreadServer
from tests.waiting import eventually


@pytest.fixture
def ray() -> Iterator[RayServer]:
    with ray_server() as server:
        yield server


@pytest.fixture
def settings(settings: Settings, ray: RayServer) -> Settings:
    return settings.model_copy(update={"ray_url": ray.url, "ray_token": "sesame"})


@pytest.fixture
async def jobs(settings: Settings) -> AsyncIterator[RayJobs]:
    async for running_jobs in loop_of(settings):
        yield running_jobs


async def loop_of(settings: Settings) -> AsyncIterator[RayJobs]:
    """A loop that does a round when the test says so."""
    own = async_engine(settings.database_url or "", pool_size=2)
    loop = RayJobs(own, Broker(settings), settings)
    yield loop
    await loop.stop()
    await own.dispose()


def add(engine: Engine, **values: Any) -> str:
    """A pending run of the backend; its id."""
    run_id: str = add_run(engine, backend="ray", **values).id
    return run_id


def job(run_id: str, epoch: int = 0) -> str:
    return f"anneal-{run_id}-{epoch}"


def waits_because(engine: Engine, run_id: str) -> tuple[str, str]:
    reason = run_row(engine, run_id).pending_reason
    return reason["code"], reason["message"]


def claim(engine: Engine, run_id: str, epoch: int = 0) -> Any:
    """Claim the run as the worker that its job has started."""
    worker = add_worker(engine, devices=4, backends=["ray"])
    return rows.claim(engine, worker, only_run=(run_id, epoch))


def execute(engine: Engine, statement: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement) if isinstance(statement, str) else statement)


class TestSubmission:
    async def test_a_waiting_run_has_one_job_however_many_rounds_there_are(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine, devices_needed=2, requirements={"kind": "cuda", "labels": ["zone=a b;c"]})
        for _ in range(3):
            await jobs.do_round()
        assert ray.submissions == [job(run_id)] and ray.tokens == {"Bearer sesame"}
        command = f"python -m worker.ray_node {run_id} 0 --devices 2 --kind cuda --label 'zone=a b;c'"
        assert ray.bodies[0]["entrypoint"] == command
        code, message = waits_because(engine, run_id)
        assert code == "ray_placing" and "2 free GPUs" in message and job(run_id) in message
        assert [kind for _, kind, _, _ in events_of(engine, run_id)] == ["status", "pending"]

    async def test_job_contains_no_secret(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, settings: Settings
    ) -> None:
        add(engine)
        await jobs.do_round()
        (body,) = ray.bodies
        assert body["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "21"}}
        sent = json.dumps(body)
        secret = (settings.database_url, settings.redis_url, "sesame", str(settings.storage))
        assert not any(one and one in sent for one in secret)

    async def test_a_round_without_a_run_of_the_backend_opens_one_connection_and_asks_the_cluster_nothing(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        add_run(engine)
        await jobs.do_round()
        with engine.connect() as connection:
            names = text(
                "SELECT application_name FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'anneal-api'"
            )
            assert connection.scalars(names).all() == ["anneal-api"]
        assert ray.tokens == set()

    async def test_replicas_at_once_submit_it_once(self, ray: RayServer, settings: Settings, engine: Engine) -> None:
        run_id = add(engine)
        ray.delay = 0.2
        replicas = [loop_of(settings) for _ in range(3)]
        loops = [await anext(one) for one in replicas]
        await asyncio.gather(*(one.do_round() for one in loops))
        assert ray.submissions == [job(run_id)]
        for replica in replicas:
            await anext(replica, None)

    async def test_a_lost_response_is_looked_up_and_not_asked_for_again(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        real = ray_api.RayApi.submit_job

        async def submit(api: Any, *arguments: Any) -> None:
            ray.loses_responses = True
            try:
                await real(api, *arguments)
            finally:
                ray.loses_responses = False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_api.RayApi, "submit_job", submit)
            await jobs.do_round()
        assert waits_because(engine, run_id)[0] == "ray_unreachable" and ray.submissions == [job(run_id)]
        await jobs.do_round()
        assert waits_because(engine, run_id)[0] == "ray_placing" and ray.submissions == [job(run_id)]

    async def test_a_submission_that_arrives_after_its_run_was_stopped_is_stopped(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """Ray went on with a request that had timed out."""
        run_id = add(engine)
        await jobs.do_round()
        created = ray.jobs.pop(job(run_id))
        execute(engine, machine.request_stop(run_id, "checkpoint"))
        execute(engine, f"DELETE FROM runs WHERE id = '{run_id}'")
        for _ in range(2):
            await jobs.do_round()
        ray.jobs[job(run_id)] = created
        await jobs.do_round()
        assert ray.stopped == [job(run_id)]

    async def test_a_job_that_never_arrives_is_forgotten_after_a_while(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        await jobs.do_round()
        ray.jobs.clear()
        execute(engine, machine.request_stop(run_id, "checkpoint"))
        await jobs.do_round()
        execute(engine, "UPDATE ray_jobs SET left_at = left_at - interval '2 minutes'")
        await jobs.do_round()
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM ray_jobs")) == 0

    async def test_an_id_that_exists_already_is_the_job(self, settings: Settings, ray: RayServer) -> None:
        api = ray_api.RayApi(ray.url, None)
        await api.submit_job("anneal-run-1", "true", {})
        await api.submit_job("anneal-run-1", "true", {})
        assert ray.submissions == ["anneal-run-1"] * 2
        await api.close()

    async def test_a_proxy_of_the_environment_is_not_used(
        self, ray: RayServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        api = ray_api.RayApi(ray.url, None)
        assert await api.get_job("anneal-run-1") is None
        await api.close()

    async def test_number_of_waiting_jobs_is_limited_and_higher_priority_is_first(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_jobs, "_MOST_WAITING", 2)
        low, high, middle = (add(engine, priority=priority) for priority in (0, 9, 5))
        await jobs.do_round()
        assert set(ray.submissions) == {job(high), job(middle)}
        assert waits_because(engine, low)[0] == "ray_queued"
        assert claim(engine, high)
        await jobs.do_round()
        assert set(ray.submissions) == {job(high), job(middle), job(low)}

    async def test_a_run_of_higher_priority_takes_the_place_of_a_lower_one(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        waiting = [add(engine, devices_needed=64 + number) for number in range(16)]
        await jobs.do_round()
        urgent = add(engine, priority=5)
        await jobs.do_round()
        assert ray.submissions[16:] == [job(urgent)]
        (given_up,) = [run_id for run_id in waiting if run_row(engine, run_id).lease_epoch == 1]
        row = run_row(engine, given_up)
        assert (row.status, row.lost_count) == ("pending", 0) and row.pending_reason["code"] == "ray_queued"
        execute(engine, "UPDATE ray_jobs SET left_at = left_at - interval '1 minute'")
        await jobs.do_round()
        assert ray.stopped == [job(given_up)] and len(ray.submissions) == 17

    async def test_runs_that_cannot_be_placed_do_not_keep_others_waiting(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """Whatever their priority: after five minutes they give their places up for as long."""
        large = [add(engine, devices_needed=64 + number, priority=9) for number in range(16)]
        small = add(engine)
        await jobs.do_round()
        assert len(ray.submissions) == 16 and waits_because(engine, small)[0] == "ray_queued"
        execute(engine, "UPDATE ray_jobs SET added_at = added_at - interval '6 minutes'")
        for _ in range(2):
            await jobs.do_round()
        assert ray.submissions[16:] == [job(small)]
        rows = [run_row(engine, run_id) for run_id in large]
        assert sum(row.lease_epoch for row in rows) == 1 and {row.lost_count for row in rows} == {0}

    async def test_a_few_jobs_stand_for_all_runs_of_an_owner_that_need_the_same(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        large = [add(engine, devices_needed=64) for _ in range(16)]
        small = add(engine)
        await jobs.do_round()
        assert job(small) in ray.submissions and len(ray.submissions) == 5
        assert waits_because(engine, large[-1])[0] == "ray_queued"
        execute(engine, "UPDATE ray_jobs SET added_at = added_at - interval '6 minutes'")
        await jobs.do_round()
        assert len(ray.submissions) == 5, "to change places among them would be of no use"

    async def test_thousands_of_runs_that_need_the_same_do_not_hide_those_behind_them(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        first = add(engine, created_by="many", requirements={"labels": ["zone=nowhere"]})
        columns = [column.name for column in Run.__table__.columns if column.computed is None and column.name != "id"]
        copied = ", ".join(f'"{name}"' for name in columns)
        execute(
            engine,
            f"INSERT INTO runs (id, {copied}) SELECT 'run_' || lpad(n::text, 26, '0'), {copied} "
            f"FROM runs, generate_series(1, 1200) AS n WHERE id = '{first}'",
        )
        same_owner, other = add(engine, created_by="many"), add(engine, created_by="other")
        await jobs.do_round()
        assert len(ray.submissions) == 6 and {job(same_owner), job(other)} < set(ray.submissions)

    async def test_while_the_queue_is_paused_none_is_submitted_and_one_that_waits_is_withdrawn(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        submitted = add(engine)
        await jobs.do_round()
        execute(engine, "INSERT INTO queue_pause (paused_by) VALUES ('ada')")
        new = add(engine)
        await jobs.do_round()
        execute(engine, "UPDATE ray_jobs SET left_at = left_at - interval '1 minute'")
        await jobs.do_round()
        assert ray.submissions == [job(submitted)] and ray.stopped == [job(submitted)]
        assert {waits_because(engine, run_id)[0] for run_id in (submitted, new)} == {"queue_paused"}
        assert run_row(engine, submitted).lost_count == 0
        execute(engine, "DELETE FROM queue_pause")
        await jobs.do_round()
        assert set(ray.submissions[1:]) == {job(submitted, 1), job(new)}

    async def test_a_key_that_has_used_its_budget_gets_no_job(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine, created_by=add_key(engine, 4))
        execute(engine, "UPDATE api_keys SET max_device_hours = 0")
        await jobs.do_round()
        assert ray.submissions == [] and waits_because(engine, run_id)[0] == "budget"

    async def test_a_quota_counts_the_jobs_that_are_submitted(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        first, second = add(engine, devices_needed=2), add(engine, devices_needed=2)
        execute(engine, "UPDATE experiments SET max_devices = 3")
        experiment = run_row(engine, first).experiment_id
        execute(engine, f"UPDATE runs SET experiment_id = '{experiment}'")
        await jobs.do_round()
        assert ray.submissions == [job(first)]
        assert waits_because(engine, second)[0] == "quota"

    async def test_a_job_that_waits_gives_its_part_of_a_quota_up_as_it_does_its_place(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """Otherwise a run that Ray cannot place would keep all others of its key waiting."""
        key = add_key(engine, 4)
        large = [add(engine, devices_needed=2, requirements={"labels": [f"a={n}"]}, created_by=key) for n in range(2)]
        await jobs.do_round()
        small, multi_device = add(engine, created_by=key), add(engine, created_by=key, devices_needed=5, priority=9)
        await jobs.do_round()
        assert set(ray.submissions) == {job(one) for one in large}
        assert waits_because(engine, small)[0] == waits_because(engine, multi_device)[0] == "quota"
        urgent = add(engine, created_by=key, devices_needed=4, priority=1)
        await jobs.do_round()
        assert ray.submissions[2:] == [job(urgent)], "of higher priority; it needs the part of both"
        assert [run_row(engine, one).lease_epoch for one in large] == [1, 1]
        assert [waits_because(engine, one)[0] for one in large] == ["ray_queued"] * 2

    async def test_an_old_job_that_waits_gives_its_part_of_a_quota_up_to_one_that_needs_others(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        key = add_key(engine, 4)
        large = add(engine, devices_needed=4, created_by=key, priority=5)
        await jobs.do_round()
        small = add(engine, created_by=key)
        await jobs.do_round()
        assert ray.submissions == [job(large)]
        execute(engine, "UPDATE ray_jobs SET added_at = added_at - interval '6 minutes'")
        await jobs.do_round()
        assert ray.submissions[1:] == [job(small)]
        assert run_row(engine, large).status == "pending" and waits_because(engine, large)[0] == "ray_queued"

    async def test_a_quota_that_is_kept_for_an_earlier_run_gets_no_job_of_a_later_one(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        earlier, large = add(engine), add_run(engine, devices_needed=4).id
        small, next_one = add(engine), add(engine)
        execute(engine, f"UPDATE runs SET experiment_id = '{run_row(engine, large).experiment_id}'")
        execute(engine, "UPDATE experiments SET max_devices = 4")
        hold = StoredQuotaHold(quota_id=run_row(engine, large).experiment_id, run_id=large, starts_at=None, spare=1)
        with engine.begin() as connection:
            store_holds(connection, StoredHolds(quota_holds=[hold]))
        for _ in range(2):
            await jobs.do_round()
            assert ray.submissions == [job(earlier), job(small)]
        code, message = waits_because(engine, next_one)
        assert code == "quota" and f"kept for run {large}" in message
        execute(engine, "UPDATE queue_plan SET made_at = now() - interval '31 s'")
        await jobs.do_round()
        assert ray.submissions[2:] == [job(next_one)]

    async def test_a_run_that_waits_after_a_loss_has_its_job_when_it_is_due(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        add(engine)
        execute(engine, "UPDATE runs SET not_before = now() + interval '1 hour'")
        await jobs.do_round()
        assert ray.submissions == []


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


class TestAJob:
    async def test_job_that_starts_no_worker_is_retried_with_the_reason(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, settings: Settings
    ) -> None:
        run_id = add(engine, max_restarts=1)
        await jobs.do_round()
        said = "logs:\nTraceback\n\x1b[31mNo module named worker, see https://ada:pass@host/x\n\n"
        ray.end(job(run_id), "FAILED", said, exit_code=1)
        await jobs.do_round()
        row = run_row(engine, run_id)
        code, message = waits_because(engine, run_id)
        assert (row.status, row.lease_epoch, row.lost_count) == ("pending", 1, 1) and code == "ray_job_failed"
        assert "No module named worker, see https://ada:[redacted]@host/x" in message and "\x1b" not in message
        await jobs.do_round()
        assert ray.submissions == [job(run_id)], "not before a pause"
        execute(engine, "UPDATE runs SET not_before = now()")
        await jobs.do_round()
        assert ray.submissions == [job(run_id), job(run_id, 1)]
        ray.end(job(run_id, 1), "FAILED", exit_code=127)
        await jobs.do_round()
        row = run_row(engine, run_id)
        assert (row.status, row.error_code) == ("failed", "worker_not_started")
        assert job(run_id, 1) in row.error_message and "`ray job logs`" in row.error_message
        assert '{"from": "start"}' in row.error_message

    @pytest.mark.parametrize(
        "end",
        [
            ("STOPPED", None, -15), ("STOPPED", None, None), ("SUCCEEDED", None, 0), ("FAILED", None, None),
            ("FAILED", "exit code -9", -9), ("FAILED", "exit code 137", 137),
            ("FAILED", "the worker on n ended with 75: no claim within 60 s: a quota", 75),
        ],
        ids=lambda end: f"{end[0]}-{end[2]}",
    )  # fmt: skip
    async def test_job_ended_by_the_cluster_costs_no_restart(
        self, jobs: RayJobs, ray: RayServer, engine: Engine, end: tuple[str, str | None, int | None]
    ) -> None:
        run_id = add(engine, max_restarts=0)
        await jobs.do_round()
        ray.end(job(run_id), *end)
        await jobs.do_round()
        row = run_row(engine, run_id)
        assert (row.status, row.lease_epoch, row.lost_count) == ("pending", 1, 0)
        code, message = waits_because(engine, run_id)
        assert code == "ray_job_failed" and "restarts" not in message
        await jobs.do_round()
        assert ray.submissions == [job(run_id)], "not before a pause"

    async def test_job_that_keeps_ending_is_retried_with_growing_pauses(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """As with a wrong ANNEAL_DATABASE_URL on the nodes: no loss of the run, which waits and says why."""
        run_id = add(engine, max_restarts=0, lost_count=2)
        away = "the worker on n ended with 75: the database cannot be reached from n"
        pauses = []
        for epoch in range(8):
            await jobs.do_round()
            ray.end(job(run_id, epoch), "FAILED", away, exit_code=75)
            await jobs.do_round()
            row = run_row(engine, run_id)
            assert (row.status, row.lost_count) == ("pending", 2)
            with engine.connect() as connection:
                pauses.append(connection.scalar(text("SELECT extract(epoch FROM not_before - now()) FROM runs")))
            execute(engine, "UPDATE runs SET not_before = now()")
        assert [round(pause / 30) for pause in pauses] == [1, 2, 4, 8, 16, 30, 30, 30]
        code, message = waits_because(engine, run_id)
        assert code == "ray_job_failed" and away in message and f"`ray job logs {job(run_id, 7)}`" in message
        await jobs.do_round()
        execute(engine, "UPDATE ray_jobs SET added_at = added_at - interval '1 hour'")
        ray.end(job(run_id, 8), "FAILED", away, exit_code=75)
        await jobs.do_round()
        with engine.connect() as connection:
            pause = connection.scalar(text("SELECT extract(epoch FROM not_before - now()) FROM runs"))
            assert round(pause / 30) == 1, "it had been there for an hour"

    async def test_job_retried_for_weeks_is_retried_and_blocks_no_other(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        tried = add(engine)
        await jobs.do_round()
        execute(engine, "UPDATE ray_jobs SET tries = 1024")
        other = add(engine)
        ray.end(job(tried), "FAILED", "the database cannot be reached", exit_code=75)
        await jobs.do_round()
        with engine.connect() as connection:
            query = text("SELECT extract(epoch FROM not_before - now()) FROM runs WHERE id = :id")
            assert round(connection.scalar(query, {"id": tried}) / 30) == 30
        assert ray.submissions == [job(tried), job(other)]

    async def test_job_of_run_stopped_during_its_pause_leaves_nothing(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        await jobs.do_round()
        ray.end(job(run_id), "STOPPED")
        await jobs.do_round()
        execute(engine, machine.request_stop(run_id, "checkpoint"))
        await jobs.do_round()
        assert ray.submissions == [job(run_id)] and ray.stopped == []
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM ray_jobs")) == 0

    async def test_job_with_invalid_exit_code_blocks_no_other(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        strange, other = add(engine), add(engine)
        await jobs.do_round()
        for run_id in (strange, other):
            ray.end(job(run_id), "FAILED", "it ended")
        ray.jobs[job(strange)]["driver_exit_code"] = "1"
        await jobs.do_round()
        assert {waits_because(engine, run_id)[0] for run_id in (strange, other)} == {"ray_job_failed"}

    async def test_job_forgotten_by_the_cluster_is_submitted_again(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        await jobs.do_round()
        ray.jobs.clear()
        await jobs.do_round()
        assert ray.submissions == [job(run_id)] * 2

    async def test_job_of_stopped_or_deleted_run_is_stopped(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        stopped, deleted = add(engine), add(engine)
        await jobs.do_round()
        execute(engine, machine.request_stop(stopped, "checkpoint"))
        execute(engine, f"DELETE FROM runs WHERE id = '{deleted}'")
        await jobs.do_round()
        assert sorted(ray.stopped) == sorted([job(stopped), job(deleted)])
        await jobs.do_round()
        assert len(ray.stopped) == 2
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM ray_jobs")) == 0

    async def test_end_of_a_job_whose_run_trains_is_ignored(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        """Ray may have given up a node whose worker still renews its lease."""
        run_id = add(engine)
        await jobs.do_round()
        assert claim(engine, run_id)
        ray.end(job(run_id), "FAILED", "the node is lost")
        request_count = len(ray.asked)
        await jobs.do_round()
        row = run_row(engine, run_id)
        assert (row.status, row.lease_epoch, row.lost_count) == ("initializing", 1, 0)
        assert len(ray.asked) == request_count and ray.submissions == [job(run_id)]

    async def test_job_of_an_ended_run_may_end_by_itself_first(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        await jobs.do_round()
        run = claim(engine, run_id)
        execute(engine, machine.fail(run_id, run.lease_epoch, "bad_data", "row 3 is empty"))
        for _ in range(2):
            await jobs.do_round()
        assert ray.stopped == []
        execute(engine, "UPDATE ray_jobs SET left_at = left_at - interval '1 minute'")
        await jobs.do_round()
        assert ray.stopped == [job(run_id)]

    async def test_job_of_a_released_run_is_followed_by_another(
        self, jobs: RayJobs, ray: RayServer, engine: Engine
    ) -> None:
        run_id = add(engine)
        await jobs.do_round()
        run = claim(engine, run_id)
        execute(engine, machine.release(run_id, run.lease_epoch, "drained"))
        await jobs.do_round()
        row = run_row(engine, run_id)
        assert row.status == "pending" and ray.submissions == [job(run_id), job(run_id, row.lease_epoch)]
        assert ray.stopped == []


class TestWorkersOfOtherBackends:
    async def test_get_no_hints_for_its_runs_and_no_other_reason_is_given(
        self, settings: Settings, engine: Engine
    ) -> None:
        run_id = add(engine)
        execute(engine, "UPDATE runs SET not_before = now() - interval '1 minute'")
        own = async_engine(settings.database_url or "", pool_size=1)
        hints, explained = await Dispatcher(own, Broker(settings), settings).round()
        await own.dispose()
        assert (hints, explained) == (0, []) and run_row(engine, run_id).pending_reason is None

    async def test_waiting_ray_run_without_url_reports_it(self, settings: Settings, engine: Engine) -> None:
        run_id = add(engine)
        async for loop in loop_of(settings.model_copy(update={"ray_url": None})):
            await loop.do_round()
        assert waits_because(engine, run_id)[0] == "ray_not_configured"

    def test_a_worker_of_one_run_claims_no_other(self, engine: Engine) -> None:
        first, second = add(engine, priority=5), add(engine)
        assert claim(engine, second).id == second
        assert claim(engine, second) is None
        assert claim(engine, first).id == first

    async def test_a_worker_of_an_earlier_job_claims_nothing(self, engine: Engine) -> None:
        """Its job has been given up, and another one has been submitted for the run."""
        run_id = add(engine)
        execute(engine, machine.requeue_unclaimed(run_id, 0, "the job has ended", 0.0, counted=False))
        execute(engine, "UPDATE runs SET not_before = now()")
        assert claim(engine, run_id) is None
        assert claim(engine, run_id, epoch=1).id == run_id
