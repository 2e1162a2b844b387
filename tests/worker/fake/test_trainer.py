"""The fake trainer behaves as a real one in everything but the training."""

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.fake_options import FakeOptions
from anneal.contracts.stop import StopRequest
from app.infra.files import file_manifest
from tests.worker.process.launching import CPU, Said, start_launcher
from tests.worker.trainers import write_job
from worker.checkpoint_files import manifest
from worker.process.launcher import Launcher
from worker.process.training_process import Exit
from worker.wire.journal import read_journal


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = start_launcher(tmp_path_factory.mktemp("home"), "zygote", preload=("worker.fake.trainer",))
    yield launcher
    launcher.stop()


class Run:
    """One run of several attempts, as a supervisor would start them."""

    def __init__(self, launcher: Launcher, folder: Path, **config: Any) -> None:
        self.launcher = launcher
        self.folder = folder
        self.attempt = 0
        extra = {"step_seconds": 0, **config.pop("extra", {})}
        self.config = {"base_model": "none", "save_steps": 5, "logging_steps": 1, **config, "extra": extra}
        self.given = ["base_model", *config, *(f"extra.{name}" for name in extra)]
        self.rows: int | None = None
        self.sha256: str | None = None

    def start(self, resume_from: dict[str, Any] | None = None, run_id: str = "run_x", **config: Any) -> Said:
        """Start the next attempt."""
        self.attempt += 1
        attempt = self.folder / f"a{self.attempt}"
        dataset = {"id": "ds", "path": "", "format": "text", "rows": self.rows, "sha256": self.sha256}
        job = write_job(
            attempt,
            run_id=run_id,
            attempt=self.attempt,
            backend="fake",
            config={**self.config, **config},
            user_set_fields=[*self.given, *config],
            dataset=dataset,
            base_model={"name": "none", "path": None, "hub": None, "revision": None},
            attempt_dir=str(attempt),
            resume_from=resume_from,
            journal=str(self.folder / "journal.jsonl"),
            device=CPU,
        )
        return Said(self.launcher.launch("worker.fake.trainer:main", job, [CPU]))

    def finish(self, resume_from: dict[str, Any] | None = None, **config: Any) -> tuple[Said, Exit]:
        """Run the next attempt to its end."""
        said = self.start(resume_from, **config)
        return said, said.to_the_end()

    def checkpoint(self, said: Said, index: int = -1) -> dict[str, Any]:
        """What a job says to resume from a checkpoint of `said`."""
        record = [record for record in said.records if record["type"] == "checkpoint"][index]
        path = self.folder / f"a{self.attempt}" / record["name"]
        return {
            "path": str(path),
            "step": record["step"],
            "manifest_sha256": record["manifest_sha256"],
        }

    def steps(self, attempt: int | None = None) -> dict[int, tuple[str, list[int]]]:
        """Loss and samples of each step by the journal."""
        return {
            event["step"]: (event["loss_hex"], event["samples"])
            for event in read_journal(self.folder / "journal.jsonl")
            if event["event"] == "step" and attempt in (None, event["attempt"])
        }


def result(said: Said) -> dict[str, Any]:
    return said.record("result")


def stop(save: bool = True) -> ControlMessage:
    return ControlMessage(stop=StopRequest("checkpoint" if save else "discard"))


class TestCompletion:
    def test_a_run_reports_its_phases_and_leaves_output(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=7)
        said, end = run.finish()
        assert end.code == 0
        kinds = [r.get("name", r["type"]) if r["type"] == "phase" else r["type"] for r in said.records]
        assert kinds == [
            *["loading", "config", "training"],
            *["metric"] * 5,
            *["saving", "checkpoint", "training", "metric", "metric", "saving", "checkpoint", "exporting", "result"],
        ]
        assert result(said)["outcome"] == "completed"
        assert result(said)["step"] == 7
        output = tmp_path / "a1" / result(said)["output"]
        assert {path.name for path in output.iterdir()} == {"fake_model.json", "metrics.jsonl"}
        assert said.text.count("step ") >= 7
        assert [event["event"] for event in read_journal(tmp_path / "journal.jsonl")] == [
            *["start"], *["step"] * 5, *["save"], *["step"] * 2, *["save", "stop"]
        ]  # fmt: skip

    def test_the_loss_falls_and_depends_on_the_seed_alone(self, launcher: Launcher, tmp_path: Path) -> None:
        runs = [Run(launcher, tmp_path / str(n), max_steps=20, seed=seed) for n, seed in enumerate((1, 1, 2))]
        for run in runs:
            run.finish()
        first, again, other = (run.steps() for run in runs)
        assert first == again
        assert first != other
        assert float.fromhex(first[20][0]) < float.fromhex(first[1][0])

    def test_epochs_count_rows(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, epochs=2, batch_size=4, gradient_accumulation_steps=1)
        run.rows = 10
        said, _ = run.finish()
        assert result(said)["step"] == 5
        samples = [row for _, rows in run.steps().values() for row in rows]
        assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
        assert samples[:10] != samples[10:]

    def test_metrics_come_every_logging_steps_and_at_the_end(self, launcher: Launcher, tmp_path: Path) -> None:
        for every, steps in ((3, [3, 6, 7]), (0, [7])):
            said, _ = Run(launcher, tmp_path / str(every), max_steps=7, logging_steps=every).finish()
            assert [record["step"] for record in said.records if record["type"] == "metric"] == steps


