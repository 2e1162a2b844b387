"""Training processes start alone in their session, hold their locks, hear their supervisor, and end with it."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from app.config import Settings
from app.infra.clock import since_boot
from app.infra.process.identity import ProcessIdentity, start_time
from tests.nodes import ROOT
from tests.waiting import eventually
from tests.worker.process.launching import CPU, Said, is_alive, launch, session_members, start_launcher
from tests.worker.trainers import write_job
from worker.process import process_group
from worker.process.launcher import Launcher
from worker.process.spawn import LaunchError

_GPU = AssignedDevice("cuda", 1, "GPU-1234")

STOP = ControlMessage(stop=StopRequest("checkpoint"))


@pytest.fixture(scope="module", params=["zygote", "cold"])
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = start_launcher(tmp_path_factory.mktemp("home"), request.param)
    yield launcher
    launcher.stop()


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class TestWorld:
    """What a training process sees."""

    def test_it_leads_a_session_of_its_own_in_the_folder_of_its_job(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "about"))
        assert process.launched == launcher.mode
        assert said.to_the_end().code == 0
        about = said.record("about")
        assert about["pid"] == about["session"] == process.pid
        assert about["folder"] == str(tmp_path)
        assert about["stdin"] == ""
        assert about["oom_score_adj"] == 500

    def test_it_holds_no_descriptor_but_its_own(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(launch(launcher, tmp_path, "about"))
        said.to_the_end()
        # 0, 1, 2, report, control, and the folder that was being listed
        assert len(said.record("about")["descriptors"]) == 6

    def test_it_sees_no_credential(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ANNEAL_DATABASE_URL", "postgresql://user:secret@host/name")
        monkeypatch.setenv("PGPASSWORD", "secret")
        for mode in ("zygote", "cold"):
            launcher = start_launcher(tmp_path, mode)
            said = Said(launch(launcher, tmp_path / mode, "about"))
            said.to_the_end()
            launcher.stop()
            assert "secret" not in json.dumps(said.record("about")["environment"])

    def test_it_gets_what_compilers_and_downloads_read_and_reports_nothing_unless_the_operator_wants_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passed = {
            "CC": "/opt/gcc", "TRITON_CACHE_DIR": "/fast/triton", "XDG_CACHE_HOME": "/fast",
            "HF_XET_HIGH_PERFORMANCE": "1", "DO_NOT_TRACK": "0",
        }  # fmt: skip
        for name, value in passed.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_DISABLE_TELEMETRY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(platform, "release", lambda: "6.12.0")  # not of WSL
        launcher = start_launcher(tmp_path, "cold")
        said = Said(launch(launcher, tmp_path / "run", "about"))
        said.to_the_end()
        launcher.stop()
        environment = said.record("about")["environment"]
        assert {name: environment.get(name) for name in passed} == passed
        assert (environment["HF_HUB_DISABLE_TELEMETRY"], environment["WANDB_ERROR_REPORTING"]) == ("1", "false")
        assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
        assert Settings().trainer_environment()["HF_HUB_DISABLE_TELEMETRY"] == "0"

    @pytest.mark.parametrize(
        ("operator", "expected"),
        [
            ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
            ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
            ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
            ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ],
    )
    def test_it_gets_expandable_segments_unless_the_operator_configures_the_allocator(
        self, monkeypatch: pytest.MonkeyPatch, operator: dict[str, str], expected: dict[str, str]
    ) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for name, value in operator.items():
            monkeypatch.setenv(name, value)
        environment = Settings().trainer_environment()
        assert {name: value for name, value in environment.items() if "ALLOC_CONF" in name} == expected

    def test_it_gets_no_expandable_segments_in_wsl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setattr(platform, "release", lambda: "6.18.33.2-microsoft-standard-WSL2")
        assert "PYTORCH_ALLOC_CONF" not in Settings().trainer_environment()

    @pytest.mark.parametrize(
        ("devices", "visible"),
        [([CPU], ""), ([_GPU], "GPU-1234"), ([_GPU, replace(_GPU, index=2, id="GPU-5678")], "GPU-1234,GPU-5678")],
    )
    def test_it_sees_the_devices_of_its_run_only(
        self, launcher: Launcher, tmp_path: Path, devices: list[AssignedDevice], visible: str
    ) -> None:
        process = launcher.launch("tests.worker.trainers:about", write_job(tmp_path), devices)
        said = Said(process)
        said.to_the_end()
        assert said.record("about")["environment"]["CUDA_VISIBLE_DEVICES"] == visible

    def test_it_can_run_as_another_user(self, tmp_path: Path, readable: Path) -> None:
        user = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"
        launcher = Launcher(
            Settings(home=tmp_path, launch="zygote", trainer_user=user), preload=["tests.worker.trainers"]
        )
        launcher.start()
        lock = tmp_path / "lock"  # in a folder that the other user cannot enter
        process = launcher.launch("tests.worker.trainers:wait_for_stop", write_job(readable), [CPU], [lock])
        said = Said(process).until(lambda said: said.has("message"))
        assert Path(f"/proc/{process.pid}").owner() == user
        assert not _can_lock(lock)
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "500\n"
        zygote = launcher.zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)  # the chain of death holds across users
        assert said.to_the_end().launcher_lost
        launcher.stop()


class TestControl:
    def test_a_stop_request_arrives(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        assert process.send(STOP)  # also before it listens
        assert said.to_the_end().code == 0
        assert said.record("stopped")["why"] == "stop"

    def test_sigterm_is_a_drain(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        os.kill(process.pid, signal.SIGTERM)
        assert said.to_the_end().code == 0
        assert said.record("stopped")["why"] == "drain"

    def test_wait_returns_at_once_for_output_and_for_the_end(self, launcher: Launcher, tmp_path: Path) -> None:
        process = launch(launcher, tmp_path, "wait_for_stop")
        began = time.monotonic()
        process.wait(200)
        assert process.channel.receive()
        process.send(STOP)
        said = Said(process)
        said.to_the_end()
        assert time.monotonic() - began < 100

    def test_the_exit_code_is_reported(self, launcher: Launcher, tmp_path: Path) -> None:
        assert Said(launch(launcher, tmp_path, "quick", code=3)).to_the_end().code == 3

    def test_an_entry_that_does_not_exist_fails_with_the_reason(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(launcher.launch("tests.worker.nowhere:main", write_job(tmp_path), [CPU]))
        assert said.to_the_end().code == 1
        assert "ModuleNotFoundError" in said.text


class TestDeath:
    def test_kill_ends_the_whole_session(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "hang", children=3))
        said.until(lambda said: said.has("hanging"))
        family = {process.pid, *said.record("hanging")["children"]}
        # The zygote may be quicker to kill what the leader leaves.
        assert process.pid in process.kill()
        assert session_members(process.pid) == []
        eventually(lambda: not any(is_alive(pid) for pid in family))
        assert said.to_the_end().signal == signal.SIGKILL

    def test_without_a_renewal_the_kernel_ends_it_though_the_interpreter_is_stuck(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        deadline = since_boot() + 1.0
        job = write_job(tmp_path)
        process = launcher.launch("tests.worker.trainers:hang", job, [CPU], renew_until=lambda: deadline)
        assert Said(process).to_the_end().signal == signal.SIGALRM
        assert since_boot() >= deadline

    def test_renewals_move_its_deadline(self, launcher: Launcher, tmp_path: Path) -> None:
        first = since_boot() + 6.0  # a start takes as long on a busy machine
        job = write_job(tmp_path)
        process = launcher.launch("tests.worker.trainers:wait_for_stop", job, [CPU], renew_until=lambda: first)
        process.send(ControlMessage(renew_until=first + 3600))
        eventually(lambda: since_boot() > first + 0.2)
        assert process.poll() is None
        process.send(STOP)
        assert Said(process).to_the_end().code == 0

    def test_closing_its_control_socket_ends_it(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        process.channel._control.close()
        assert said.until(lambda said: process.poll()).process.poll().code == 1  # type: ignore[union-attr]
        process.close()

    def test_processes_that_do_not_die_are_distinguished_from_other_failures(
        self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "_PATIENCE_SECONDS", 0.1)
            patched.setattr(process_group, "_session_members", lambda leader: iter([leader.pid]))
            with pytest.raises(process_group.StillAliveError):
                process.kill()
        said.to_the_end()

    def test_killing_a_process_that_has_ended_hits_no_other(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "quick"))
        said.until(lambda said: process.poll() is not None)
        assert process.kill() == []
        process.close()


class TestDaemons:
    """Children in sessions of their own end with the process that started them, however it ends."""

    @pytest.mark.parametrize(
        ("how", "disowns"), [("ends", False), ("dies", False), ("is killed", False), ("is killed", True)]
    )
    @pytest.mark.parametrize("launcher", ["zygote"], indirect=True)
    def test_are_gone_when_the_zygote_reports_its_exit(
        self, launcher: Launcher, tmp_path: Path, how: str, disowns: bool
    ) -> None:
        said = Said(process := launch(launcher, tmp_path, "daemons", how=how, disowns=disowns))
        other = Said(launch(launcher, tmp_path / "other", "daemons", how="waits"))
        for output in (said, other):
            output.until(lambda output: output.has("daemons"))
        if how == "is killed":
            process.kill()
        said.to_the_end()
        assert [pid for pid in said.record("daemons")["pids"] if is_alive(pid)] == []
        others = other.record("daemons")["pids"]
        assert all(is_alive(pid) for pid in others), "those of another run go on"
        other.process.close()
        assert not any(is_alive(pid) for pid in others)

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_are_gone_when_the_worker_has_closed_it(self, tmp_path: Path, mode: str) -> None:
        """Of a process that a fork of the zygote has orphaned, or that was started cold."""
        program = subprocess.run(
            [sys.executable, "-c", _ADOPTING, str(tmp_path), mode], stdout=subprocess.PIPE, check=True, timeout=60
        )
        for reported in map(json.loads, program.stdout.splitlines()):
            assert len(reported["pids"]) == 6 and reported["left"] == [], reported


class TestLocks:
    def test_a_lock_is_held_for_life_and_no_other_user_can_hold_it(self, launcher: Launcher, tmp_path: Path) -> None:
        path = tmp_path / "device.lock"
        path.touch()
        path.chmod(0o644)  # as earlier versions made it
        process = launcher.launch("tests.worker.trainers:wait_for_stop", write_job(tmp_path), [CPU], [path])
        said = Said(process).until(lambda said: said.has("message"))
        assert not _can_lock(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, "who can open it, even to read, can hold it"
        process.send(STOP)
        said.to_the_end()
        assert _can_lock(path)

    def test_a_second_holder_waits_until_the_first_is_gone_and_says_so(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        path = tmp_path / "device.lock"
        entry = "tests.worker.trainers:wait_for_stop"
        first = launcher.launch(entry, write_job(tmp_path / "1"), [CPU], [path])
        Said(first).until(lambda said: said.has("message"))
        second = launcher.launch(entry, write_job(tmp_path / "2"), [CPU], [path])
        waiting = Said(second).until(lambda said: "device.lock" in said.text)
        assert not waiting.has("message")
        first.close()
        waiting.until(lambda said: said.has("message"))
        second.close()


class TestThreads:
    def test_many_threads_launch_at_once(self, launcher: Launcher, tmp_path: Path) -> None:
        codes: dict[int, int | None] = {}

        def launch_one(n: int) -> None:
            codes[n] = Said(launch(launcher, tmp_path / str(n), "quick", code=n)).to_the_end().code

        threads = [threading.Thread(target=launch_one, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == {n: n for n in range(6)}

    def test_a_process_outlives_the_thread_that_launched_it(self, launcher: Launcher, tmp_path: Path) -> None:
        processes: list[Any] = []
        thread = threading.Thread(target=lambda: processes.append(launch(launcher, tmp_path, "wait_for_stop")))
        thread.start()
        thread.join()
        said = Said(processes[0]).until(lambda said: said.has("message"))
        assert processes[0].poll() is None
        processes[0].send(STOP)
        assert said.to_the_end().code == 0

    def test_no_descriptor_is_left_behind(self, launcher: Launcher, tmp_path: Path) -> None:
        Said(launch(launcher, tmp_path, "quick")).to_the_end()
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(5):
            Said(launch(launcher, tmp_path, "quick")).to_the_end()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert list((launcher._folder).iterdir()) == []


class TestWorkerDeath:
    """A worker that is killed takes everything with it, and what it could not take is swept."""

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_kill_9_of_the_worker_ends_zygote_and_trainers_at_once(self, tmp_path: Path, mode: str) -> None:
        worker, reported = _worker(tmp_path, mode)
        worker.kill()
        worker.wait()
        for pid in (reported["trainer"], reported["zygote"]):
            if pid is not None:
                eventually(lambda pid=pid: not is_alive(pid), every=0.001)
        assert set(process_group.kill_leftovers(tmp_path / "run" / "trainers")) == set(reported["children"])

    @pytest.mark.parametrize("mode", ["zygote", "cold"])
    def test_the_next_worker_sweeps_what_the_trainers_children_left(self, tmp_path: Path, mode: str) -> None:
        worker, reported = _worker(tmp_path, mode)
        worker.kill()
        worker.wait()
        eventually(lambda: not is_alive(reported["trainer"]))
        assert set(session_members(reported["trainer"])) == set(reported["children"])
        launcher = Launcher(Settings(home=tmp_path, launch="cold"), preload=[])
        assert set(launcher.start()) == set(reported["children"])
        launcher.stop()
        assert session_members(reported["trainer"]) == []
        assert list((tmp_path / "run" / "trainers").iterdir()) == []

    def test_the_folder_in_which_processes_of_a_dead_worker_met_is_removed(self, tmp_path: Path) -> None:
        meeting, records = tmp_path / "meeting", tmp_path / "trainers"
        meeting.mkdir()
        (meeting / "store").touch()
        path = process_group.record_trainer(records, ProcessIdentity.of_process(2**22 - 8, 1), meeting)
        assert process_group.kill_leftovers(records) == [] and meeting.exists(), "its worker lives"
        noted = json.loads(path.read_text())
        path.write_text(json.dumps({**noted, "worker": vars(ProcessIdentity.of_process(2**22 - 7, 1))}))
        assert process_group.kill_leftovers(records) == []
        assert not meeting.exists() and not path.exists()

    def test_trainers_of_a_living_worker_are_left_alone(self, tmp_path: Path) -> None:
        worker, reported = _worker(tmp_path, "zygote")
        assert process_group.kill_leftovers(tmp_path / "run" / "trainers") == []
        assert is_alive(reported["trainer"])
        _end(worker, reported)

    def test_a_reused_process_id_is_never_hit(self, tmp_path: Path) -> None:
        bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
        started = start_time(bystander.pid)
        earlier = ProcessIdentity.of_process(bystander.pid, started - 1000)
        gone = ProcessIdentity.of_process(2**22 - 7, 1)
        (tmp_path / "x.json").write_text(json.dumps({"trainer": vars(earlier), "worker": vars(gone)}))
        assert process_group.kill_leftovers(tmp_path) == []
        assert not list(tmp_path.iterdir())
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()

    def test_process_that_does_not_die_does_not_prevent_the_start_of_a_worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process in an uninterruptible sleep holds its own device; the machine may have others."""
        stuck = subprocess.Popen(["sleep", "60"], start_new_session=True)
        noted = vars(ProcessIdentity.of_process(stuck.pid, start_time(stuck.pid)))
        gone = vars(ProcessIdentity.of_process(2**22 - 7, 1))
        folder = tmp_path / "run" / "trainers"
        folder.mkdir(parents=True)
        (folder / "stuck.json").write_text(json.dumps({"trainer": noted, "worker": gone}))
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "_PATIENCE_SECONDS", 0.1)
            patched.setattr(process_group, "_kill_member", lambda pid, leader: False)
            launcher = Launcher(Settings(home=tmp_path, launch="cold"), preload=[])
            assert launcher.start() == []
            launcher.stop()
        assert (folder / "stuck.json").exists(), "the next worker tries again"
        assert process_group.kill_leftovers(folder) == [stuck.pid]
        stuck.wait()

    def test_records_of_another_boot_or_namespace_or_torn_ones_do_no_harm(self, tmp_path: Path) -> None:
        own = vars(ProcessIdentity.of_process(os.getpid(), start_time(os.getpid())))
        gone = {**own, "pid": 2**22 - 7}
        (tmp_path / "boot.json").write_text(json.dumps({"trainer": {**own, "boot_id": "x"}, "worker": gone}))
        foreign = {**own, "namespace": "pid:[1]"}
        (tmp_path / "namespace.json").write_text(json.dumps({"trainer": foreign, "worker": gone}))
        (tmp_path / "torn.json").write_text('{"trainer": {')
        assert process_group.kill_leftovers(tmp_path) == []
        assert [path.name for path in tmp_path.iterdir()] == ["namespace.json"]


