"""A start takes its time and may fail half-way: it uses what is true at that moment, and leaves no process."""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anneal.contracts.attempt.messages import ControlMessage
from app.config import Settings
from app.infra.clock import since_boot
from tests.waiting import eventually
from tests.worker.process.launching import CPU, Said, launch, start_launcher
from tests.worker.trainers import write_job
from worker.process.launcher import Launcher
from worker.process.spawn import CODE_ROOT, LaunchAbandoned, LaunchError
from worker.process.training_process import Exit


class TestWaiting:
    """A launch may wait for long, and what was true when it was asked for may be true no more."""

    def test_the_first_deadline_is_the_one_of_the_moment_of_the_start(self, tmp_path: Path) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.trainers"])
        launcher.start()
        ready_when_asked: list[bool] = []

        def renewed() -> float:
            ready_when_asked.append(launcher.zygote_pid is not None)
            return since_boot() + 3600

        process = launcher.launch("tests.worker.trainers:quick", write_job(tmp_path), [CPU], renew_until=renewed)
        assert ready_when_asked == [True]
        assert Said(process).to_the_end().code == 0
        launcher.stop()

    @pytest.mark.parametrize(("is_renewed", "end"), [(True, Exit(code=0)), (False, Exit(signal=signal.SIGALRM))])
    def test_a_process_that_comes_up_after_its_first_deadline_lives_if_its_lease_was_renewed_meanwhile(
        self, tmp_path: Path, is_renewed: bool, end: Exit
    ) -> None:
        """An interpreter takes longer to come up than one that was started with a millisecond left has time."""
        launcher = start_launcher(tmp_path, "cold")
        soon = since_boot() + 0.001
        secrets = {"HF_TOKEN": "x"}  # lie on the same socket, before the renewal
        job = write_job(tmp_path)
        process = launcher.launch("tests.worker.trainers:quick", job, [CPU], renew_until=lambda: soon, secrets=secrets)
        if is_renewed:
            process.send(ControlMessage(renew_until=soon + 3600))
        assert Said(process).to_the_end() == end
        launcher.stop()

    def test_a_launch_that_no_one_wants_any_more_waits_for_no_zygote(self, tmp_path: Path) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.process.preloads.sleeps"])
        launcher.start()
        began = time.monotonic()
        with pytest.raises(LaunchAbandoned):
            launcher.launch("tests.worker.trainers:quick", write_job(tmp_path), [CPU], should_end=_after(0.3))
        assert time.monotonic() - began < 30, "the import takes 60 s"
        launcher.stop()

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_a_launch_that_is_given_up_leaves_no_process(
        self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = start_launcher(tmp_path, mode)
        said_no = threading.Event()
        keeper = launcher._spawn_cold
        monkeypatch.setattr(launcher, "_spawn_cold", lambda request: (said_no.wait(10), keeper(request)))
        if (pid := launcher.zygote_pid) is not None:
            os.kill(pid, signal.SIGSTOP)
        lock = tmp_path / "lock"
        job = write_job(tmp_path)
        with pytest.raises(LaunchAbandoned):
            launcher.launch("tests.worker.trainers:wait_for_stop", job, [CPU], [lock], should_end=_after(0.3))
        said_no.set()
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
        children = Path(f"/proc/{pid or os.getpid()}/task/{pid or launcher._keeper.native_id}/children")
        assert Said(launch(launcher, tmp_path / "next", "quick", code=6)).to_the_end().code == 6
        eventually(lambda: children.read_text() == "")
        assert list(launcher._folder.iterdir()) == []
        launcher.stop()


class TestFolders:
    """Interpreters start where the code is, whatever the worker's own folder; a trainer then works in its job's."""

    def test_the_root_of_the_code_is_that_of_the_repository(self) -> None:
        assert (CODE_ROOT / "pyproject.toml").is_file()
        assert (CODE_ROOT / "app" / "main.py").is_file()
        assert (CODE_ROOT / "worker" / "main.py").is_file()

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_a_worker_started_elsewhere_starts_processes_at_the_root_and_trains_in_the_jobs_folder(
        self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        started_in = []
        real = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda *a, **kw: (started_in.append(kw["cwd"]), real(*a, **kw))[1])
        launcher = start_launcher(tmp_path / "home", mode)
        if (zygote := launcher.zygote_pid) is not None:
            assert Path(f"/proc/{zygote}/cwd").readlink() == CODE_ROOT
        said = Said(launch(launcher, tmp_path / "job", "about"))
        assert said.to_the_end().code == 0
        assert said.record("about")["folder"] == str(tmp_path / "job")
        assert started_in == [CODE_ROOT]
        launcher.stop()


class TestEarlySignals:
    """A service manager signals every process of a service, those too that have only just begun."""

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_sigterm_while_it_imports_is_a_request_to_stop(self, tmp_path: Path, mode: str) -> None:
        launcher = start_launcher(tmp_path, mode)
        process = launcher.launch("tests.worker.process.imports_slowly:wait_for_stop", write_job(tmp_path), [CPU])
        said = Said(process).until(lambda said: "importing" in said.text)
        os.kill(process.pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert said.to_the_end().code == 0
        assert said.record("stopped")["why"] == "drain"
        launcher.stop()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_a_signal_in_its_first_moments_is_neither_deadly_nor_lost(
        self, tmp_path: Path, mode: str, number: int
    ) -> None:
        launcher = start_launcher(tmp_path, mode)
        for n in range(10 if mode == "zygote" else 2):
            process = launch(launcher, tmp_path / str(n), "wait_for_stop")
            os.kill(process.pid, number)
            said = Said(process)
            assert said.to_the_end().code == 0
            assert said.record("stopped")["mode"] == "checkpoint"
        launcher.stop()


class TestFailure:
    def test_a_cold_start_that_fails_half_way_leaves_no_process_and_the_launcher_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_room(_pid: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        launcher = start_launcher(tmp_path, "cold")
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", no_room)
            with pytest.raises(LaunchError, match="Too many open files"):
                launch(launcher, tmp_path, "hang")
        assert Path(f"/proc/self/task/{launcher._keeper.native_id}/children").read_text() == ""
        assert Said(launch(launcher, tmp_path, "quick", code=3)).to_the_end().code == 3
        launcher.stop()


def _after(seconds: float) -> Callable[[], bool]:
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds
