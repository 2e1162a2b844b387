"""Jobs of a Ray cluster that end, are lost or are no longer needed, and their workers."""

import pytest
from sqlalchemy import Engine, text

from app.backends.ray_jobs import RayJobs
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.state import machine
from tests.app.backends.ray_jobs.waiting_runs import add, claim, execute, job, loop_of, waits_because
from tests.app.ray_server import RayServer
from tests.rows import run_row


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