class TestModes:
    def test_zygote_only_never_starts_cold(self, tmp_path: Path) -> None:
        launcher = Launcher(Settings(home=tmp_path, launch="zygote"), preload=["tests.no_such_module"])
        launcher.start()
        with pytest.raises(LaunchError, match="no_such_module"):
            launch(launcher, tmp_path, "quick")
        launcher.stop()

    def test_a_zygote_that_cannot_import_makes_launches_cold_and_says_why(self, tmp_path: Path) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.no_such_module"])
        launcher.start()
        process = launch(launcher, tmp_path, "quick", code=4)
        assert (process.launched, launcher.mode) == ("cold", "cold")
        assert "no_such_module" in launcher.reason
        assert Said(process).to_the_end().code == 4
        launcher.stop()

    def test_a_launch_while_the_zygote_loads_waits_for_it(self, tmp_path: Path) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.trainers"])
        launcher.start()
        process = launch(launcher, tmp_path, "quick")
        assert process.launched == "zygote"
        assert Said(process).to_the_end().code == 0
        launcher.stop()


_WORKER = """
import json, sys
from pathlib import Path
from tests.worker.process.launching import Said, launch, start_launcher
home = Path(sys.argv[1])
launcher = start_launcher(home, sys.argv[2])
said = Said(launch(launcher, home / "job", "hang", children=2)).until(lambda said: said.has("hanging"))
reported = {"trainer": said.process.pid, "zygote": launcher.zygote_pid, **said.record("hanging")}
print(json.dumps(reported), flush=True)
sys.stdin.read()
"""


