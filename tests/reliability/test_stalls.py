"""A server that hangs without a word, a signal to everybody at once, and other ways to be held up."""

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import yaml

from app.infra.files.file_manifest import MANIFEST
from app.infra.storage import Storage
from tests.container_rules import ROOT
from tests.stack import Follower, Stack, pids_of_trainers
from tests.waiting import eventually

LONG = {"steps": 100_000, "step_seconds": 0.02, "log_lines_per_step": 2}


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP of a whole server, as a network that swallows every packet looks to its clients."""
    everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in everyone:
        process.suspend()
    try:
        yield
    finally:
        for process in everyone:
            if process.is_running():
                process.resume()


def confined(service: str) -> list[str]:
    """The command that executes a program with the capabilities of a container."""
    document = yaml.safe_load((ROOT / "docker-compose.trainer.yml").read_text())
    capabilities = "".join(f",+{capability.lower()}" for capability in document["services"][service]["cap_add"])
    return ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set=-all{capabilities}"]


def steps(stack: Stack, run_id: str) -> int:
    return max((line.get("step", 0) for line in stack.journal(run_id)), default=0)


class TestAFrozenServer:
    @pytest.mark.parametrize("server", ["postgres", pytest.param("valkey", marks=pytest.mark.full)])
    def test_frozen_server_does_not_block_the_trainer(self, stack: Stack, server: str) -> None:
        run_id = stack.create(LONG)
        stack.add_worker(lease_seconds=180)  # two thirds of it are longer than this test
        stack.until_step(run_id, 5)
        process = getattr(stack.servers, server).process
        with frozen(process.pid):
            before = steps(stack, run_id)
            eventually(lambda: steps(stack, run_id) >= before + 100, timeout=60, what="training goes on")
        follower = Follower(stack, run_id)
        stack.stop(run_id)
        stack.until(run_id, "cancelled")
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))
        assert len(pids_of_trainers(stack.journal(run_id))) == 1
        lines = [event["line"] for event in stack.events(run_id) if event.get("stream") == "stdout"]
        assert len(lines) == 2 * steps(stack, run_id), "every line of the meantime is stored"


class TestASignalToEverybody:
    @pytest.mark.parametrize("phase", [pytest.param("loading", marks=pytest.mark.full), "training"])
    def test_hands_the_run_back_instead_of_failing_it(self, stack: Stack, phase: str) -> None:
        """systemd's way to stop a service: SIGTERM to each process of the control group."""
        extra = {**LONG, "load_seconds": 20} if phase == "loading" else LONG
        run_id = stack.create(extra)
        worker = stack.add_worker()
        stack.until(run_id, "initializing" if phase == "loading" else "running")
        eventually(lambda: worker.descendants())
        for process in [*worker.descendants(), psutil.Process(worker.process.pid)]:
            process.send_signal(signal.SIGTERM)
        assert worker.process.wait(timeout=60) == 0
        shown = stack.run(run_id)
        assert shown["status"] == "pending", shown
        stack.stop(run_id)


class TestAPipeInACheckpoint:
    def test_neither_blocks_the_run_nor_holds_up_its_stop(self, stack: Stack) -> None:
        """Any process of the trainers' user can put it there."""
        run_id = stack.create(LONG, {"save_steps": 10})
        worker = stack.add_worker()
        stack.until_step(run_id, 25)
        worker.kill()
        saved = sorted((Storage(stack.settings).attempt_dir(run_id, 1)).glob("checkpoint-*"))
        for folder in saved:
            (folder / MANIFEST).unlink()
            os.mkfifo(folder / MANIFEST)
        stack.add_worker()
        shown = stack.until(run_id, "running", timeout=60)
        assert saved and shown["attempt"] == 2, "it begins anew"
        stack.stop(run_id)
        stack.until(run_id, "cancelled")


class TestAnotherUser:
    def test_trains_from_a_cold_zygote_in_one_attempt_and_owns_only_what_its_trainer_writes(self, stack: Stack) -> None:
        """As root, with the capabilities of `docker-compose.trainer.yml`; another user can only name itself."""
        is_root = os.getuid() == 0
        user = pwd.getpwnam("nobody") if is_root else pwd.getpwuid(os.getuid())
        for folder in [stack.home, *stack.home.parents]:
            if is_root and folder.is_relative_to(tempfile.gettempdir()):
                folder.chmod(folder.stat().st_mode | 0o055)
        run_id = stack.create({"steps": 5})
        # Forked, so that an interpreter in a folder of root's own has been read before the user changes.
        # The zygote imports for seconds, longer than two thirds of this lease.
        lease = 3.0 * stack.slowness
        worker = stack.add_worker(
            confined("worker") if is_root else (), trainer_user=user.pw_name, launch="zygote", lease_seconds=lease
        )
        shown = stack.until(run_id, "completed", "failed", timeout=120)
        assert shown["status"] == "completed", shown["error_message"]
        assert stack.journal(run_id)[0]["attempt"] == 1, "waiting for a cold zygote costs no attempt"
        run_folder = Storage(stack.settings).run_dir(run_id)
        assert run_folder.stat().st_uid == os.getuid(), "the trainer can plant no link where the worker writes next"
        attempt = run_folder / f"a{shown['attempt']}"  # on a busy machine the lease of the first may end
        assert (attempt / "job.json").stat().st_uid == os.getuid()
        assert (attempt / "output").stat().st_uid == user.pw_uid
        assert (run_folder / "journal.jsonl").stat().st_uid == user.pw_uid
        stopped = stack.create({**LONG, "ignore_stop": True})
        stack.until_step(stopped, 5)
        stack.stop(stopped, save_checkpoint=False)
        stack.until(stopped, "cancelled", timeout=30 + 2 * stack.settings.save_grace_seconds)
        worker.terminate()
        program = "import sys; from pathlib import Path; import shutil; shutil.rmtree(Path(sys.argv[1]))"
        remove = [*(confined("api") if is_root else ()), sys.executable, "-c", program, str(run_folder)]
        subprocess.run(remove, check=True)
        assert not run_folder.exists(), "the API can delete the run"
