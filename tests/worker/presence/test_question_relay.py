"""Questions reach a serving process whole and in order, and its answers those who have asked, whatever Redis does."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from redis import Redis

from anneal.contracts.attempt.answers import Question
from anneal.contracts.attempt.messages import ControlMessage
from app.config import Settings
from app.infra.question_streams import (
    CANCEL,
    PIECES,
    QUESTION,
    REPLY,
    TAKEN,
    alive_key,
    answers_stream,
    questions_stream,
)
from tests.waiting import eventually
from worker.presence.question_relay import AdapterUnavailable, QuestionRelay
from worker.process.channel import Channel
from worker.wire.control import Control

RUN = "run_" + "0" * 26
REPLIES = answers_stream("test")
STREAM = questions_stream(RUN)


@pytest.fixture
def redis(settings: Settings) -> Iterator[Redis]:
    with Redis.from_url(settings.redis_url or "", decode_responses=True, socket_timeout=1) as redis:
        redis.xadd(REPLIES, {REPLY: ""})
        yield redis


class Process:
    """Control messages that reach the process."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[ControlMessage] = SimpleQueue()
        self.is_ending = False

    def send(self, message: ControlMessage) -> bool:
        self.messages.put(message)
        return True

    def next_question(self) -> dict[str, Any]:
        """The next question that has arrived whole."""
        text = ""
        while True:
            part = self.messages.get(timeout=30).question
            assert part is not None
            text += part.text
            if part.is_last:
                envelope: dict[str, Any] = json.loads(text)
                return envelope


def find_adapter(model: str) -> Path:
    if model == "gone":
        raise AdapterUnavailable("It is gone: ask another one.")
    return Path("/adapters") / model


@contextmanager
def relaying(
    redis: Redis,
    process: Process,
    attempt: int = 1,
    find_adapter: Callable[[str], Path | None] = find_adapter,
) -> Iterator[QuestionRelay]:
    relay = QuestionRelay(redis, RUN, attempt, find_adapter, lambda: process.is_ending)
    with relay.running(process.send):
        yield relay


def ask(redis: Redis, id: str, **values: Any) -> str:
    question = Question(id=id, created_at=0.0, prompt=values.pop("prompt", "why?"), **values)
    entry: Any = redis.xadd(STREAM, {QUESTION: question.model_dump_json(exclude_defaults=True), REPLY: REPLIES})
    return str(entry)


def replies(redis: Redis) -> list[dict[str, Any]]:
    """Pieces that have come, and the questions that were taken, as `{"taken": id}`."""
    pieces: list[dict[str, Any]] = []
    entries: Any = redis.xrange(REPLIES)
    for _, fields in entries:
        pieces += [{TAKEN: fields[TAKEN]}] if TAKEN in fields else json.loads(fields.get(PIECES, "[]"))
    return pieces


def error_of(redis: Redis, id: str) -> str | None:
    return next(
        (piece["error"]["code"] for piece in replies(redis) if piece.get("question_id") == id and "error" in piece),
        None,
    )


def test_question_reaches_the_process_and_its_answer_the_one_who_asked(redis: Redis) -> None:
    process = Process()
    ask(redis, "q1", adapter="run_x", temperature=0)
    with relaying(redis, process) as relay:
        envelope = process.next_question()
        assert envelope["question"] == {
            "id": "q1",
            "created_at": 0.0,
            "prompt": "why?",
            "adapter": "run_x",
            "temperature": 0.0,
        }
        assert envelope["adapter_folder"] == "/adapters/run_x"
        eventually(lambda: redis.get(alive_key(RUN)) == "1", what="a sign of life")
        for text, reason in (("a", None), ("b", "stop")):
            relay.publish(
                [{"question_id": "q1", "text": text, "tokens": 1, **({"finish_reason": reason} if reason else {})}]
            )
        relay.publish([{"question_id": "q1", "text": "behind its end", "tokens": 1}])
        eventually(lambda: len(replies(redis)) == 3, what="both pieces have come")
    assert [piece.get("text") for piece in replies(redis)] == [None, "a", "b"]
    assert redis.xlen(STREAM) == 0 and redis.get(alive_key(RUN)) is None


