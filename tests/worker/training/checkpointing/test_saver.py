"""What becomes of a checkpoint that is being written, or finds no room, when training ends or goes on."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.optim import PagedAdamW8bit
from peft import LoraConfig, get_peft_model
from peft.utils import save_and_load
from transformers import AutoModelForCausalLM, Trainer

from anneal.contracts.attempt.messages import ActionRequest, TrainerRecord
from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.stop import StopMode
from tests.jobs import make_spec
from tests.waiting import eventually
from worker.checkpoint_files import manifest
from worker.training.checkpointing import fidelity_check, saver, snapshot
from worker.training.checkpointing.saver import CheckpointSaver
from worker.training.checkpointing.snapshot import Snapshot
from worker.training.failures import TrainingFailure
from worker.training.loop.actions import Actions
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.plugins import checkpoint_engines, hooks
from worker.training.plugins.checkpoint_engines import EngineCopier
from worker.training.ranks import Ranks
from worker.training.run_state import RunState
from worker.wire.control import Control


class Report:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, Any]] = []

    def alive(self) -> None:
        self.reported.append(("alive", None))

    def message(self, line: str, level: str = "info") -> None:
        self.reported.append((level, line))

    def send(self, record: TrainerRecord) -> None:
        if record["type"] == "checkpoint":
            kind = "checkpoint for actions" if record["actions"] else "checkpoint"
            self.reported.append((kind, record["name"]))
        elif record["type"] == "action":
            self.reported.append((f"action {record['status']}", record.get("message")))
        else:
            assert record["type"] == "phase"
            self.reported.append(("phase", record["name"]))

    def of(self, kind: str) -> list[Any]:
        """What was told of this kind."""
        return [what for name, what in self.reported if name == kind]


class Training:
    """A trainer as saving sees it, at whatever step a test puts it."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self.report, self.go_on, self.control = Report(), threading.Event(), Control()
        options = SimpleNamespace(checkpoint_engine=None)
        config = SimpleNamespace(save_steps=2, seed=1, eval_steps=None, trainer_options=options)
        self.run: Any = SimpleNamespace(
            folder=folder, job=make_spec(folder, run_id="run_a", disk_reserve_bytes=reserve), report=self.report,
            config=config, state=RunState(), save_kind="periodic", ended_by=None, fingerprint={}, is_probe=False,
            save_every=2, eval_every=None, ranks=Ranks(), is_sharded=False,
            method=METHODS[TrainingMethod.sft],
            journal=SimpleNamespace(record_save=lambda step: None), control=self.control, stop_requested=None,
        )  # fmt: skip
        weights = torch.nn.Linear(4, 4)
        self.trainer: Any = SimpleNamespace(
            run=self.run, model=weights, optimizer=torch.optim.SGD(weights.parameters()),
            state=SimpleNamespace(global_step=0, epoch=0.5, max_steps=10), saved_step=0, pinned_text=list,
            sharding=None,
            control=SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False),
        )  # fmt: skip
        trainer, run = self.trainer, self.run
        self.saving: Any = CheckpointSaver(run)
        self.actions: Any = Actions(trainer)
        trainer.saving, trainer.actions = self.saving, self.actions
        self.saving.gatherer.gather_state = self._gather

    def _gather(self, _trainer: Any, folder: Path, _whole: Any) -> Snapshot:
        (folder / "state.json").write_text("{}")

        def wait(_folder: Path) -> None:
            if threading.current_thread().name == "checkpoint":
                assert self.go_on.wait(120)

        return Snapshot([], {"state": torch.randn(10)}, {}, [wait])

    def save(self, step: int, kind: str = "periodic") -> bool:
        """Save at a step."""
        self.run.save_kind, self.trainer.state.global_step = kind, step
        return saver.save_checkpoint(self.trainer)

    def end(self, why: str, mode: StopMode) -> None:
        """Let training end behind the present step."""
        self.run.ended_by = why
        ServiceTrainerMixin.end_early(self.trainer, why, mode)

    @property
    def saved(self) -> list[str]:
        """Names of the checkpoints told, and of those on the disk."""
        names = self.report.of("checkpoint")
        assert sorted(names) == sorted(path.name for path in self.run.folder.glob("checkpoint-*"))
        return names


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr(fidelity_check, "fidelity_value", lambda *_: torch.zeros(1).numpy().tobytes())
    training = Training(tmp_path)
    yield training
    training.go_on.set()


