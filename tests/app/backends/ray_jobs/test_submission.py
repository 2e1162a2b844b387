"""Submission of jobs to a Ray cluster: each waiting run has one, in the order of the queue and within its quotas."""

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import Engine, text

from app.backends import ray_api, ray_jobs
from app.backends.ray_jobs import RayJobs
from app.config import Settings
from app.runs.queue.holds import StoredHolds, StoredQuotaHold
from app.runs.queue.holds_table import store_holds
from app.runs.state import machine
from app.tables.runs import Run
from tests.app.backends.ray_jobs.waiting_runs import add, claim, execute, job, loop_of, waits_because
from tests.app.ray_server import RayServer
from tests.rows import add_key, add_run, events_of, run_row


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
