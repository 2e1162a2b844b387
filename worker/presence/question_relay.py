"""Relay of a serving run: questions of the API reach its process through Redis, and its answers go back."""

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from anneal.contracts.attempt.answers import AnswerError, AnswerErrorCode, AnswerPiece
from anneal.contracts.attempt.messages import ControlMessage, QuestionEnvelope, QuestionPart
from app.infra.logs.log_setup import with_current_context
from app.infra.question_streams import (
    ALIVE_SECONDS,
    ATTEMPT,
    CANCEL,
    PIECES,
    QUESTION,
    REPLY,
    TAKEN,
    alive_key,
    answers_stream,
    questions_stream,
)

log = logging.getLogger(__name__)

_BLOCK_MS = 500
"""Less than the timeout of the connection."""
_ENTRIES = 32
_PAUSE = 1.0
_FULL_PAUSE = 0.01
_JOIN_SECONDS = 1.0
_PART_CHARACTERS = 12_000
"""At most 48 KiB in a control message, whatever they are: those of JSON take up to 4 bytes, or 2 if escaped again."""
_MOST_UNREAD = 100_000
"""Entries of a stream of answers; an API process reads them at once."""


class AdapterUnavailable(Exception):
    """The adapter of a question cannot be had; the text is a sentence for the user."""


@dataclass
class _OpenQuestion:
    """Question that the process is to answer."""

    reply: str
    """Stream of its answers."""
    choices: int
    """Number of choices that have not ended."""