def test_question_of_any_length_and_script_arrives_whole_through_the_socket_of_the_process(redis: Redis) -> None:
    channel, control = Channel(), Control()
    # Not `Control.start`, which ends this process when the channel is closed.
    trainer_end = socket.socket(fileno=os.dup(channel.trainer_fds[3]))
    prompt = '漢"\\\n' * 60_000
    ask(redis, "long", prompt=prompt)
    ask(redis, "short")
    relay = QuestionRelay(redis, RUN, 1, find_adapter, lambda: False)
    received: list[str] = []
    with relay.running(channel.send), trainer_end:
        while len(received) < 2:
            control._handle_message(ControlMessage.from_json(trainer_end.recv(64 * 1024)))
            received += control.take_questions(0)[0]
    channel.close()
    questions = [json.loads(text)["question"] for text in received]
    assert [question["id"] for question in questions] == ["long", "short"] and questions[0]["prompt"] == prompt


def test_question_whose_asker_is_gone_is_not_answered_and_one_whose_asker_goes_is_cancelled(redis: Redis) -> None:
    process = Process()
    redis.delete(REPLIES)
    ask(redis, "too late")
    with relaying(redis, process) as relay:
        eventually(lambda: redis.xlen(STREAM) == 0, what="it is dropped")
        redis.xadd(REPLIES, {REPLY: ""})
        ask(redis, "left")
        assert process.next_question()["question"]["id"] == "left"
        redis.delete(REPLIES)
        relay.publish([{"question_id": "left", "text": "a", "tokens": 1}])
        assert process.messages.get(timeout=30).cancelled_question == "left"
    assert not redis.exists(REPLIES)


def test_cancelled_question_is_cancelled_in_the_process_once(redis: Redis) -> None:
    process = Process()
    with relaying(redis, process):
        ask(redis, "q1")
        process.next_question()
        for id in ("q1", "q1", "unknown"):
            redis.xadd(STREAM, {CANCEL: id})
        ask(redis, "q2")
        assert process.messages.get(timeout=30).cancelled_question == "q1"
        assert process.next_question()["question"]["id"] == "q2"


def test_question_that_the_api_has_sent_twice_is_answered_once_and_left_to_no_further_attempt(redis: Redis) -> None:
    process = Process()
    for _ in range(2):  # the response of Redis to the first was lost
        ask(redis, "twice")
    with relaying(redis, process):
        assert process.next_question()["question"]["id"] == "twice"
        eventually(lambda: redis.xlen(STREAM) == 0, what="both entries are removed")
        ask(redis, "next")
        assert process.next_question()["question"]["id"] == "next"


def test_questions_that_come_while_the_run_ends_are_left_to_the_next_attempt(redis: Redis) -> None:
    process, later = Process(), Process()
    process.is_ending = True
    ask(redis, "q1")
    with relaying(redis, process):
        eventually(lambda: redis.exists(alive_key(RUN)), what="the relay works")
        ask(redis, "q2")
    assert process.messages.empty() and redis.xlen(STREAM) == 2
    with relaying(redis, later, attempt=2):
        assert [later.next_question()["question"]["id"] for _ in range(2)] == ["q1", "q2"]


def test_adapter_that_cannot_be_had_and_what_is_no_question_cost_no_other_question(redis: Redis) -> None:
    process = Process()
    with relaying(redis, process):
        for fields in ({"x": "y"}, {QUESTION: "[", REPLY: REPLIES}, {QUESTION: '{"id": "q"}', REPLY: "anneal"}):
            redis.xadd(STREAM, fields)
        ask(redis, "q1", adapter="gone")
        ask(redis, "q2")
        assert process.next_question()["question"]["id"] == "q2"
        eventually(lambda: error_of(redis, "q1") == "unusable_model", what="the error has come")
    assert not redis.exists("anneal") and redis.xlen(STREAM) == 0


def has_error(redis: Redis, id: str, code: str) -> bool:
    return error_of(redis, id) == code


class SlowAdapters:
    """Adapters that come when the test says so; None if the attempt ends meanwhile."""

    def __init__(self, folder: Path | None = Path("/adapters/slow")) -> None:
        self.folder, self.keys, self.is_here = folder, list[str](), threading.Event()

    def find(self, key: str) -> Path | None:
        self.keys.append(key)
        if key == "slow":
            assert self.is_here.wait(30)
        return self.folder


def test_adapter_is_obtained_once_and_only_its_own_questions_wait_for_it_in_their_order(redis: Redis) -> None:
    process, adapters = Process(), SlowAdapters()
    with relaying(redis, process, find_adapter=adapters.find):
        for id, key in (("s1", "slow"), ("s2", "slow"), ("s3", "slow"), ("other", "fast"), ("base", None)):
            ask(redis, id, adapter=key)
        assert {process.next_question()["question"]["id"] for _ in range(2)} == {"other", "base"}
        adapters.is_here.set()
        assert [process.next_question()["question"]["id"] for _ in range(3)] == ["s1", "s2", "s3"]
        ask(redis, "s4", adapter="slow")
        assert process.next_question()["adapter_folder"] == "/adapters/slow"
    assert sorted(adapters.keys) == ["fast", "slow"] and redis.xlen(STREAM) == 0