@pytest.fixture
def full(training: Training, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Fills the disk, or makes room again."""
    is_full = [False]

    def statvfs(_: Any) -> Any:
        return SimpleNamespace(f_files=0, f_blocks=1000, f_bavail=0 if is_full[0] else 1000, f_frsize=2**20)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return lambda is_wanted: is_full.__setitem__(0, is_wanted)


class TestInFlight:
    @pytest.mark.parametrize(("finish", "saved"), [(True, ["checkpoint-2"]), (False, [])], ids=["best", "discard"])
    def test_only_a_discarding_stop_abandons_the_checkpoint_being_written(
        self, finish: bool, saved: list[str], training: Training
    ) -> None:
        with training.saving.settled():
            training.save(2, "best")
            training.end("stop", "best" if finish else "discard")
            training.go_on.set()
        assert training.saved == saved

    def test_checkpoint_of_the_last_step_is_not_written_twice(self, training: Training) -> None:
        with training.saving.settled():
            training.save(2)
            training.end("stop", "checkpoint")
            threading.Timer(0.1, training.go_on.set).start()
            assert training.save(2, "stop"), "it is waited for"
        assert training.saved == ["checkpoint-2"]

    def test_while_the_loop_does_something_else_the_thread_gives_no_sign_of_life(self, training: Training) -> None:
        training.go_on.set()
        training.save(2)
        eventually(lambda: not training.saving.in_flight.is_under_way)
        assert training.report.of("checkpoint") == ["checkpoint-2"] and training.report.of("alive") == []
        training.saving.in_flight._done += 1
        training.saving.in_flight.wait(training.report.alive)

    def test_when_a_step_fails_the_one_on_its_way_gets_whole_for_the_next_attempt(self, training: Training) -> None:
        with pytest.raises(TrainingFailure, match="NaN"), training.saving.settled():
            training.save(2)
            threading.Timer(0.1, training.go_on.set).start()
            raise TrainingFailure("non_finite_loss", "NaN")
        assert training.saved == ["checkpoint-2"] and training.saving.kept_step == 2
        folder = training.run.folder / "checkpoint-2"
        assert manifest.verify(folder, hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()) == []

    def test_a_failure_of_the_writing_is_reported_though_the_step_failed_first(
        self, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(manifest, "commit", fail)
        training.go_on.set()
        with pytest.raises(ValueError, match="of the loop"), training.saving.settled():
            training.save(2)
            raise ValueError("of the loop")
        (line,) = training.report.of("warning")
        assert "could not be written either. The disk is full" in line

    @pytest.mark.parametrize("finish", [True, False])
    def test_a_full_disk_makes_no_failure_of_a_stop(
        self, finish: bool, training: Training, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(manifest, "commit", fail)
        training.go_on.set()
        with training.saving.settled():
            training.save(2, "best")
            training.end("stop", "best" if finish else "checkpoint")
            if not finish:
                training.save(3, "stop")
        assert training.saved == [] and len(training.report.of("warning")) == 1


class TestNoRoom:
    @pytest.mark.parametrize(
        ("why", "says"),
        [("drain", "The run is released without it: it goes on"), ("stop", "The run ends without it: if resumed")],
    )
    def test_an_end_does_without_its_checkpoint_and_says_what_that_costs(
        self, why: str, says: str, training: Training, full: Callable[[bool], None]
    ) -> None:
        training.go_on.set()
        with training.saving.settled():
            training.save(2)
            training.saving.in_flight.wait(training.report.alive)
            full(True)
            training.trainer.state.global_step = 5
            training.end(why, "checkpoint")
            training.save(5, "stop")
        (line,) = training.report.of("warning")
        assert says in line and "from the checkpoint of step 2, and trains steps 3 to 5 again" in line
        assert training.saved == ["checkpoint-2"]

    def test_only_a_finished_run_fails_without_its_last_checkpoint(
        self, training: Training, full: Callable[[bool], None]
    ) -> None:
        full(True)
        training.trainer.control.should_training_stop = True
        with pytest.raises(TrainingFailure) as ended:
            training.save(10, "final")
        assert ended.value.code == "disk_full"

    def test_it_is_seen_before_anything_is_written(self, training: Training, full: Callable[[bool], None]) -> None:
        full(True)
        before, wrote = list(training.run.folder.iterdir()), []
        training.saving.gatherer.gather_state = lambda *_: wrote.append(1)
        training.save(2)
        assert wrote == [] and list(training.run.folder.iterdir()) == before

    def test_only_those_due_by_save_steps_count_towards_the_end_of_the_run(
        self, training: Training, full: Callable[[bool], None]
    ) -> None:
        full(True)
        for step, kind in ((1, "periodic"), (2, "periodic"), (3, "best"), (3, "periodic"), (4, "periodic")):
            training.save(step, kind)
        first, *_, last = training.report.of("warning")
        assert "It is skipped; the next is due at step 2." in first and "due at step 6." in last
        with pytest.raises(TrainingFailure, match="step 6 does not fit on the disk, nor did the 2 that were due"):
            training.save(6)

    def test_an_action_that_asked_for_it_is_answered_at_once(
        self, training: Training, full: Callable[[bool], None]
    ) -> None:
        full(True)
        request = ActionRequest("act_1", "checkpoint", {})
        training.trainer.state.global_step = 3
        training.actions._save_checkpoint(request, training.trainer.control)
        training.save(3)
        ((why),) = training.report.of("action failed")
        assert "does not fit on the disk" in why
        full(False)
        training.go_on.set()
        training.save(4)
        training.saving.in_flight.wait(training.report.alive)
        assert training.saved == ["checkpoint-4"], "which answers nothing any more"

    def test_a_best_one_that_found_none_is_not_what_later_ones_are_held_against(
        self, training: Training, full: Callable[[bool], None]
    ) -> None:
        state = training.run.state
        assert state.record_objective(3.0, 1, False)
        full(True)
        assert state.record_objective(1.0, 3, False)
        training.save(3, "best")
        assert state.record_objective(2.0, 5, False), "better than any checkpoint there is"
        assert not state.record_objective(2.5, 7, False)
        assert state.record_objective(1.5, 9, False)
        assert state.best_objective == 1.0 and state.evals_without_improvement == 3


def test_the_state_of_a_paged_optimizer_is_paged_again_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged memory needs a GPU; here a mark stands for it, which new state gets where bitsandbytes would page it."""

    def paged_buffer(_optimizer: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]
        return buffer

    def stepped() -> tuple[torch.Tensor, PagedAdamW8bit]:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(64, 128))
        optimizer = PagedAdamW8bit([weights], lr=1e-3)
        weights.grad = torch.randn(64, 128)
        optimizer.step()
        return weights, optimizer

    def load(_trainer: Any, _checkpoint: str) -> None:
        loaded.load_state_dict(trained.state_dict())
        monkeypatch.setattr(PagedAdamW8bit, "get_state_buffer", paged_buffer)

    weights, trained = stepped()
    _, loaded = stepped()
    trainer: Any = object.__new__(ServiceTrainerMixin)
    trainer.optimizer = SimpleNamespace(optimizer=loaded, param_groups=loaded.param_groups)  # as accelerate wraps it
    trainer.run = SimpleNamespace(config=None)
    monkeypatch.setattr(Trainer, "_load_optimizer_and_scheduler", load)
    monkeypatch.setattr(ServiceTrainerMixin, "_report_loaded", lambda *_: None)
    monkeypatch.setattr(hooks, "controls_learning_rate", lambda _config: False)
    monkeypatch.setattr(saver, "reapply_rates", lambda *_: None)
    trainer._load_optimizer_and_scheduler("checkpoint-1")
    (state,) = loaded.state.values()
    for name in ("state1", "state2"):
        assert state[name].is_paged
        assert torch.equal(state[name], trained.state[weights][name])