class QuestionRelay:
    """Relay of one attempt of a serving run, with a thread in each direction; without Redis, no question is answered.

    An answer of which a piece could not be sent is given up: its question is cancelled, and gets an error once Redis is
    back. Nothing is stored.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        attempt: int,
        find_adapter: Callable[[str], Path],
        is_ending: Callable[[], bool],
    ) -> None:
        """Create the relay. `find_adapter` returns the folder of an adapter by its key, or raises `AdapterUnavailable`.

        Once `is_ending`, no further question is taken: those that wait are for the next serving run.
        """
        self._redis = redis
        self._run_id = run_id
        self._attempt = attempt
        self._find_adapter = find_adapter
        self._is_ending = is_ending
        self._open: dict[str, _OpenQuestion] = {}
        self._pieces: SimpleQueue[Sequence[AnswerPiece] | None] = SimpleQueue()
        self._broken: dict[str, str] = {}
        """Streams of the questions that are owed an error, by id."""
        self._ended = threading.Event()

    @contextmanager
    def running(self, send: Callable[[ControlMessage], bool]) -> Iterator[None]:
        """Relay during the block; `send` passes a message to the process, and returns False if that is not possible."""
        self._send = send
        threads = [
            threading.Thread(target=with_current_context(work), name=f"{name} {self._run_id}", daemon=True)
            for name, work in (("questions", self._relay_questions), ("answers", self._relay_answers))
        ]
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            self._ended.set()
            self._pieces.put(None)
            for thread in threads:
                if thread.is_alive():
                    thread.join(_JOIN_SECONDS)

    def publish(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Send pieces of answers from the thread of the answers; returns at once.

        Raises:
            ValueError: One is none.
        """
        self._pieces.put([AnswerPiece.model_validate(piece) for piece in pieces])

    def _relay_questions(self) -> None:
        stream, last = questions_stream(self._run_id), "0"
        while not self._ended.is_set():
            try:
                read: Any = self._redis.xread({stream: last}, count=_ENTRIES, block=_BLOCK_MS)
                for entry_id, fields in (entry for _, entries in read for entry in entries):
                    if self._take_entry(fields):
                        self._redis.xdel(stream, entry_id)
                    last = entry_id
            except (RedisError, OSError) as error:
                log.info("%s: questions do not arrive for now: %s", self._run_id, error)
                self._ended.wait(_PAUSE)

    def _take_entry(self, fields: Mapping[str, str]) -> bool:
        """Pass an entry of the stream on; return False if it is left to the next serving run."""
        if CANCEL in fields:
            self._cancel(fields[CANCEL])
            return True
        if self._is_ending():
            return False
        try:
            question = json.loads(fields[QUESTION])
            question_id, choices, adapter = str(question["id"]), int(question.get("n", 1)), question.get("adapter")
            reply = fields[REPLY]
            if not reply.startswith(answers_stream("")):  # anything that can write to Redis may have put it there
                raise ValueError("its answers are for another key")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s: what is no question is dropped: %r", self._run_id, error)
            return True
        # Read again if only the response of Redis to what follows was lost.
        is_asked = self._redis.xadd(reply, {TAKEN: question_id, ATTEMPT: self._attempt}, nomkstream=True) is not None
        if is_asked and question_id not in self._open:
            self._open[question_id] = _OpenQuestion(reply, choices)
            try:
                folder = None if adapter is None else str(self._find_adapter(adapter))
            except AdapterUnavailable as error:
                self._pieces.put([_error_piece(question_id, "unusable_model", str(error))])
            else:
                self._send_question({"question": question, "adapter_folder": folder})
        return True

    def _send_question(self, envelope: QuestionEnvelope) -> None:
        text = json.dumps(envelope, ensure_ascii=False)
        for start in range(0, len(text), _PART_CHARACTERS):
            end = start + _PART_CHARACTERS
            part = QuestionPart(text[start:end], is_last=end >= len(text))
            self._send_message(ControlMessage(question=part))

    def _send_message(self, message: ControlMessage) -> None:
        """Pass a message to the process, and wait while its socket is full."""
        while not self._send(message):
            if self._ended.wait(_FULL_PAUSE):
                return

    def _cancel(self, question_id: str) -> None:
        if self._open.pop(question_id, None) is not None:
            self._send_message(ControlMessage(cancelled_question=question_id))

    def _relay_answers(self) -> None:
        alive_until = 0.0
        while True:
            if time.monotonic() >= alive_until:
                with suppress(RedisError, OSError):
                    self._redis.set(alive_key(self._run_id), self._attempt, ex=ALIVE_SECONDS)
                alive_until = time.monotonic() + _PAUSE
            try:
                pieces = self._pieces.get(timeout=_PAUSE)
            except Empty:
                pieces = []
            if pieces is None:
                break
            self._send_broken()
            by_stream = defaultdict(list)
            for piece in pieces:
                if (question := self._open.get(piece.question_id)) is not None:
                    by_stream[question.reply].append(piece)
                    question.choices -= piece.finish_reason is not None
                    if piece.error is not None or question.choices <= 0:
                        del self._open[piece.question_id]
            for reply, some in by_stream.items():
                self._send_pieces(reply, some)
        with suppress(RedisError, OSError):  # otherwise it expires
            self._redis.delete(alive_key(self._run_id))

    def _send_pieces(self, reply: str, pieces: Sequence[AnswerPiece]) -> None:
        ids = {piece.question_id for piece in pieces}
        try:
            is_read = self._redis.xadd(reply, {PIECES: _as_json(pieces)}, nomkstream=True, maxlen=_MOST_UNREAD)
        except (RedisError, OSError) as error:
            log.warning("%s: answers are lost: %s", self._run_id, error)
            self._broken |= dict.fromkeys(ids, reply)
            is_read = None
        if is_read is None:
            for question_id in ids:
                self._cancel(question_id)

    def _send_broken(self) -> None:
        """Send an error to each question of which a piece was lost, if Redis is back."""
        for question_id, reply in list(self._broken.items()):
            piece = _error_piece(question_id, "internal", "A part of the answer was lost in Redis: ask again.")
            try:
                self._redis.xadd(reply, {PIECES: _as_json([piece])}, nomkstream=True)
            except (RedisError, OSError):
                return
            del self._broken[question_id]


def _error_piece(question_id: str, code: AnswerErrorCode, message: str) -> AnswerPiece:
    return AnswerPiece(question_id=question_id, error=AnswerError(code=code, message=message))


def _as_json(pieces: Sequence[AnswerPiece]) -> str:
    return json.dumps([piece.model_dump(mode="json", exclude_defaults=True) for piece in pieces])