def test_question_that_is_cancelled_while_its_adapter_comes_does_not_reach_the_process(redis: Redis) -> None:
    process, adapters = Process(), SlowAdapters()
    with relaying(redis, process, find_adapter=adapters.find):
        removed, cancelled = ask(redis, "removed", adapter="slow"), ask(redis, "cancelled", adapter="slow")
        ask(redis, "s3", adapter="slow")
        ask(redis, "base")
        assert process.next_question()["question"]["id"] == "base"
        for entry_id in (removed, cancelled):
            assert redis.xdel(STREAM, entry_id) == 1
        redis.xadd(STREAM, {CANCEL: "cancelled"})
        assert process.messages.get(timeout=30).cancelled_question == "cancelled"
        adapters.is_here.set()
        assert process.next_question()["question"]["id"] == "s3"


def test_question_whose_attempt_ends_while_its_adapter_comes_is_left_to_the_next_attempt(redis: Redis) -> None:
    process, later, adapters = Process(), Process(), SlowAdapters(folder=None)
    with relaying(redis, process, find_adapter=adapters.find):
        for id in ("s1", "s2"):
            ask(redis, id, adapter="slow")
        eventually(lambda: len(replies(redis)) == 2, what="both are taken")
        process.is_ending = True
        adapters.is_here.set()
    assert process.messages.empty() and error_of(redis, "s1") is None
    with relaying(redis, later, attempt=2):
        assert [later.next_question()["question"]["id"] for _ in range(2)] == ["s1", "s2"]


def test_adapter_that_could_not_be_had_is_tried_again_for_the_next_question(redis: Redis) -> None:
    process, tries = Process(), [AdapterUnavailable("Ask again."), ValueError("a defect")]

    def find(key: str) -> Path:
        if tries:
            raise tries.pop(0)
        return Path("/adapters") / key

    with relaying(redis, process, find_adapter=find):
        for id, code in (("q1", "unusable_model"), ("q2", "internal")):
            ask(redis, id, adapter="x")
            eventually(partial(has_error, redis, id, code), what="the error has come")
        ask(redis, "q3", adapter="x")
        assert process.next_question()["question"]["id"] == "q3"


def test_defect_in_a_thread_of_the_relay_costs_no_further_question(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, read, add, fails = Process(), redis.xread, redis.xadd, {"read", "add"}

    def xread(*args: Any, **options: Any) -> Any:
        if "read" in fails:
            fails.remove("read")
            raise ValueError("a defect")
        return read(*args, **options)

    def xadd(name: str, fields: Any, **options: Any) -> Any:
        if PIECES in fields and "add" in fails:
            fails.remove("add")
            raise ValueError("a defect")
        return add(name, fields, **options)

    monkeypatch.setattr(redis, "xread", xread)
    monkeypatch.setattr(redis, "xadd", xadd)
    with relaying(redis, process) as relay:
        for id in ("q1", "q2"):
            ask(redis, id)
            process.next_question()
        relay.publish([{"question_id": "q1", "text": "lost", "tokens": 1, "finish_reason": "stop"}])
        relay.publish([{"question_id": "q2", "text": "sent", "tokens": 1, "finish_reason": "stop"}])
        eventually(lambda: error_of(redis, "q1") == "internal", what="the error has come")
        eventually(lambda: "sent" in [piece.get("text") for piece in replies(redis)], what="the answer has come")
    assert not fails


def test_answer_of_which_redis_lost_a_piece_ends_with_an_error_when_it_is_back(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, add, is_away = Process(), redis.xadd, [False]

    def xadd(name: str, fields: Any, **options: Any) -> Any:
        if is_away[0]:
            raise ConnectionError("away")
        return add(name, fields, **options)

    monkeypatch.setattr(redis, "xadd", xadd)
    with relaying(redis, process) as relay:
        ask(redis, "q1")
        process.next_question()
        is_away[0] = True
        relay.publish([{"question_id": "q1", "text": "lost", "tokens": 1}])
        assert process.messages.get(timeout=30).cancelled_question == "q1"
        is_away[0] = False
        eventually(lambda: error_of(redis, "q1") == "internal", what="the error has come")
    assert "lost" not in [piece.get("text") for piece in replies(redis)]


def test_pieces_that_a_process_has_made_up_are_refused(redis: Redis) -> None:
    with relaying(redis, Process()) as relay, pytest.raises(ValueError, match="question_id"):
        relay.publish([{"text": "a"}])