def test_a_checkpoint_of_an_adapter_on_a_hub_model_asks_the_hub_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_calls: list[Any] = []
    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", lambda *about: hub_calls.append(about))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = "owner/model"
    snapshot.save_weights(adapted, tmp_path)
    assert hub_calls == []
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


class TestKeeper:
    @pytest.fixture
    def copied(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What an engine has copied, which takes until `go_on`."""
        copied: list[str] = []

        def keep(_run: Any, folder: Path) -> None:
            copied.append(folder.name)
            assert training.go_on.wait(120)

        monkeypatch.setattr(checkpoint_engines, "store_replica", keep)
        training.run.config.trainer_options.checkpoint_engine = object()
        return copied

    def test_neither_the_next_checkpoint_nor_a_stop_waits_for_the_engine(
        self, training: Training, copied: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint_engines, "_STOP_SECONDS", 0.3)
        folders = [training.run.folder / f"checkpoint-{step}" for step in (2, 4, 6)]
        for folder in folders:
            folder.mkdir()
            training.saving.engine_copier.queue_copy(folder)
            eventually(lambda: copied == ["checkpoint-2"])
        training.run.stop_requested = object()
        with training.saving.settled():
            pass
        (line,) = training.report.of("warning")
        assert "may have no copy of checkpoint-2, checkpoint-4, checkpoint-6" in line
        assert training.report.of("alive") == []

    def test_the_end_waits_for_the_copies_the_newest_first(self, training: Training, copied: list[str]) -> None:
        for step in (2, 4, 6):
            folder = training.run.folder / f"checkpoint-{step}"
            folder.mkdir()
            training.saving.engine_copier.queue_copy(folder)
            eventually(lambda: copied == ["checkpoint-2"])
        (training.run.folder / "checkpoint-4").rmdir()  # cleaned up meanwhile
        threading.Timer(0.1, training.go_on.set).start()
        with training.saving.settled():
            pass
        assert copied == ["checkpoint-2", "checkpoint-6"] and training.report.of("warning") == []

    def test_invalid_checkpoint_engine_fails_the_run(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        def none(*_: Any) -> None:
            raise TrainingFailure("config_error", "no engine")

        monkeypatch.setattr(checkpoint_engines, "store_replica", none)
        training.run.config.trainer_options.checkpoint_engine = object()
        keeper = EngineCopier(training.run)
        keeper.queue_copy(training.run.folder)
        keeper.wait_for_copies()
        with pytest.raises(TrainingFailure, match="no engine"):
            keeper.raise_failure()