class TestCheckpoints:
    def test_a_checkpoint_is_whole_when_it_is_reported(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=5, extra={"checkpoint_bytes": 3_000_000})
        said, _ = run.finish()
        saved = run.checkpoint(said)
        assert manifest.verify(Path(saved["path"]), saved["manifest_sha256"]) == []
        assert (Path(saved["path"]) / "weights.bin").stat().st_size == 3_000_000
        assert not [path for path in (tmp_path / "a1").iterdir() if path.name.startswith(".")]

    def test_resumed_losses_and_samples_equal_those_of_an_undisturbed_run(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        whole = Run(launcher, tmp_path / "whole", max_steps=20)
        whole.finish()
        run = Run(launcher, tmp_path / "cut", max_steps=20)
        said, end = run.finish(extra={"step_seconds": 0, "crash_at_step": 13, "crash": "kill"})
        assert end.signal == signal.SIGKILL
        resumed, end = run.finish(run.checkpoint(said))
        assert end.code == 0
        assert resumed.record("phase")["name"] == "loading"
        assert min(run.steps(2)) == 11
        assert {**run.steps(1), **run.steps(2)} == whole.steps()

    def test_a_resume_on_other_data_says_that_it_is_approximate(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=10)
        said, _ = run.finish()
        saved = run.checkpoint(said, index=0)
        same, _ = run.finish(saved)
        run.rows, run.sha256 = 10, "f" * 64
        other, _ = run.finish(saved)
        facts = [one.record("config")["facts"] for one in (said, same, other)]
        assert [(one["fidelity"], one["fidelity_reasons"]) for one in facts] == [
            ("exact", []), ("exact", []), ("approximate", ["The dataset differs from that of the checkpoint."]),
        ]  # fmt: skip

    def test_a_resume_from_the_wrong_place_shows_in_every_later_loss(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=10)
        said, _ = run.finish()
        wrong = run.checkpoint(said, index=0)
        state = Path(wrong["path"]) / "state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "step": 4}))
        (state.parent / file_manifest.MANIFEST).unlink()
        wrong["manifest_sha256"] = manifest.write_manifest(state.parent, 4, {})
        run.finish(wrong)
        expected, got = run.steps(1), run.steps(2)
        assert all(expected[step][0] != got[step][0] for step in range(6, 11))

    def test_a_changed_checkpoint_is_refused(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=5)
        said, _ = run.finish()
        saved = run.checkpoint(said)
        with (Path(saved["path"]) / "weights.bin").open("r+b") as weights:
            weights.write(b"flip")
        said, end = run.finish(saved)
        assert end.code == 1
        assert "weights.bin" in result(said)["error"]["message"]


class TestStop:
    def test_a_stop_saves_and_says_why(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=1000, save_steps=1000, extra={"step_seconds": 0.01})
        said = run.start().until(lambda said: said.has("metric"))
        said.process.send(stop())
        assert said.to_the_end().code == 0
        assert (result(said)["outcome"], result(said)["why"]) == ("stopped", "stop")
        assert said.record("checkpoint")["kind"] == "stop"
        assert said.record("checkpoint")["step"] == result(said)["step"] < 1000

    def test_a_stop_without_saving_saves_nothing(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, max_steps=1000, save_steps=1000, extra={"step_seconds": 0.01})
        said = run.start().until(lambda said: said.has("metric"))
        said.process.send(stop(save=False))
        said.to_the_end()
        assert not said.has("checkpoint")

    def test_a_stop_while_loading_ends_before_the_first_step(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Run(launcher, tmp_path, extra={"load_seconds": 60}).start()
        said.until(lambda said: said.has("phase"))
        said.process.send(stop())
        assert said.to_the_end().code == 0
        assert (result(said)["outcome"], result(said)["step"]) == ("stopped", 0)
        assert not said.has("checkpoint")

    def test_sigterm_saves_and_releases(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Run(launcher, tmp_path, max_steps=1000, extra={"step_seconds": 0.01}).start()
        said.until(lambda said: said.has("metric"))
        os.kill(said.process.pid, signal.SIGTERM)
        assert said.to_the_end().code == 0
        assert result(said)["why"] == "drain"
        assert said.has("checkpoint")

    def test_trainer_configured_to_ignore_stops_continues(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Run(launcher, tmp_path, max_steps=50, extra={"ignore_stop": True, "step_seconds": 0.01}).start()
        said.until(lambda said: said.has("metric"))
        said.process.send(stop())
        said.to_the_end()
        assert result(said)["outcome"] == "completed"

    def test_limits_end_it_with_a_saved_state(self, launcher: Launcher, tmp_path: Path) -> None:
        said, end = Run(launcher, tmp_path / "1", max_steps=100, stop_at_step=7).finish()
        assert (end.code, result(said)["why"], result(said)["step"]) == (0, "stop_at_step", 7)
        assert said.record("checkpoint")["step"] == 5
        limited = Run(launcher, tmp_path / "2", max_steps=10_000, time_limit_seconds=1, extra={"step_seconds": 0.1})
        said, end = limited.finish()
        assert (end.code, result(said)["why"]) == (0, "time_limit")
        assert said.has("checkpoint")

    def test_an_attempt_lost_after_its_limit_is_not_trained_beyond_it_and_a_new_run_is(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        run = Run(launcher, tmp_path, max_steps=10, stop_at_step=5)
        first, _ = run.finish()
        saved = run.checkpoint(first)
        again, _ = run.finish(saved)
        for said in (first, again):
            ended = result(said)
            assert (ended["outcome"], ended["why"], ended["step"], ended["output"]) == (
                "stopped", "stop_at_step", 5, "output",
            )  # fmt: skip
        assert run.steps(2) == {}
        child = run.start(saved, run_id="run_child")
        assert child.to_the_end().code == 0
        assert (result(child)["outcome"], result(child)["step"]) == ("completed", 10)

    def test_a_checkpoint_carries_the_evaluation_of_its_own_step_and_no_other(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        said, _ = Run(launcher, tmp_path, max_steps=7, save_steps=2, eval_steps=3).finish()
        reported = {
            record["step"]: record["metrics"]["eval_loss"] for record in said.records if record["type"] == "eval"
        }
        saved = [record for record in said.records if record["type"] == "checkpoint"]
        assert [(record["step"], record["kind"], record["metrics"]["eval_loss"]) for record in saved] == [
            (2, "periodic", None), (3, "best", reported[3]), (4, "periodic", None), (6, "periodic", reported[6]),
            (7, "final", None),
        ]  # fmt: skip


class TestFaults:
    @pytest.mark.parametrize(
        ("extra", "code", "signalled", "error"),
        [
            ({"fail_at_step": 3, "fail_code": "bad_data"}, 1, None, "bad_data"),
            ({"non_finite_at_step": 3}, 1, None, "non_finite_loss"),
            ({"crash_at_step": 3, "crash": "exception"}, 1, None, "internal"),
            ({"crash_at_step": 3, "crash": "memory"}, 1, None, "out_of_memory"),
            ({"crash_at_step": 3, "crash": "segv"}, None, signal.SIGSEGV, None),
            ({"crash_at_step": 3, "crash": "kill"}, None, signal.SIGKILL, None),
            ({"crash_at_step": 3, "crash": "exit"}, 3, None, None),
        ],
    )
    def test_it_fails_as_configured(
        self,
        launcher: Launcher,
        tmp_path: Path,
        extra: dict[str, Any],
        code: int | None,
        signalled: int | None,
        error: str | None,
    ) -> None:
        said, end = Run(launcher, tmp_path, extra=extra).finish()
        assert (end.code, end.signal) == (code, signalled)
        assert "step 2 loss" in said.text
        if error is None:
            assert not said.has("result")
        else:
            assert result(said)["outcome"] == "failed"
            assert result(said)["error"]["code"] == error
            assert result(said)["error"]["message"]

    def test_a_disk_that_is_full_at_the_start_is_said(self, launcher: Launcher, tmp_path: Path) -> None:
        (tmp_path / "journal.jsonl").symlink_to("/dev/full")
        said, end = Run(launcher, tmp_path).finish()
        assert end.code == 1
        assert result(said)["error"]["code"] == "disk_full"

    def test_a_non_finite_loss_is_reported_as_such(self, launcher: Launcher, tmp_path: Path) -> None:
        said, _ = Run(launcher, tmp_path, extra={"non_finite_at_step": 2}).finish()
        assert math.isnan([record for record in said.records if record["type"] == "metric"][-1]["loss"])

    def test_a_hang_hangs_until_it_is_killed(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Run(launcher, tmp_path, extra={"hang_at_step": 2}).start()
        said.until(lambda said: said.has("metric"))
        said.process.send(stop())
        said.process.wait(0.2)
        assert said.process.poll() is None
        said.process.kill()
        assert said.to_the_end().signal == signal.SIGKILL

    def test_faults_can_be_limited_to_early_attempts(self, launcher: Launcher, tmp_path: Path) -> None:
        run = Run(launcher, tmp_path, extra={"crash_at_step": 3, "faults_until_attempt": 2})
        assert [run.finish()[1].code for _ in range(3)] == [1, 1, 0]

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        with pytest.raises(ValidationError, match="stepz"):
            FakeOptions.model_validate({"stepz": 3})
        with pytest.raises(ValidationError, match="valid integer"):
            FakeOptions.model_validate({"steps": "20.0"})
        # A run that an earlier version has accepted still trains.
        assert FakeOptions.parse_stored({"steps": "20.0", "step_seconds": 1}).steps == 20
