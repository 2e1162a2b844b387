"""Files of answers: checkpoints share those that are complete, and each has all answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.jobs import make_spec
from worker.checkpoint_files.manifest import verify
from worker.training.context import TrainingContext
from worker.training.prediction import answers_file
from worker.training.prediction.answers_file import AnswersFile
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.reporter import Reporter

TOTAL = 40


class Records(Reporter):
    """Reporter that keeps what it sends."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[Any] = []

    def send(self, record: Any) -> None:
        self.sent.append(record)


def open_answers(folder: Path, resume_from: dict[str, Any] | None = None) -> tuple[AnswersFile, Records]:
    folder.mkdir()
    job = make_spec(folder, task="predict", resume_from=resume_from)
    records = Records()
    config = TrainingConfig(base_model="tiny")
    run = TrainingContext(job, config, set(), DeviceCapabilities(), records, Control(), Journal(None, 1))
    return AnswersFile(run, TOTAL), records


def answer(number: int) -> Any:
    return {
        "row": number, "prompt": "why", "reference": None, "prediction": f"so {number} " * 20, "finish_reason": "stop",
        "problem": None, "prompt_tokens": 1, "completion_tokens": 3, "scores": {},
    }  # fmt: skip


def numbers_in(folder: Path) -> list[int]:
    """Row numbers in the files of a checkpoint, in their order."""
    lines = [line for path in sorted(folder.glob("answers-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line)["row"] for line in [*lines, *(folder / "ahead.jsonl").read_text().splitlines()]]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_checkpoints_share_complete_files_and_a_resumed_attempt_goes_on_with_them(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("this file system has no links")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr(answers_file, "_COMPLETE_BYTES", 1_000)
    answers, records = open_answers(tmp_path / "first")
    for start in range(0, 30, 5):
        answers.append_rows([answer(number) for number in range(start, start + 5)])
        answers.ahead = {number: answer(number) for number in (start + 6, start + 5)}
        answers.save("periodic")
    saved = [record for record in records.sent if record["type"] == "checkpoint"]
    folders = [tmp_path / "first" / record["name"] for record in saved]
    for record, folder in zip(saved, folders, strict=True):
        assert verify(folder, record["manifest_sha256"]) == []
        assert numbers_in(folder) == list(range(record["step"]))
    shared = {(folder / "answers-00000.jsonl").stat().st_ino for folder in folders[2:]}
    assert (len(shared) == 1) is links

    resume = {
        "path": str(folders[-1]), "step": saved[-1]["step"], "manifest_sha256": saved[-1]["manifest_sha256"]
    }  # fmt: skip
    resumed, records = open_answers(tmp_path / "second", resume)
    assert (resumed.written, sorted(resumed.ahead), resumed.answered) == (30, [30, 31], 32)
    resumed.append_rows([answer(number) for number in range(30, TOTAL)])
    resumed.save("stop")
    (last,) = [record for record in records.sent if record["type"] == "checkpoint"]
    assert verify(tmp_path / "second" / last["name"], last["manifest_sha256"]) == []
    output = tmp_path / "second" / resumed.write_output([])
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    assert rows == [answer(number) for number in range(TOTAL)]
    assert not (tmp_path / "second" / "answers").exists()
    for record, folder in zip(saved, folders, strict=True):
        assert verify(folder, record["manifest_sha256"]) == []


def test_complete_file_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def note(path: Path, alive: Any) -> str:
        read.append(path.name)
        return read_sha256(path, alive)

    read_sha256 = answers_file.manifest._read_sha256
    monkeypatch.setattr(answers_file.manifest, "_read_sha256", note)
    monkeypatch.setattr(answers_file, "_COMPLETE_BYTES", 1)
    answers, _ = open_answers(tmp_path / "first")
    for number in range(6):
        answers.append_rows([answer(number)])
        answers.save("periodic")
    assert max(read.count(name) for name in read if name.startswith("answers-")) == 2  # as it grew, and when complete
