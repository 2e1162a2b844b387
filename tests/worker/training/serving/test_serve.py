"""The process of a serving run: it answers what its supervisor passes on, and ends when it is idle or asked to."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.answers import Question
from anneal.contracts.attempt.messages import ControlMessage, QuestionPart
from anneal.contracts.stop import StopRequest
from tests.waiting import eventually
from tests.worker.training.tiny import Forks, make_job

LONG = 200


def serving_job(folder: Path, model: Path, idle_seconds: float) -> dict[str, Any]:
    job = make_job(folder, model, "none", method="lora", max_seq_length=None)
    return job | {"task": "serve", "dataset": None, "serve_idle_seconds": idle_seconds}


def pieces_of(forks: Forks, id: str) -> list[dict[str, Any]]:
    pieces = [piece for record in forks.said() if record["type"] == "answers" for piece in record["pieces"]]
    return [piece for piece in pieces if piece["question_id"] == id]


def has_ended(forks: Forks, id: str) -> bool:
    return any("finish_reason" in piece or "error" in piece for piece in pieces_of(forks, id))


class Asked:
    """Control socket of a serving process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def ask(self, id: str, folder: Path | None = None, **values: Any) -> None:
        question = Question(id=id, created_at=0.0, prompt="what is row 7", temperature=0.0, **values)
        envelope = {"question": question.model_dump(mode="json", exclude_defaults=True)}
        text = json.dumps(envelope | {"adapter_folder": None if folder is None else str(folder)})
        half = len(text) // 2
        for part in (QuestionPart(text[:half], is_last=False), QuestionPart(text[half:], is_last=True)):
            self.send(question=part)

    def send(self, **message: Any) -> None:
        self._control.send(ControlMessage(**message).to_json())


@contextmanager
def serving(forks: Forks, folder: Path, model: Path, idle_seconds: float = 600.0) -> Iterator[Asked]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "control"))
        listening.listen()
        forks.start(serving_job(folder, model, idle_seconds), control=folder / "control")
        control, _ = listening.accept()
    with control:
        yield Asked(control)


def test_answers_questions_that_came_before_and_after_it_was_loaded_and_ends_when_it_is_idle(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    with serving(forks, tmp_path, tiny_model, idle_seconds=1.0) as process:
        process.ask("early", max_tokens=4)
        eventually(lambda: has_ended(forks, "early"), timeout=60)
        process.ask("late", max_tokens=4)
        process.ask("without adapter", folder=tmp_path, adapter="run_gone", max_tokens=4)
        eventually(lambda: has_ended(forks, "late") and has_ended(forks, "without adapter"), timeout=60)
        done = forks.wait()
    assert (done.code, done.result["outcome"]) == (0, "completed"), done.stderr[-2000:]
    assert [record["name"] for record in done.of("phase")][-1] == "serving" and len(done.of("config")) == 1
    texts = {id: "".join(piece.get("text", "") for piece in pieces_of_outcome(done, id)) for id in ("early", "late")}
    assert texts["early"] == texts["late"] and texts["early"]
    assert pieces_of_outcome(done, "without adapter")[-1]["error"]["code"] == "unusable_model"


def test_stop_of_a_user_ends_it_at_once_and_a_drain_once_the_open_answers_are_written(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    for why in ("drain", "stop"):
        (folder := tmp_path / why).mkdir()
        with serving(forks, folder, tiny_model) as process:
            eventually(lambda: is_serving(forks), timeout=60)
            process.ask("open", max_tokens=LONG)
            if why == "drain":
                eventually(lambda: pieces_of(forks, "open"), timeout=60)
            process.send(stop=StopRequest("discard", why))  # type: ignore[arg-type]
            done = forks.wait()
        assert (done.code, done.result["outcome"], done.result["why"]) == (0, "stopped", why)
        assert any("finish_reason" in piece for piece in pieces_of_outcome(done, "open")) is (why == "drain")


def test_cancelled_question_is_not_answered_to_its_end(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    with serving(forks, tmp_path, tiny_model) as process:
        eventually(lambda: is_serving(forks), timeout=60)
        process.ask("cancelled", max_tokens=LONG)
        process.send(cancelled_question="cancelled")
        process.ask("next", max_tokens=2)
        eventually(lambda: has_ended(forks, "next"), timeout=60)
        process.send(stop=StopRequest("discard", "drain"))
        done = forks.wait()
    assert not any("finish_reason" in piece for piece in pieces_of_outcome(done, "cancelled"))


def is_serving(forks: Forks) -> bool:
    return any(record["type"] == "phase" and record["name"] == "serving" for record in forks.said())


def pieces_of_outcome(done: Any, id: str) -> list[dict[str, Any]]:
    return [piece for record in done.of("answers") for piece in record["pieces"] if piece["question_id"] == id]
