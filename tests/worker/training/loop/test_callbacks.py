"""What a training process is asked for while it trains."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from tests.waiting import eventually
from tests.worker.training.tiny import Forks, make_job
from worker.training.loop.callbacks import metric_line
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.run_state import RunState

QUICK: dict[str, Any] = {"method": "lora", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("finish", [True, False], ids=["best", "discard"])
def test_a_stop_for_the_best_lets_one_that_is_being_written_get_whole(
    finish: bool, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path, tiny_model, chats, eval_data=chats, max_steps=100_000, save_steps=100_000, eval_steps=2, **QUICK,
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        forks.start(job, control=tmp_path / "control", disk=json.dumps({"slow": 5}))
        control, _ = listening.accept()
    with control:
        eventually(lambda: list(Path(job["attempt_dir"]).glob(".checkpoint-2.tmp")), timeout=60)
        control.send(ControlMessage(stop=StopRequest("best" if finish else "discard")).to_json())
        done = forks.wait()
    assert done.result["outcome"] == "stopped"
    assert [record["kind"] for record in done.of("checkpoint")][:1] == (["best"] if finish else [])


def test_a_checkpoint_that_is_asked_for_is_saved_once_and_training_goes_on(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    job = make_job(tmp_path, tiny_model, chats, max_steps=100_000, save_steps=100_000, logging_steps=1, **QUICK)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        forks.start(job, control=tmp_path / "control")
        control, _ = listening.accept()
    with control:
        eventually(lambda: [r for r in forks.said() if r["type"] == "metric"], timeout=60)
        control.send(ControlMessage(checkpoint=True).to_json())
        (saved,) = eventually(lambda: [r for r in forks.said() if r["type"] == "checkpoint"], timeout=60)
        further = saved["step"] + 3
        eventually(lambda: [r for r in forks.said() if r["type"] == "metric" and r["step"] >= further], timeout=60)
        control.send(ControlMessage(stop=StopRequest("discard")).to_json())
        done = forks.wait()
    assert saved["kind"] == "periodic"
    assert len(done.of("checkpoint")) == 1
    assert list(done.steps) == list(range(1, done.result["step"] + 1))


def test_without_logging_steps_only_the_last_step_is_logged(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = forks.run(make_job(tmp_path, tiny_model, chats, max_steps=3, logging_steps=0, **QUICK))
    assert done.result["outcome"] == "completed"
    (logged,) = done.of("metric")
    losses = [float.fromhex(loss) for loss, _ in done.steps.values()]
    assert logged["step"] == 3 and logged["loss"] == pytest.approx(sum(losses) / 3)


def test_the_log_has_metrics_as_words_and_numbers() -> None:
    logs = {"loss": 2.3120001, "learning_rate": 2e-4, "num_tokens": 12380.0, "epoch": 1, "total_flos": 1e18}
    numbers = "loss 2.312  learning_rate 0.0002  num_tokens 12380  epoch 1"
    assert metric_line(3, 200, logs) == f"step 3/200  {numbers}"
    assert metric_line(1, 2, {"loss": 0.5, "length": 3, "reward": 0.25}) == "step 1/2  loss 0.5  reward 0.25  length 3"
    assert metric_line(0, 0, logs) == f"step 0  {numbers}", "an evaluation without training"


def test_the_loss_of_a_line_is_the_mean_of_exact_losses_also_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(Trainer, "log", lambda _trainer, logs, _start: logged.append(logs))
    trainer: Any = object.__new__(ServiceTrainerMixin)
    # Restored with a checkpoint between two metrics; the sum of the library restarts.
    trainer.run = SimpleNamespace(state=RunState(losses=[8.0, 6.0]))
    trainer.state = SimpleNamespace(log_history=[])
    trainer.log({"loss": 3.0, "grad_norm": 1.0})
    trainer.log({"eval_loss": 3.0})
    assert logged == [{"loss": 7.0, "grad_norm": 1.0}, {"eval_loss": 3.0}]
