"""Actions of the fake trainer, and what a drain makes of them, at the very step at which it comes."""

import json
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.messages import ActionRequest
from anneal.contracts.stop import StopRequest
from tests.jobs import make_spec
from worker.fake.trainer import FakeTrainer
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.reporter import Reporter


class Drained(Journal):
    """A journal at one step of which SIGTERM comes, or what the main thread makes of it."""

    def __init__(self, path: Path, attempt: int, control: Control, at: int | None) -> None:
        super().__init__(str(path), attempt)
        self._control, self._at = control, at

    def record_step(self, n: int, loss_hex: str, samples: Any) -> None:
        super().record_step(n, loss_hex, samples)
        if n == self._at:
            self._control.request_stop(StopRequest("checkpoint", "drain"))


class Attempts:
    """Attempts of one run in this very process, so that a drain comes at a step and not about it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self._folder = folder
        self._job = {
            "user_set_fields": ["extra.steps"],
            "dataset": {"id": "ds_x", "path": "rows.jsonl", "format": "text", "rows": 48, "sha256": None},
            "config": {"base_model": "none", "save_steps": 100, "logging_steps": 1, "batch_size": 4,
                       "gradient_accumulation_steps": 1, "extra": {"step_seconds": 0, "steps": 20}, **config},
        }  # fmt: skip
        self.number = 0
        self.control = Control()
        self.records: list[dict[str, Any]] = []

    def run(
        self, actions: list[dict[str, Any]], drain_at: int | None = None, stop_at_epoch_end: bool = False
    ) -> tuple[FakeTrainer, dict[str, Any]]:
        self.number += 1
        folder, control = self._folder / f"a{self.number}", self.control
        self.control = Control()
        control.stop_at_epoch_end = stop_at_epoch_end
        saved = [one for one in self.records if one["type"] == "checkpoint"]
        resume = saved and {
            "path": self._folder / f"a{self.number - 1}" / saved[-1]["name"],
            "step": saved[-1]["step"],
            "manifest_sha256": saved[-1]["manifest_sha256"],
        }
        about = {"attempt": self.number, "resume_from": resume or None, "replayed_actions": actions}
        journal = Drained(self._folder / "journal.jsonl", self.number, control, drain_at)
        report = Kept()
        self.records = report.records
        training = FakeTrainer(make_spec(folder, **self._job | about), report, control, journal)
        return training, training.run()


class Kept(Reporter):
    """What is told, as a list."""

    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[dict[str, Any]] = []

    def send(self, record: Any) -> None:
        self.records.append(record)


def test_requests_take_effect_in_their_order(tmp_path: Path) -> None:
    """Those behind a checkpoint wait for the next step, so that it is saved before they change anything."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("sample", {"prompts": ["why"], "max_new_tokens": 4, "temperature": 1.0}), ("evaluate", {}),
        ("checkpoint", {"pin": True}), ("set_learning_rate", {"learning_rate": 0.5}), ("extend", {"max_steps": 24}),
    ]  # fmt: skip
    attempts = Attempts(tmp_path)
    attempts.control._actions.extend(ActionRequest(f"act_{name}", name, of) for name, of in requests)
    _, ended = attempts.run([])
    done = [(one["action"], one["step"]) for one in attempts.records if one["type"] == "action"]
    assert done == [("sample", 1), ("evaluate", 1), ("set_learning_rate", 2), ("extend", 2)]
    saved = next(one for one in attempts.records if one["type"] == "checkpoint")
    assert (saved["step"], saved["actions"]) == (1, [{"id": "act_checkpoint", "action": "checkpoint"}])
    assert json.loads((tmp_path / "a1" / "checkpoint-1" / "state.json").read_text())["changed"] == {}
    assert ended["step"] == 24


class TestWhatADrainMeets:
    def test_an_action_that_is_done_again_at_that_very_step_is_in_the_checkpoint(self, tmp_path: Path) -> None:
        requests = [("set_learning_rate", {"learning_rate": 0.5}), ("extend", {"max_steps": 24})]
        actions = [{"id": f"act_{name}", "action": name, "parameters": of, "step": 7} for name, of in requests]
        attempts = Attempts(tmp_path)
        _, drained = attempts.run(actions, drain_at=7)
        assert (drained["why"], drained["step"]) == ("drain", 7)
        last, ended = attempts.run([])
        assert (ended["outcome"], ended["step"], last.config.learning_rate) == ("completed", 24, 0.5)

    def test_the_end_of_the_epoch_that_the_run_is_to_end_with_stays_its_end(self, tmp_path: Path) -> None:
        attempts = Attempts(tmp_path)
        _, ended = attempts.run([], drain_at=12, stop_at_epoch_end=True)
        assert (ended["why"], ended["step"]) == ("epoch_end", 12)
        _, again = attempts.run([], stop_at_epoch_end=True)
        assert (again["why"], again["step"]) == ("epoch_end", 12)

    def test_an_evaluation_that_was_only_asked_for_saves_no_best_checkpoint(self, tmp_path: Path) -> None:
        attempts = Attempts(tmp_path)
        attempts.run([{"id": "act_e", "action": "evaluate", "parameters": {}, "step": 5}])
        assert [one["step"] for one in attempts.records if one["type"] == "eval"] == [5]
        assert [one["kind"] for one in attempts.records if one["type"] == "checkpoint"] == ["final"]
