"""Promise 18: what is told to end, or to drain, ends soon and in good order, and training goes on as if undisturbed."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery
from celery.worker.worker import SHUTDOWN_SOCKET_TIMEOUT
from sqlalchemy import text

from app.config import Settings
from app.infra.broker import QUEUE, TASK, celery_app
from app.infra.process.identity import ProcessIdentity, start_time
from app.server import REQUEST_GRACE_SECONDS
from app.workers import status_files
from tests.reliability.draining import (
    Command,
    Reader,
    Replica,
    SlowUpload,
    add_workers,
    assert_trained_once,
    deaf_reader,
    losses,
    lost_count,
    owner,
    states,
)
from tests.server import ProcessServer
from tests.stack import Stack, WorkerProcess, assert_attempts_never_overlap, is_alive, pids_of_trainers, signal_process
from tests.waiting import eventually

STEPS = {"steps": 60, "step_seconds": 0.05}


@pytest.fixture(scope="module")
def undisturbed(shared_stack: Stack) -> dict[int, str]:
    """The losses of a run that nobody disturbs (as fast as it goes: time does not enter them)."""
    worker = shared_stack.add_worker()
    run_id = shared_stack.create({**STEPS, "step_seconds": 0})
    shared_stack.until(run_id, "completed")
    assert worker.terminate() == 0
    shared_stack.workers.clear()
    return losses(shared_stack, run_id)


class TestAnApiThatEnds:
    def test_readers_go_on_at_another_replica_and_training_notices_nothing(self, stack: Stack) -> None:
        talkative = stack.create({"steps": 250, "step_seconds": 0, "log_line": "x" * 9000, "log_lines_per_step": 3})
        stack.add_worker()
        stack.until(talkative, "completed")
        with Replica(stack.settings) as ours, ProcessServer(stack.settings) as plain:
            run_id = stack.create({"steps": 100_000, "log_lines_per_step": 2})
            deaf = [deaf_reader(ours, f"/v1/runs/{talkative}/events") for _ in range(3)]
            at_ours = [Reader([ours, stack.api], run_id) for _ in range(8)]
            at_plain = [Reader([plain, stack.api], run_id) for _ in range(4)]
            asked_at, exited, upload = asyncio.run(self._follow(at_ours + at_plain, [ours, plain], stack, run_id))
            assert ours.process.wait(30) == 0
        for reader in at_ours + at_plain:
            assert reader.ids == list(range(1, len(reader.ids) + 1))
            assert reader.ends[0] - asked_at < REQUEST_GRACE_SECONDS * 0.6
            assert not reader.broken, "streams end with their last chunk"
        assert upload.startswith("HTTP/1.1 201")
        # Deaf readers do not hold it up for as long as a request may take: what is not read is reset.
        assert exited - asked_at < REQUEST_GRACE_SECONDS * 0.6
        shown = stack.run(run_id)
        assert (shown["status"], shown["attempt"], lost_count(stack, run_id)) == ("cancelled", 1, 0)
        assert_trained_once(stack, run_id)
        for connection in deaf:
            connection.close()

    async def _follow(
        self, readers: list[Reader], ending: list[Any], stack: Stack, run_id: str
    ) -> tuple[float, float, str]:
        """Follow to the end of the run, meanwhile end the servers; when they were asked to, when the first exited."""

        async def end_them() -> tuple[float, float, str]:
            upload = SlowUpload(ending[0])
            await asyncio.to_thread(eventually, lambda: all(len(reader.ids) > 10 for reader in readers))
            asked_at = time.monotonic()
            for server in ending:
                server.process.terminate()
            await asyncio.to_thread(eventually, lambda: all(reader.ends for reader in readers))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", ending[0].port))
            status = await asyncio.to_thread(upload.finish)
            await asyncio.to_thread(ending[0].process.wait, 30)
            exited = time.monotonic()
            reached = max(reader.ids[-1] for reader in readers)
            await asyncio.to_thread(eventually, lambda: all(reader.ids[-1] > reached for reader in readers))
            await asyncio.to_thread(stack.stop, run_id)
            return asked_at, exited, status

        ending_them = asyncio.create_task(end_them())
        await asyncio.gather(ending_them, *(reader.follow() for reader in readers))
        return ending_them.result()

    def test_api_signaled_before_it_listens_ends(self, stack: Stack, tmp_path: Path) -> None:
        replica = Replica(stack.settings.model_copy(update={"home": tmp_path}))
        replica.start()
        address_file = tmp_path / "run" / "api.json"
        eventually(address_file.exists, every=0.001)
        replica.process.terminate()
        assert replica.process.wait(30) == 0
        assert not address_file.exists()


class TestAWorkerThatEnds:
    def test_however_it_is_signaled_it_saves_and_releases_and_the_run_ends_as_if_undisturbed(
        self, stack: Stack, undisturbed: dict[int, str]
    ) -> None:
        signals_by_step = {
            8: [signal.SIGTERM, signal.SIGTERM],
            16: [signal.SIGINT, signal.SIGINT, signal.SIGINT],
            24: [signal.SIGHUP, signal.SIGTERM],
        }
        add_workers(stack, len(signals_by_step) + 1)
        run_id = stack.create({**STEPS, "step_seconds": 0.2}, {"save_steps": 1000})
        for step, signals in signals_by_step.items():
            stack.until_step(run_id, step)
            worker = owner(stack, run_id)
            began = time.monotonic()
            for number in signals:
                worker.process.send_signal(number)
            limit = stack.settings.save_grace_seconds + 30
            assert worker.process.wait(limit) == 0, worker.log.read_text()
            assert time.monotonic() - began < limit
            assert lost_count(stack, run_id) == 0
            assert states(stack)[worker.process.pid] == "offline"
        assert stack.until(run_id, "completed")["attempt"] == 4
        assert losses(stack, run_id) == undisturbed
        assert_trained_once(stack, run_id)
        reasons = [event["reason"] for event in stack.events(run_id) if event["type"] == "status"]
        assert sum(reason.startswith("released: ") for reason in reasons) == 3
        saved = [event["step"] for event in stack.events(run_id) if event["type"] == "checkpoint"]
        assert len(saved) >= 3 and all(any(step <= one for one in saved) for step in signals_by_step)

    def test_draining_worker_does_not_wait_for_a_loading_model(self, stack: Stack) -> None:
        run_id = stack.create({"load_seconds": 600})
        worker = stack.add_worker(lease_seconds=60)  # the grace is twice as long
        stack.until(run_id, "initializing")
        eventually(lambda: pids_of_trainers(stack.journal(run_id)))
        assert worker.terminate(timeout=30) == 0
        assert (stack.run(run_id)["status"], lost_count(stack, run_id)) == ("pending", 0)
        stack.stop(run_id)

    def test_worker_waiting_for_its_servers_ends_at_once(self, stack: Stack, tmp_path: Path) -> None:
        away = {"database_url": "postgresql://me@127.0.0.1:1/x", "redis_url": "redis://127.0.0.1:1/0"}
        waiting = {
            "cannot be reached": {**away, "home": tmp_path / "both"},
            "Error 111": {"redis_url": away["redis_url"], "home": tmp_path / "broker"},
        }
        patient = {"lease_seconds": 60}  # a worker that did wait would end by force after two leases
        workers = [
            (sign, WorkerProcess(stack.settings.model_copy(update={**values, **patient}), tmp_path / f"{n}.log"))
            for n, (sign, values) in enumerate(waiting.items())
        ]
        for sign, worker in workers:
            eventually(lambda sign=sign, worker=worker: sign in worker.log.read_text(), what=worker.log.read_text)
        for _, worker in workers:
            worker.process.terminate()
        for _, worker in workers:
            assert worker.process.wait(30) == 0, worker.log.read_text()
            assert "Traceback" not in worker.log.read_text()

    def test_worker_without_database_ends_within_grace_and_its_run_continues_later(
        self, stack: Stack, undisturbed: dict[int, str]
    ) -> None:
        run_id = stack.create({**STEPS, "step_seconds": 0.1}, {"save_steps": 10})
        worker = stack.add_worker(lease_seconds=stack.short_lease)
        stack.until_step(run_id, 15)
        postgres = stack.servers.postgres
        assert postgres is not None
        postgres.stop()
        began = time.monotonic()
        worker.process.terminate()
        worker.process.wait(120)
        took = time.monotonic() - began
        postgres.start()
        postgres.wait_ready()
        assert took < 2 * stack.short_lease + 30
        stack.add_worker()
        stack.until(run_id, "completed")
        assert losses(stack, run_id) == undisturbed
        assert_attempts_never_overlap(stack.journal(run_id))


class TestDrain:
    def test_the_run_at_work_finishes_the_next_one_is_left_and_ctrl_c_ends_only_the_command(self, stack: Stack) -> None:
        worker = stack.add_worker(lease_seconds=600)
        at_work = stack.create({"steps": 8, "step_seconds": 0.02})
        stack.until_step(at_work, 3)
        (trainer,) = pids_of_trainers(stack.journal(at_work))
        signal_process(trainer, signal.SIGSTOP)  # however long the commands take, it is at work meanwhile
        waiting = stack.create({"steps": 3})
        watched = Command(stack.home, "--drain")
        eventually(lambda: states(stack)[worker.process.pid] == "draining")
        watched.process.send_signal(signal.SIGINT)
        code, said = watched.end()
        assert code == 130 and "continue draining" in said
        drained = Command(stack.home, "--drain")
        eventually(lambda: "Still running" in drained.said)
        signal_process(trainer, signal.SIGCONT)
        code, said = drained.end()
        assert code == 0 and not is_alive(worker.process.pid), "the command returns when the worker has ended"
        assert worker.process.wait(30) == 0
        assert f"process {worker.process.pid}) is draining and claims no more runs" in said
        assert f"Still running: {at_work}" in said
        assert "Drained: 1 worker ended." in said
        shown = stack.run(at_work)
        assert (shown["status"], shown["attempt"]) == ("completed", 1)
        assert stack.run(waiting)["attempt"] == 0
        assert states(stack)[worker.process.pid] == "offline"
        code, said = Command(stack.home, "--drain").end()
        assert code == 0
        assert said == f"No worker runs on this machine with ANNEAL_HOME={stack.home}; nothing to drain.\n"
        stack.add_worker()
        stack.until(waiting, "completed")

    def test_a_run_that_is_still_being_prepared_trains_to_its_end(self, stack: Stack) -> None:
        # Silent for longer than the timeout that Celery sets, while it ends, for new sockets of its process.
        run_id = stack.create({"steps": 3, "load_seconds": SHUTDOWN_SOCKET_TIMEOUT + 1})
        with stack.engine.begin() as holding:
            holding.execute(text("LOCK TABLE datasets IN ACCESS EXCLUSIVE MODE"))
            worker = stack.add_worker()
            eventually(lambda: f"{run_id}: attempt 1 starts" in worker.log.read_text())
            worker.process.send_signal(status_files.DRAIN_SIGNAL)
            eventually(lambda: states(stack)[worker.process.pid] == "draining")
        assert worker.process.wait(60) == 0, worker.log.read_text()
        shown = stack.run(run_id)
        assert (shown["status"], shown["attempt"]) == ("completed", 1), shown["error_message"]

    def test_drain_timeout_saves_and_releases_active_runs(self, stack: Stack) -> None:
        worker = stack.add_worker()
        run_id = stack.create({"steps": 100_000})
        stack.until_step(run_id, 3)
        code, said = Command(stack.home, "--drain", "--timeout", "0.5").end()
        assert (code, worker.process.wait(30)) == (0, 0), said
        assert "Timeout of 0.5 s reached: the remaining runs are saved and released." in said
        assert (stack.run(run_id)["status"], lost_count(stack, run_id)) == ("pending", 0)
        assert stack.run(run_id)["checkpoint_path"]
        stack.stop(run_id)

    def test_a_named_worker_drains_and_the_other_goes_on(self, stack: Stack) -> None:
        named, other = stack.add_worker(), stack.add_worker()
        code, said = Command(stack.home, "--drain", "wrk_unknown").end()
        assert code == 1 and "No worker wrk_unknown runs on this machine" in said
        assert f"(process {named.process.pid})" in said, "it lists those that can be named"
        _, said = Command(stack.home, "--drain", str(named.process.pid)).end()
        assert "Drained: 1 worker ended." in said and named.process.wait(30) == 0
        assert states(stack)[other.process.pid] == "online"

    def test_a_timeout_alone_is_refused_with_its_purpose(self, tmp_path: Path) -> None:
        code, said = Command(tmp_path, "--timeout", "5").end()
        assert code == 1 and "--timeout requires --drain" in said

    def test_a_hint_that_a_draining_worker_has_taken_goes_to_another(self, stack: Stack) -> None:
        from worker import celery_worker

        class Draining:
            closing = type("", (), {"is_set": lambda self: True})()

        app: Celery = celery_app(stack.settings.redis_url or "")
        celery_worker.register_task(app, Draining())  # type: ignore[arg-type]
        with stack.redis() as redis:
            before = redis.llen(QUEUE)
            app.tasks[TASK]()
            assert redis.llen(QUEUE) == before + 1
            redis.delete(QUEUE)

    @pytest.mark.full
    def test_anneal_up_does_not_start_a_drained_worker_again(self, stack: Stack, tmp_path: Path) -> None:
        variables = {
            **stack.settings.model_copy(update={"home": tmp_path / "up"}).child_environment(),
            "ANNEAL_PORT": "0",
            "PYTHONUNBUFFERED": "1",
        }
        variables.pop("ANNEAL_STORAGE", None)
        log = tmp_path / "up.out"
        with log.open("wb") as output:
            up = subprocess.Popen(
                [sys.executable, "-m", "app.cli.main", "up"], env=variables, stdout=output, stderr=output
            )
        try:
            eventually(lambda: "Anneal is ready" in log.read_text(), timeout=60, what="anneal up")
            connection = tmp_path / "up" / "connection.json"
            pid = json.loads(connection.read_text())["pids"]["worker"]
            _, said = Command(tmp_path / "up", "--drain").end()
            assert f"(process {pid}) belongs to `anneal up` and goes on." in said and "No other worker runs" in said
            assert json.loads(connection.read_text())["pids"]["worker"] == pid
            _, said = Command(tmp_path / "up", "--drain", str(pid)).end()
            assert f"process {pid})" in said and "Drained" in said and "It is the worker of `anneal up`" in said
            eventually(lambda: "worker was drained and has exited" in log.read_text())
            eventually(lambda: set(json.loads(connection.read_text())["pids"]) == {"up", "api"})
            children = [child.cmdline() for child in psutil.Process(up.pid).children()]
            assert len(children) == 1 and "worker.main" not in children[0]
        finally:
            up.terminate()
            assert up.wait(30) == 0
        assert "was restarted" not in log.read_text()


class TestNotes:
    @pytest.fixture
    def unrelated(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process that has nothing to do with us."""
        process = subprocess.Popen(["sleep", "60"])
        yield process
        process.kill()
        process.wait()

    def test_a_process_that_was_given_a_workers_id_later_is_never_signalled(
        self, unrelated: subprocess.Popen[bytes], tmp_path: Path
    ) -> None:
        here = ProcessIdentity.of_process(unrelated.pid, start_time(unrelated.pid))
        others = [
            replace(here, start_time=here.start_time - 1),
            replace(here, boot_id="another"),
            replace(here, namespace="pid:[1]"),
        ]
        folder = tmp_path / "run" / "workers"
        folder.mkdir(parents=True)
        for n, other in enumerate(others):
            note = status_files.WorkerStatus(f"wrk_{n}", other)
            assert not note.send_signal(signal.SIGTERM)
            (folder / f"{note.id}.json").write_text(json.dumps(asdict(note)))
        _, said = Command(tmp_path, "--drain").end()
        assert re.search(r"wrk_1 belongs to another machine", said) and "nothing to drain" in said
        assert unrelated.poll() is None
        right = status_files.WorkerStatus("wrk", here)
        assert right.send_signal(signal.SIGTERM)
        assert unrelated.wait(30) == -signal.SIGTERM

    def test_a_new_worker_clears_away_the_notes_of_dead_ones(self, settings: Settings) -> None:
        folder = settings.home / "run" / "workers"
        folder.mkdir(parents=True)
        dead = status_files.WorkerStatus("wrk_dead", ProcessIdentity.of_process(2**22 + 1, 1))
        (folder / "wrk_dead.json").write_text(json.dumps(asdict(dead)))
        (folder / "wrk_torn.json").write_text("{")
        drained = status_files.WorkerStatus("wrk_drained", ProcessIdentity.of_process(2**22 + 2, 1), draining=True)
        (folder / "wrk_drained.json").write_text(json.dumps(asdict(drained)))
        notebook = status_files.WorkerStatusFile(settings.home, "wrk_new")
        notebook.open()
        assert sorted(note.id for note in status_files.read_statuses(settings.home)) == ["wrk_drained", "wrk_new"]
        assert status_files.was_drained(settings.home, drained.process.pid) and not status_files.was_drained(
            settings.home, os.getpid()
        )
        notebook.close()
        assert [note.id for note in status_files.read_statuses(settings.home)] == ["wrk_drained"]
