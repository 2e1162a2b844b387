"""The zygote forks what is warm, touches no device, and its death costs nothing but its children."""

import errno
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from app.config import Settings
from tests.jobs import make_spec
from tests.waiting import eventually
from tests.worker.process.launching import CPU, Said, is_alive, launch, start_launcher
from tests.worker.trainers import write_job
from worker import devices
from worker.process import child, zygote
from worker.process import launcher as module
from worker.process.launcher import Launcher
from worker.process.spawn import LaunchError

STOP = ControlMessage(stop=StopRequest("discard"))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose zygote the test may kill."""
    launcher = start_launcher(tmp_path / "home", "zygote")
    yield launcher
    launcher.stop()


@pytest.fixture(scope="module")
def shared_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher whose zygote goes on serving."""
    launcher = start_launcher(tmp_path_factory.mktemp("home"), "zygote")
    yield launcher
    launcher.stop()


def zygote_pid(launcher: Launcher) -> int:
    pid = launcher.zygote_pid
    assert pid is not None
    return pid


class TestFork:
    def test_preloaded_modules_are_there_without_an_import(self, tmp_path: Path) -> None:
        launcher = start_launcher(tmp_path, "zygote", preload=("tests.worker.trainers", "decimal"))
        try:
            said = Said(launcher.launch("tests.worker.trainers:loaded", write_job(tmp_path, module="decimal"), [CPU]))
            said.to_the_end()
            assert said.record("loaded")["loaded"] is True
        finally:
            launcher.stop()

    def test_a_thread_of_the_gpu_driver_does_not_prevent_forks(self, tmp_path: Path) -> None:
        preload = ("tests.worker.trainers", "tests.worker.process.preloads.starts_driver_thread")
        launcher = start_launcher(tmp_path, "zygote", preload=preload)
        try:
            assert launcher.mode == "zygote"
            module = preload[1]
            said = Said(launcher.launch("tests.worker.trainers:loaded", write_job(tmp_path, module=module), [CPU]))
            said.to_the_end()
            assert said.record("loaded")["loaded"] is True
        finally:
            launcher.stop()

    def test_what_an_import_has_opened_stays_open_in_a_child(self, tmp_path: Path) -> None:
        preload = ("tests.worker.trainers", "tests.worker.process.preloads.opens_device")
        launcher = start_launcher(tmp_path, "zygote", preload=preload)
        try:
            said = Said(launch(launcher, tmp_path, "about"))
            said.to_the_end()
            # 0, 1, 2, report, control, the folder that was being listed, and the file
            assert len(said.record("about")["descriptors"]) == 7
        finally:
            launcher.stop()

    def test_the_zygote_has_one_thread_before_and_after_forks(self, shared_launcher: Launcher, tmp_path: Path) -> None:
        for _ in range(2):
            said = Said(launch(shared_launcher, tmp_path, "count_threads"))
            said.to_the_end()
            assert said.record("threads")["parent"] == 1

    def test_zygote_starts_with_several_threads_in_the_environment_and_children_inherit_their_number(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        launcher = start_launcher(tmp_path / "home", "zygote", preload=("tests.worker.trainers", "numpy"))
        try:
            process = launch(launcher, tmp_path, "about")
            assert process.launched == "zygote"
            said = Said(process)
            said.to_the_end()
            assert said.record("about")["environment"]["OMP_NUM_THREADS"] == "4"
        finally:
            launcher.stop()

    def test_children_leave_nothing_behind_in_the_zygote(self, shared_launcher: Launcher, tmp_path: Path) -> None:
        Said(launch(shared_launcher, tmp_path, "quick")).to_the_end()
        folder = Path(f"/proc/{zygote_pid(shared_launcher)}/fd")
        before = len(list(folder.iterdir()))
        for _ in range(5):
            Said(launch(shared_launcher, tmp_path, "quick")).to_the_end()
        eventually(lambda: len(list(folder.iterdir())) == before)
        children = Path(f"/proc/{zygote_pid(shared_launcher)}/task/{zygote_pid(shared_launcher)}/children")
        assert children.read_text() == ""

    def test_exit_of_a_child_cleans_up_what_is_its_own_and_nothing_of_the_zygote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        preload = ("tests.worker.trainers", "tests.worker.process.preloads.cleans_up")
        launcher = start_launcher(tmp_path / "home", "zygote", preload=preload)
        try:
            said = Said(launch(launcher, tmp_path, "cleans_up"))
            assert said.to_the_end().code == 0
            exist = [Path(name).is_dir() for name in said.record("folders")["exist"]]
            assert exist == [True, True, False, False]
            assert [source for source, _ in said.pieces if source != "report"] == []
        finally:
            launcher.stop()

    def test_a_child_does_nothing_before_the_launcher_can_know_of_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A zygote that is killed in between leaves no trace, since the launcher has another child forked."""
        alive, ours = os.pipe()

        def die(*_: Any) -> None:
            select.select([alive], [], [], 0.5)  # time in which the child could act
            os._exit(9)

        def act(*_: Any) -> None:
            (tmp_path / "acted").touch()
            os._exit(0)

        monkeypatch.setattr(child, "run", act)
        monkeypatch.setattr(socket, "send_fds", die)
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.detach(), *(os.open(os.devnull, os.O_RDWR) for _ in range(4))]
        pid = os.fork()
        if pid == 0:
            try:
                zygote._fork_child(child.LaunchSpec("x:y", [], "/", [CPU]), fds)
            finally:
                os._exit(1)
        for descriptor in (*fds, ours):
            os.close(descriptor)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert os.read(alive, 1) == b"", "the child has ended too"
        os.close(alive)
        status.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_crash_in_one_child_leaves_the_next_alone(self, shared_launcher: Launcher, tmp_path: Path) -> None:
        for how in ("segv", "kill", "exception"):
            Said(launch(shared_launcher, tmp_path, "die", how=how)).to_the_end()
        assert Said(launch(shared_launcher, tmp_path, "quick")).to_the_end().code == 0


class TestWant:
    """Want of memory or descriptors costs one launch, never the zygote and the runs that it has forked."""

    def test_without_descriptors_a_launch_fails_with_the_reason_and_the_others_go_on(
        self, shared_launcher: Launcher, tmp_path: Path
    ) -> None:
        pid = zygote_pid(shared_launcher)
        said = Said(process := launch(shared_launcher, tmp_path, "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
        limit = [number for number in range(len(taken) + 4) if number not in taken][3]  # three are free below it
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        with pytest.raises(LaunchError, match="Too many open files"):
            launch(shared_launcher, tmp_path / "2", "quick")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert Said(launch(shared_launcher, tmp_path / "3", "quick", code=3)).to_the_end().code == 3
        assert zygote_pid(shared_launcher) == pid
        process.send(STOP)
        assert said.to_the_end().code == 0

    @pytest.mark.parametrize("call", ["fork", "pidfd_open"])
    def test_a_call_that_fails_is_reported_and_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        forked: list[int] = []
        fork = os.fork

        def no_room(*_: int) -> int:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        def remembered() -> int:
            pid = fork()
            if pid == 0:
                signal.pause()
            forked.append(pid)
            return pid

        monkeypatch.setattr(os, "fork", remembered)
        monkeypatch.setattr(os, call, no_room)
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.detach(), *(os.open(os.devnull, os.O_RDWR) for _ in range(4))]
        assert zygote._fork_child(child.LaunchSpec("x:y", [], "/", [CPU]), fds) is None
        assert json.loads(status.recv(1024)) == {"failed": "[Errno 12] Cannot allocate memory"}
        assert status.recv(1024) == b""
        status.close()
        for descriptor in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        assert not any(is_alive(pid) for pid in forked)


class TestTraining:
    @pytest.mark.full
    @pytest.mark.parametrize("threads", ["1", "4"])
    def test_a_fork_has_the_training_libraries_warm_and_computes_with_several_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        launcher = Launcher(Settings(home=tmp_path))
        launcher.start()
        try:
            assert launcher.wait_ready(120)
            assert launcher.mode == "zygote", launcher.reason
            said = Said(launch(launcher, tmp_path, "multiply"))
            assert said.to_the_end(60).code == 0
            product = said.record("product")
            assert all(product["warm"].values()), product
            assert (product["total"], product["cuda"]) == (512.0**3, False)
            # Fewer than the variable says on a machine with fewer cores.
            command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
            assert product["threads"] == int(subprocess.check_output(command))
        finally:
            launcher.stop()


class TestDeath:
    def test_kill_9_takes_its_children_at_once_and_supervisors_learn_it(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        os.kill(zygote_pid(launcher), signal.SIGKILL)
        eventually(lambda: not is_alive(process.pid), every=0.001)
        assert said.to_the_end().launcher_lost

    def test_after_kill_9_a_new_one_serves(self, launcher: Launcher, tmp_path: Path) -> None:
        for _ in range(3):
            old = zygote_pid(launcher)
            os.kill(old, signal.SIGKILL)
            eventually(lambda old=old: launcher.zygote_pid not in (old, None))
            process = launch(launcher, tmp_path, "quick")
            assert process.launched == "zygote"
            assert Said(process).to_the_end().code == 0

    def test_a_launch_in_the_moment_of_its_death_still_starts_one_process(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        os.kill(zygote_pid(launcher), signal.SIGKILL)
        assert Said(launch(launcher, tmp_path, "quick", code=5)).to_the_end().code == 5

    def test_a_frozen_zygote_costs_a_wait_and_never_a_second_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("worker.process.spawn.FORK_SECONDS", 0.5)
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.trainers"])
        launcher.start()
        assert launcher.wait_ready(120)
        pid = zygote_pid(launcher)
        os.kill(pid, signal.SIGSTOP)
        lock = tmp_path / "lock"
        entry = "tests.worker.trainers:wait_for_stop"
        process = launcher.launch(entry, write_job(tmp_path), [CPU], [lock])
        assert process.launched == "cold"
        os.kill(pid, signal.SIGCONT)  # now it forks what it was asked for, and that ends by itself
        said = Said(process).until(lambda said: said.has("message"))
        children = Path(f"/proc/{pid}/task/{pid}/children")
        eventually(lambda: not children.exists() or children.read_text() == "")
        process.send(STOP)
        assert said.to_the_end().code == 0
        launcher.stop()

    def test_sigterm_and_ctrl_c_for_everyone_leave_it_to_the_trainers(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(process := launch(launcher, tmp_path, "wait_for_stop"))
        said.until(lambda said: said.has("message"))
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(zygote_pid(launcher), number)
        assert Said(launch(launcher, tmp_path / "2", "quick")).to_the_end().code == 0
        process.send(STOP)
        assert said.to_the_end().code == 0

    def test_stopping_the_launcher_leaves_no_process(self, tmp_path: Path) -> None:
        launcher = start_launcher(tmp_path, "zygote")
        pid = zygote_pid(launcher)
        process = launch(launcher, tmp_path, "hang")
        launcher.stop()
        assert not is_alive(pid)
        eventually(lambda: not is_alive(process.pid))
        assert process.close().launcher_lost


class TestRefusal:
    """What cannot be forked safely is not forked: launches are cold then, and the reason is told."""

    @pytest.mark.parametrize(
        ("module", "reason"),
        [
            ("tests.worker.process.preloads.starts_thread", "threads"),
            ("tests.worker.process.preloads.missing", "No module named"),
        ],
    )
    def test_a_preload_that_no_fork_would_survive_means_cold(self, tmp_path: Path, module: str, reason: str) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=[module])
        launcher.start()
        assert launcher.wait_ready(120)
        assert launcher.mode == "cold"
        assert reason in launcher.reason
        assert Said(launch(launcher, tmp_path, "quick", code=2)).to_the_end().code == 2
        launcher.stop()

    @pytest.mark.parametrize("launcher_mode", ["auto", "zygote"])
    @pytest.mark.parametrize(
        ("how", "reason"), [("hangs", "was not ready within 1 s; another one"), ("dies", "died 3 times before")]
    )
    def test_zygote_that_fails_to_get_ready_is_started_again_until_it_is_and_launches_are_cold_meanwhile(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        how: str,
        reason: str,
        launcher_mode: str,
    ) -> None:
        caplog.set_level("INFO", "worker.process.launcher")
        monkeypatch.setattr(module, "_READY_SECONDS", 1.0 if how == "hangs" else 120.0)
        monkeypatch.setattr(module, "_LONGEST_WAIT", 0.5)
        monkeypatch.setattr(module, "_MAX_START_PAUSE", 0.6)
        monkeypatch.setenv("HF_XET_TEST_FAILURE", str(tmp_path / "failure"))
        (tmp_path / "failure").write_text(how)
        settings = Settings(home=tmp_path, launch=launcher_mode)  # type: ignore[arg-type]
        launcher = Launcher(settings, preload=["tests.worker.trainers", "tests.worker.process.preloads.fails_for_now"])
        launcher.start()
        eventually(lambda: launcher._unready_because.startswith(f"the zygote {reason}"), timeout=120)
        if launcher_mode == "auto":
            assert (launcher.mode, launcher.reason) == ("cold", launcher._unready_because)
            assert launcher.wait_ready(0)
            process = launch(launcher, tmp_path / "cold", "quick", code=2)
            assert process.launched == "cold" and Said(process).to_the_end().code == 2
        else:
            assert (launcher.mode, launcher.reason, launcher.wait_ready(0)) == ("zygote", "", False)
        (tmp_path / "failure").unlink()
        monkeypatch.setattr(module, "_READY_SECONDS", 120.0)
        eventually(lambda: launcher.zygote_pid is not None, timeout=120)
        assert (launcher.mode, launcher.reason) == ("zygote", "")
        process = launch(launcher, tmp_path / "warm", "quick", code=3)
        assert process.launched == "zygote" and Said(process).to_the_end().code == 3
        launcher.stop()
        said = [record.getMessage() for record in caplog.records]
        cold = ", and training processes start cold until it is ready" * (launcher_mode == "auto")
        assert any(reason.partition(";")[0] in line and line.endswith(f"s{cold}") for line in said), said
        assert said[-1] == "the zygote is ready: training processes are forked from it again"

    def test_pauses_between_starts_grow_and_are_no_shorter_than_a_start_has_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_READY_SECONDS", 0.3)
        monkeypatch.setattr(module, "_MAX_START_PAUSE", 0.9)
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.process.preloads.sleeps"])
        launcher.start()
        pattern = re.compile(r"the zygote was not ready within 0 s; another one is started in ([0-9.]+) s")
        eventually(lambda: sum(bool(pattern.match(line)) for line in caplog.messages) >= 3)
        launcher.stop()
        pauses = [float(match[1]) for line in caplog.messages if (match := pattern.match(line))][:3]
        assert 0.3 <= pauses[0] < pauses[1] <= pauses[2] == 0.9

    def test_zygote_whose_imports_cannot_be_forked_is_not_started_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        launcher = Launcher(Settings(home=tmp_path), preload=["tests.worker.process.preloads.starts_thread"])
        launcher.start()
        assert launcher.wait_ready(120)
        assert Said(launch(launcher, tmp_path, "quick")).to_the_end().code == 0, "the keeper has had its turn"
        assert launcher._zygote is None
        launcher.stop()
        (line,) = caplog.messages
        assert "threads" in line and line.endswith("training processes start cold until the worker is restarted")


class TestGpu:
    """On a machine with a GPU, played here with a driver of our own."""

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """GPUs of capability 9.0 and 8.0, and a `torch` that records when its real CUDA functions are reached."""
        first = devices.Device("cuda", 0, "GPU-1", "H100", 80 << 30, (9, 0))
        other = devices.Device("cuda", 1, "GPU-2", "A100", 80 << 30, (8, 0))
        monkeypatch.setattr(devices, "list_gpus", lambda: (first, other))
        monkeypatch.setattr(zygote, "_running_threads", lambda: ["main"])  # those of the test process do not matter
        touched: list[str] = []
        torch: Any = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(
            is_initialized=lambda: bool(touched),
            get_device_capability=lambda device=None: touched.append("get_device_capability") or (1, 0),
        )
        torch.touched = touched
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.delitem(sys.modules, "tests.worker.process.preloads.asks_capability", raising=False)
        return torch

    def test_the_capability_is_answered_without_touching_cuda(self, gpu: Any) -> None:
        real = gpu.cuda.get_device_capability
        zygote.preload_modules(["tests.worker.process.preloads.asks_capability"])
        module = importlib.import_module("tests.worker.process.preloads.asks_capability")
        assert module.seen == (9, 0)
        assert gpu.touched == []
        assert gpu.cuda.get_device_capability is real  # children use the real one

    def test_imports_that_initialise_cuda_are_refused(self, gpu: Any) -> None:
        gpu.touched.append("something")
        with pytest.raises(RuntimeError, match="initialized CUDA"):
            zygote.preload_modules(["tests.worker.process.preloads.asks_capability"])

    @pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", types.SimpleNamespace(index=0)])
    def test_every_way_to_name_a_device_is_understood(self, gpu: Any, device: Any) -> None:
        with zygote.capability_from_nvml():
            assert gpu.cuda.get_device_capability(device) == (9, 0)

    @pytest.mark.parametrize("device", [1, "cuda:1", types.SimpleNamespace(index=1), types.SimpleNamespace(idx=1)])
    def test_every_gpu_has_its_own_capability(self, gpu: Any, device: Any) -> None:
        with zygote.capability_from_nvml():
            assert gpu.cuda.get_device_capability(device) == (8, 0)

    def test_without_a_gpu_there_is_no_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "list_gpus", lambda: ())
        assert zygote.check_gpus() == {}

    @pytest.mark.full
    def test_the_real_libraries_reach_no_real_cuda_function(self) -> None:
        """transformers, peft and bitsandbytes, told that there is a GPU, import without touching it."""
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_WITH_PRETENDED_GPU],
            capture_output=True,
            text=True,
            env={**Settings().trainer_environment(), "CUDA_VISIBLE_DEVICES": "0"},
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {"asked": True, "reached": []}


class TestCheck:
    """Of four GPUs the second fails, the third hangs, and the fourth fails with advice.

    A new process ends as `tests.worker…bad_gpus` says.
    """

    def start(self, home: Path, monkeypatch: pytest.MonkeyPatch, new_process: str) -> Launcher:
        monkeypatch.setenv("HF_XET_TEST_NEW_PROCESS", new_process)  # one of the variables that reach the zygote
        preload = ["tests.worker.trainers", "tests.worker.process.preloads.bad_gpus"]
        launcher = Launcher(Settings(home=home), preload=preload)
        launcher.start()
        assert launcher.wait_checked(120)
        return launcher

    def test_gpus_on_which_a_step_fails_are_named_and_the_zygote_serves_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = self.start(tmp_path / "home", monkeypatch, new_process="/bin/false")
        try:
            assert launcher.mode == "zygote", launcher.reason
            assert launcher.broken == {
                "GPU-1abc": f"RuntimeError: illegal memory access{zygote._ADVICE}",
                "GPU-2abc": f"no answer within 3 s{zygote._ADVICE}",
                "GPU-3abc": "This host cannot compile GPU kernels: install `gcc`.",
            }
            assert Said(launch(launcher, tmp_path, "quick")).to_the_end().code == 0
        finally:
            launcher.stop()

    def test_where_only_a_forked_process_fails_launches_are_cold_and_no_gpu_is_broken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = self.start(tmp_path, monkeypatch, new_process="/bin/true")
        try:
            assert (launcher.mode, launcher.broken) == ("cold", {})
            assert "a forked process cannot use the GPU GPU-1abc, though a new one can" in launcher.reason
            assert "nvidia-smi" not in launcher.reason
        finally:
            launcher.stop()


_IMPORT_WITH_PRETENDED_GPU = """
import json, os, torch
from worker import devices
from worker.process import zygote
devices.list_gpus = lambda: (devices.Device("cuda", 0, "GPU-1", "H100", 80 << 30, (9, 0)),)
reached, asked = [], []
def forbidden(name):
    def real(*a, **k):
        reached.append(name)
        raise RuntimeError(name + " would create a CUDA context")
    return real
for name in ("get_device_capability", "get_device_properties", "_lazy_init", "mem_get_info", "get_device_name"):
    setattr(torch.cuda, name, forbidden(name))
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch._C._cuda_getCurrentRawStream = lambda device: 0  # which only builds with CUDA have
torch.version.cuda = torch.version.cuda or "12.8"
answer = devices.compute_capability
devices.compute_capability = lambda index: asked.append(index) or answer(index)
zygote.preload_modules(["bitsandbytes.cuda_specs", "peft", "transformers.trainer", "trl.trainer.sft_trainer"])
import bitsandbytes.cuda_specs
with zygote.capability_from_nvml():
    bitsandbytes.cuda_specs.get_cuda_specs()
print()
print(json.dumps({"asked": bool(asked), "reached": reached}))
"""


class TestSpeed:
    def test_a_fork_is_far_sooner_than_a_cold_start(self, tmp_path: Path) -> None:
        """With half a second of imports already; training has four."""
        seconds = {}
        for mode in ("zygote", "cold"):
            launcher = start_launcher(tmp_path / mode, mode, preload=("worker.fake.trainer", "sqlalchemy.orm"))
            process = launcher.launch("worker.fake.trainer:main", _fake_job(tmp_path / mode), [CPU])
            Said(process).until(lambda said: said.records)
            used = psutil.Process(process.pid).cpu_times()  # by the clock, a busy machine would make both slow
            process.close()
            launcher.stop()
            seconds[mode] = used.user + used.system
        assert seconds["zygote"] * 2 < seconds["cold"], seconds


def _fake_job(folder: Path) -> Path:
    config = {"base_model": "none", "extra": {"step_seconds": 600.0}}  # it is alive when its first record arrives
    return write_job(folder, **json.loads(make_spec(folder, config=config).to_json()))