_ADOPTING = """
import json, os, signal, subprocess, sys
from pathlib import Path
from tests.worker.process.launching import Said, is_alive, launch, start_launcher
home = Path(sys.argv[1])
launcher = start_launcher(home, sys.argv[2])
launcher.adopt_orphans()
bystander = subprocess.Popen(["sleep", "60"])
for how in ("ends", "dies", "waits"):
    said = Said(launch(launcher, home / how, "daemons", how=how)).until(lambda said: said.has("daemons"))
    if how == "waits" and launcher.zygote_pid:
        os.kill(launcher.zygote_pid, signal.SIGKILL)
    elif how == "waits":
        said.process.kill()
    said.to_the_end()
    pids = said.record("daemons")["pids"]
    print(json.dumps({"how": how, "pids": pids, "left": [pid for pid in pids if is_alive(pid)]}), flush=True)
assert bystander.poll() is None
bystander.kill()
launcher.stop()
"""


def _worker(home: Path, mode: str) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
    """A worker process with one hanging trainer that has two children."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(home), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    reported: dict[str, Any] = json.loads(worker.stdout.readline())
    return worker, reported


def _end(worker: "subprocess.Popen[bytes]", reported: dict[str, Any]) -> None:
    worker.kill()
    worker.wait()
    for pid in reported["children"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _can_lock(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class TestWithoutPidfds:
    @pytest.mark.parametrize("number", [pytest.param(errno.ENOSYS, marks=pytest.mark.full), errno.EPERM])
    def test_system_that_refuses_pidfds_is_named_in_the_log_and_every_end_is_noticed(
        self, number: int, tmp_path: Path
    ) -> None:
        program = [sys.executable, "-m", "tests.worker.process.without_pidfds", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.seccomp", str(number), *program],
            cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"this system refuses pidfds ([Errno {number}]") == 2, "once for each launcher"
        exits = json.loads(done.stdout)
        for mode in ("zygote", "cold"):
            assert (exits[mode]["launched"], exits[mode]["left"]) == (mode, [])
            assert exits[mode]["finished"]["code"] == 3
            assert exits[mode]["killed"]["signal"] == signal.SIGKILL
            kills_it, end, is_left = exits[mode]["ended"]
            assert (kills_it, end["signal"], is_left) == (True, signal.SIGKILL, False)
        end, is_left = exits["zygote"]["lost"]
        assert (end["launcher_lost"], is_left) == (True, False)
