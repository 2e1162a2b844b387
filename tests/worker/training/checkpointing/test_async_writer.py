"""Checkpoints on the way are written while training goes on: what they hold is the moment of their step, to the bit."""

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.jobs import make_spec
from tests.waiting import eventually
from tests.worker.training.output.outputs import figures, weights
from tests.worker.training.tiny import Forks, Outcome, make_job
from worker.checkpoint_files.disk_space import DiskSpace
from worker.checkpoint_files.manifest import verify
from worker.training.checkpointing import pinned_memory
from worker.training.checkpointing.async_writer import AsyncWriter
from worker.training.checkpointing.disk_full import CheckpointDiskSpace
from worker.training.checkpointing.pinned_memory import InsufficientHostMemory, PinnedMemory
from worker.training.checkpointing.saver import CheckpointSaver
from worker.training.checkpointing.snapshot import Snapshot
from worker.training.failures import TrainingFailure
from worker.training.ranks import Ranks, is_peer_lost
from worker.wire.heartbeat import no_heartbeat
from worker.wire.journal import read_journal
from worker.wire.reporter import Reporter

CONFIG: dict[str, Any] = {
    "method": "full", "optim": "adamw_torch", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2, "max_steps": 6, "save_steps": 2, "logging_steps": 1, "save_total_limit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    done = forks.run(make_job(tmp_path_factory.mktemp("undisturbed"), tiny_model, chats, **CONFIG))
    assert done.result["outcome"] == "completed", done.result
    return done


def manifest_hash(folder: Path) -> str:
    """The SHA-256 of the manifest that lies in a folder: what its row would have, had it been told."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def never_short(_: int | None, why: str) -> None:
    """For what never lacks memory."""
    pytest.fail(why)


class TestWhileTrainingGoesOn:
    @pytest.mark.parametrize(
        "method",
        [
            pytest.param({}, id="full"),
            pytest.param({"method": "qlora", "lora_r": 4, "optim": "adamw_8bit"}, id="qlora", marks=pytest.mark.full),
        ],
    )
    def test_a_checkpoint_on_a_slow_disk_holds_the_moment_of_its_step(
        self, method: dict[str, Any], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = CONFIG | method
        done = forks.run(make_job(tmp_path / "1", tiny_model, chats, **config), disk=json.dumps({"slow": 1.5}))
        assert done.result["outcome"] == "completed", (done.result, done.stderr)
        reported = [(line["event"], line.get("step")) for line in read_journal(done.job["journal"])]
        assert reported.index(("save", 2)) > reported.index(("step", 3)), "the loop did not wait for the disk"
        assert reported.index(("save", 2)) < reported.index(("save", 4)) < reported.index(("save", 6)), (
            "one at a time, in order"
        )
        for step in (2, 4):
            job = make_job(
                tmp_path / f"from-{step}", tiny_model, chats, attempt=2, resume_from=done.checkpoint(step), **config
            )
            again = forks.run(job)
            assert again.steps == {n: line for n, line in done.steps.items() if n > step}
            assert (weights(again), figures(again)) == (weights(done), figures(done))

    def test_too_little_memory_to_write_costs_that_checkpoint_and_training_waits_for_the_next_ones(
        self, undisturbed: Outcome, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        request = {"id": "act_1", "action": "checkpoint", "parameters": {"pin": True}, "step": 1}
        job = make_job(tmp_path, tiny_model, chats, **CONFIG) | {"replayed_actions": [request]}
        done = forks.run(job, disk=json.dumps({"no_memory_at": 2}))
        assert done.result["outcome"] == "completed", done.result
        assert done.steps == undisturbed.steps and weights(done) == weights(undisturbed)
        saved = [(one["step"], one["pinned"], len(one["actions"])) for one in done.of("checkpoint")]
        assert saved == [(2, True, 1), (4, False, 0), (6, False, 0)], "what was asked for is answered by the next one"
        (reported,) = [
            one for one in done.of("message") if one["level"] == "warning" and "short of memory" in one["line"]
        ]
        assert "step 1 " in reported["line"]
        # The phase is reported whenever the loop waits for the disk, so its number depends on how fast that is.
        assert "saving" in [record["name"] for record in done.of("phase")], "the loop wrote the later ones itself"
        assert not list(tmp_path.rglob(".checkpoint-*"))

    def test_the_loop_is_said_to_save_only_while_it_waits(self, undisturbed: Outcome) -> None:
        phases = [record["name"] for record in undisturbed.of("phase")]
        assert phases.count("saving") <= 3 and phases[-2:] == ["saving", "exporting"]
        assert [(r["step"], r["kind"]) for r in undisturbed.of("checkpoint")] == [
            (2, "periodic"), (4, "periodic"), (6, "final"),
        ]  # fmt: skip

    # Of the first checkpoint: a file is synced, it gets its name; among the others: the weights are written (1).
    @pytest.mark.parametrize(
        "call", [18, 31, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3, 6, 12, 15, 24, 28, 29, 30, 32))]
    )
    def test_a_kill_at_any_write_fsync_or_rename_leaves_whole_checkpoints_or_none(
        self, call: int, undisturbed: Outcome, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, **CONFIG)
        killed = forks.run(job, disk=json.dumps({"kill_at": call}))
        assert killed.code == -signal.SIGKILL
        for folder in killed.folder.glob("checkpoint-*"):
            manifest_sha256 = manifest_hash(folder)
            assert verify(folder, manifest_sha256) == [], "whatever has its name is whole"
        reported = [record["step"] for record in killed.of("checkpoint")]
        resume = killed.checkpoint(reported[-1]) if reported else None
        again = forks.run(make_job(tmp_path, tiny_model, chats, attempt=2, resume_from=resume, **CONFIG))
        assert again.result["outcome"] == "completed", (again.result, again.stderr)
        expected = {n: line for n, line in undisturbed.steps.items() if n > (reported[-1] if reported else 0)}
        assert again.steps == expected and weights(again) == weights(undisturbed)


class TestInFlight:
    def test_while_the_loop_waits_each_sign_is_of_something_written(self) -> None:
        signs: list[int] = []
        in_flight, stand_still, steps = AsyncWriter(never_short), threading.Event(), threading.Semaphore(0)

        def write(alive: Any) -> None:
            while steps.acquire(timeout=60) and not stand_still.is_set():
                alive()

        in_flight.begin_write(write)
        waiting = threading.Thread(target=in_flight.wait, args=[lambda: signs.append(1)])
        waiting.start()
        eventually(lambda: len(signs) == 1)  # that it waits at all
        for count in (2, 3):
            steps.release()
            eventually(lambda count=count: len(signs) == count)
        assert not threading.Event().wait(0.6) and len(signs) == 3, "nothing written, nothing said"
        stand_still.set()
        steps.release()
        waiting.join(60)
        assert not in_flight.is_under_way

    def test_failure_of_the_thread_is_raised_once_in_the_loop(self) -> None:
        def fail(_: Any) -> None:
            raise OSError(28, "No space left on device")

        in_flight = AsyncWriter(never_short)
        in_flight.begin_write(fail)
        with pytest.raises(TrainingFailure) as failed:
            in_flight.wait(no_heartbeat)
        assert failed.value.code == "disk_full"
        in_flight.raise_failure()

    def test_the_end_of_another_rank_stays_recognizable(self) -> None:
        def fail(_: Any) -> None:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:5000")

        in_flight = AsyncWriter(never_short)
        in_flight.begin_write(fail)
        with pytest.raises(TrainingFailure) as failed:
            in_flight.wait(no_heartbeat)
        assert is_peer_lost(failed.value)

    def test_a_failure_of_the_loop_comes_first_and_leaves_nothing_being_written(self) -> None:
        written: list[int] = []
        in_flight, go_on = AsyncWriter(never_short), threading.Event()

        def write(_: Any) -> None:
            go_on.wait(60)
            written.append(1)

        with pytest.raises(ValueError, match="of the loop"), in_flight.settled_after(no_heartbeat, print):
            in_flight.begin_write(write)
            go_on.set()
            raise ValueError("of the loop")
        assert written == [1]

    def test_abandoned_checkpoint_ends_at_its_next_chunk(self) -> None:
        in_flight, pieces = AsyncWriter(never_short), []

        def write(alive: Any) -> None:
            while len(pieces) < 10_000_000:
                alive()
                pieces.append(1)

        in_flight.begin_write(write)
        in_flight.abandon()
        in_flight.wait(no_heartbeat)
        assert len(pieces) < 10_000_000


class TestHostMemory:
    def test_copies_are_equal_in_every_respect_and_are_copies(self) -> None:
        marked = torch.arange(6, dtype=torch.uint8)
        marked.is_paged = True  # type: ignore[attr-defined]
        tensors = [
            torch.randn(3, 4), torch.randn(3, 4).t(), torch.tensor(2.0), torch.empty(0, 3), marked,
            torch.randn(5).to(torch.bfloat16), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(4_500_000), torch.randn(8)[2:5], torch.tensor([True, False]),
        ]  # fmt: skip
        memory = PinnedMemory()
        copies = memory.copy_tensors(tensors)
        for tensor in tensors:
            copy = copies[id(tensor)]
            assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
            assert copy.stride() == tensor.stride() and vars(copy) == vars(tensor)
            assert copy.untyped_storage().nbytes() == tensor.nbytes, "or more would be saved than the tensor"
        before = copies[id(tensors[0])].clone()
        tensors[0].add_(1)
        assert torch.equal(copies[id(tensors[0])], before)

    def test_tensors_that_share_memory_share_it_in_the_copy(self) -> None:
        tensor = torch.randn(10)
        copies = PinnedMemory().copy_tensors([tensor, tensor.detach()])
        assert len({copy.data_ptr() for copy in copies.values()}) == 1

    def test_the_memory_of_the_last_copy_is_used_again(self) -> None:
        memory, state = PinnedMemory(), torch.randn(100_000)
        memory.prepare_memory(state.nbytes + 64)
        first = memory.copy_tensors([state])[id(state)].data_ptr()
        assert memory.copy_tensors([state])[id(state)].data_ptr() == first

    @pytest.mark.parametrize(("is_sharded", "is_copied"), [(False, True), (True, False)])
    def test_ranks_of_a_host_that_all_copy_their_part_need_memory_for_all(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_sharded: bool, is_copied: bool
    ) -> None:
        free = pinned_memory._MARGIN_BYTES + 15 * 2**20
        monkeypatch.setattr(pinned_memory, "host_memory", lambda: (2**30, free))
        ranks = Ranks(0, 2)
        ranks.on_host = 2
        run: Any = SimpleNamespace(
            folder=tmp_path, job=make_spec(tmp_path), report=Reporter(None), is_probe=False, ranks=ranks,
            is_sharded=is_sharded,
        )  # fmt: skip
        ten_mebibytes = torch.zeros(10 * 2**18)
        copy = CheckpointSaver(run).copy_to_host(Snapshot([], {"state": ten_mebibytes}, {}))
        assert (copy is not None) == is_copied

    def test_without_enough_memory_nothing_is_copied_and_training_waits_instead_which_is_reported_once(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(pinned_memory, "host_memory", lambda: (2**30, 2**28))
        with pytest.raises(InsufficientHostMemory):
            PinnedMemory().copy_tensors([torch.randn(10)])
        reported: list[tuple[str, str]] = []
        report = SimpleNamespace(
            message=lambda *said: reported.append(said), send=lambda record: reported.append((record["name"], ""))
        )
        run: Any = SimpleNamespace(
            folder=tmp_path, job=make_spec(tmp_path), report=report, is_probe=False, ranks=Ranks(), is_sharded=False
        )
        saving, snapshot = CheckpointSaver(run), Snapshot([], {"state": torch.randn(10)}, {})
        assert saving.copy_to_host(snapshot) is None and saving.copy_to_host(snapshot) is None
        assert [what for what, _ in reported if what == "saving"] == ["saving"] * 2
        ((line, level),) = [said for said in reported if said[1]]
        assert level == "warning" and "MiB of host memory" in line


class TestLimitsOfMemory:
    """A machine with two gibibytes to spare, in each of the two layouts of control groups."""

    @pytest.mark.parametrize(
        ("own", "files", "headroom"),
        [
            ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "3000", "memory.max": "9000"}, 2100),
            ("0::/a/b", {"a/b/memory.max": "2000", "a/memory.max": "3000"}, 1100),
            ("0::/gone", {"memory.max": "4000"}, 3100),  # a place outside, what is mounted is the own one
            ("0::/../b", {"memory.max": "4000", "b/memory.max": "1000"}, 3100),
            ("3:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": "5000"}, 4100),
            ("3:cpu:/job", {"memory/job/memory.limit_in_bytes": "5000"}, None),
            ("0::/", {}, None),
        ],
    )
    def test_the_tightest_from_its_own_group_upward_holds(
        self, own: str, files: dict[str, str], headroom: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, limit in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(limit + "\n")
            used = "memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"
            (path.parent / used).write_text("1000\n")
            (path.parent / "memory.stat").write_text("anon 5\ninactive_file 100\n")
        (tmp_path / "own").write_text(own + "\n")
        monkeypatch.setattr(pinned_memory, "_OWN_CGROUPS", tmp_path / "nothing")
        machine = pinned_memory.host_memory()
        monkeypatch.setattr(pinned_memory, "_CGROUPS", tmp_path / "groups")
        monkeypatch.setattr(pinned_memory, "_OWN_CGROUPS", tmp_path / "own")
        total, available = pinned_memory.host_memory()
        if headroom is None:
            assert total == machine[0] and available > 10_000
        else:
            assert available == headroom

    def test_memory_that_the_system_refuses_costs_the_copy_and_nothing_else(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(pinned_memory.mmap, "mmap", refuse)
        memory = PinnedMemory()
        memory.prepare_memory(1000)
        with pytest.raises(InsufficientHostMemory, match="which the system refuses"):
            memory.copy_tensors([torch.randn(10)])

    def test_a_kernel_without_huge_pages_will_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pinned_memory.mmap, "MADV_HUGEPAGE", 12345)
        state = torch.randn(10)
        assert torch.equal(PinnedMemory().copy_tensors([state])[id(state)], state)

    def test_memory_that_cuda_refuses_to_pin_is_used_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def refuse(*_: Any) -> int:
            calls.append(1)
            return 2

        runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=lambda _: pytest.fail("never pinned"))
        zeros = torch.zeros
        _pretend_gpus(monkeypatch, runtime)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, **_: zeros(*sizes))
        memory, small, large = PinnedMemory(), torch.randn(10), torch.randn(10_000)
        for state in (small, small, large):
            assert torch.equal(memory.copy_tensors([state])[id(state)], state)
        assert len(calls) == 2, "once for each stretch of memory"

    def test_memory_prepared_in_the_background_is_pinned_on_the_gpu_of_the_rank(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pinned_on: list[int] = []

        def register(*_: Any) -> int:
            pinned_on.append(torch.cuda.current_device())
            return 0

        _pretend_gpus(monkeypatch, SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _: 0))
        torch.cuda.set_device(3)
        memory, state = PinnedMemory(), torch.randn(10_000)
        memory.prepare_memory(state.nbytes + 64)
        memory.copy_tensors([state])
        memory.release()
        assert pinned_on == [3]


class _CurrentGpu(threading.local):
    """Index of the current GPU, which CUDA keeps for each thread."""

    index = 0


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """Pretend initialized GPUs whose driver is `runtime`."""
    current = _CurrentGpu()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current.index = current.index, index
        yield
        current.index = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.index)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(current, "index", index))
    monkeypatch.setattr(torch.cuda, "device", device)


class TestRoom:
    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """Free mebibytes of every disk, to be changed."""
        free = [100]

        def statvfs(_: Any) -> Any:
            return SimpleNamespace(f_files=0, f_blocks=1000, f_bavail=free[0], f_frsize=2**20)

        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", statvfs)
            yield free

    def test_the_reserve_stays_free(self, free: list[int], tmp_path: Path) -> None:
        assert DiskSpace(tmp_path, 0).shortage_reason(90 * 2**20) is None
        why = DiskSpace(tmp_path, 20 * 2**20).shortage_reason(90 * 2**20)
        assert why is not None
        assert all(said in why for said in ("93 MiB", "100 MiB free", "20 MiB", str(tmp_path), "save_total_limit"))

    def test_checkpoint_without_room_is_skipped_twice_in_a_row_at_most(self, free: list[int], tmp_path: Path) -> None:
        room, size = CheckpointDiskSpace(tmp_path, 0), 90 * 2**20
        for _ in range(2):  # what fits in between starts the count anew
            free[0] = 10
            for step in (1, 2):
                why = room.shortage_reason(size)
                assert why is not None and "the next is due at step 9" in room.skip_checkpoint(
                    step, why, 9, is_due=True
                )
            free[0] = 100
            assert room.shortage_reason(size) is None
        with pytest.raises(TrainingFailure) as ended:
            for step in (3, 4, 5):
                room.skip_checkpoint(step, "full", step + 1, is_due=True)
        assert ended.value.code == "disk_full" and "step 5" in ended.value.message

    @pytest.mark.parametrize("last", [{"max_steps": 9, "save_steps": 1}, {"max_steps": 1}])
    def test_before_the_first_step_the_run_says_what_is_lacking(
        self, last: dict[str, int], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, **CONFIG | last) | {"disk_reserve_bytes": 2**60}
        done = forks.run(job)
        assert done.result["error"]["code"] == "disk_full", done.result
        assert "ANNEAL_DISK_RESERVE_BYTES" in done.result["error"]["message"]
        assert done.steps == {}
        assert done.of("checkpoint") == [] and not list(done.folder.glob("*checkpoint*"))
