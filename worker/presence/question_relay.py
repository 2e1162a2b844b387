"""Relay of a serving run: questions of the API reach its process through Redis, and its answers go back."""

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
_FETCHES = 2
"""Adapters that are fetched at a time."""
_UNSENT = "The worker could not pass the question on, for a reason in its log: ask again."
_MOST_UNREAD = 100_000
"""Entries of a stream of answers; an API process reads them at once."""


class AdapterUnavailable(Exception):
    """The adapter of a question cannot be had; the text is a sentence for the user."""


@dataclass
class _OpenQuestion:
    """Question that the process is to answer."""

    id: str
    entry_id: str
    """Entry in the stream of the run."""
    body: Mapping[str, Any]
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
        find_adapter: Callable[[str], Path | None],
        is_ending: Callable[[], bool],
    ) -> None:
        """Create the relay. `find_adapter` returns the folder of an adapter by its key, or raises `AdapterUnavailable`.

        It is called in other threads, and once for each key that it has; it returns None if the attempt ends meanwhile.
        Once `is_ending`, no further question is taken: those that wait are for the next serving run.
        """
        self._redis = redis
        self._run_id = run_id
        self._attempt = attempt
        self._find_adapter = find_adapter
        self._is_ending = is_ending
        self._lock = threading.Lock()
        """Guards what both threads and those of the adapters change: open questions, folders and waiting questions."""
        self._send_lock = threading.Lock()
        """Keeps the parts of a question together, and its cancellation behind them."""
        self._open: dict[str, _OpenQuestion] = {}
        self._folders: dict[str, Path] = {}
        """Folder of each adapter that was obtained; it stays in use until the attempt ends."""
        self._waiting: dict[str, deque[_OpenQuestion]] = {}
        """Questions that wait for an adapter, by its key, in their order."""
        self._fetches = ThreadPoolExecutor(_FETCHES, f"adapters {run_id}")
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
            self._fetches.shutdown(wait=False, cancel_futures=True)
            self._pieces.put(None)
            for thread in threads:
                if thread.is_alive():
                    thread.join(_JOIN_SECONDS)

    @property
    def has_ended(self) -> bool:
        """True once nothing is relayed any more."""
        return self._ended.is_set()

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
                    self._take_entry(entry_id, fields)
                    last = entry_id
            except (RedisError, OSError) as error:
                log.info("%s: questions do not arrive for now: %s", self._run_id, error)
                self._ended.wait(_PAUSE)
            except Exception:  # without this thread, every question would wait for ever
                log.exception("%s: questions cannot be read, trying again", self._run_id)
                self._ended.wait(_PAUSE)

    def _take_entry(self, entry_id: str, fields: Mapping[str, str]) -> None:
        """Pass an entry of the stream on; it stays there if it is left to the next serving run."""
        if CANCEL in fields:
            self._cancel(fields[CANCEL])
        elif self._is_ending():
            return
        elif (question := _read_question(entry_id, fields)) is None:
            log.warning("%s: what is no question is dropped: %s", self._run_id, entry_id)
        else:
            # Read again if only the response of Redis was lost.
            taken = self._redis.xadd(question.reply, {TAKEN: question.id, ATTEMPT: self._attempt}, nomkstream=True)
            has_reader = taken is not None
            if has_reader:
                self._take_question(question)
                return
        self._redis.xdel(questions_stream(self._run_id), entry_id)

    def _take_question(self, question: _OpenQuestion) -> None:
        """Pass a question on, once its adapter is here; what follows it in the stream waits only for the same one."""
        key: str | None = question.body.get("adapter")
        with self._lock:
            first = self._open.setdefault(question.id, question)
        if first is not question:
            if first.entry_id != question.entry_id:  # the API sends it again if the response of Redis was lost
                self._remove_entry(question)
            return
        with self._lock:
            folder = None if key is None else self._folders.get(key)
            if key is not None and folder is None:
                if key in self._waiting:
                    self._waiting[key].append(question)
                else:
                    self._waiting[key] = deque([question])
                    with suppress(RuntimeError):  # the attempt has just ended: the entry stays for the next serving run
                        self._fetches.submit(with_current_context(partial(self._obtain_adapter, key)))
                return
        self._pass_on(question, folder)

    def _obtain_adapter(self, key: str) -> None:
        """Obtain an adapter and pass the questions on that wait for it, also those that come meanwhile."""
        try:
            folder = self._find_adapter(key)
            if folder is None:
                self._end_wait(key)  # their entries stay for the next serving run
                return
            while True:
                with self._lock:
                    if not self._waiting[key]:
                        del self._waiting[key]
                        self._folders[key] = folder
                        return
                    question = self._waiting[key].popleft()
                self._pass_on(question, folder)
        except AdapterUnavailable as error:
            self._refuse_waiting(key, "unusable_model", str(error))
        except Exception:
            log.exception("%s: adapter %s cannot be passed on", self._run_id, key)
            self._refuse_waiting(key, "internal", _UNSENT)

    def _refuse_waiting(self, key: str, code: AnswerErrorCode, message: str) -> None:
        with self._lock:
            questions = self._waiting.pop(key, ())
        for question in questions:
            self._remove_entry(question)
            self._pieces.put([_error_piece(question.id, code, message)])

    def _end_wait(self, key: str) -> None:
        with self._lock:
            for question in self._waiting.pop(key, ()):
                self._open.pop(question.id, None)

    def _remove_entry(self, question: _OpenQuestion) -> bool:
        """Remove a question from the stream; return False if the API has, because its caller is gone."""
        try:
            return bool(self._redis.xdel(questions_stream(self._run_id), question.entry_id))
        except (RedisError, OSError) as error:
            log.info("%s: a question stays in its stream: %s", self._run_id, error)
            return True

    def _pass_on(self, question: _OpenQuestion, folder: Path | None) -> None:
        try:
            if not self._remove_entry(question):
                with self._lock:
                    self._open.pop(question.id, None)
                return
            with self._send_lock:
                with self._lock:
                    is_open = question.id in self._open
                if is_open:
                    adapter_folder = None if folder is None else str(folder)
                    self._send_question({"question": dict(question.body), "adapter_folder": adapter_folder})
        except Exception:
            log.exception("%s: a question cannot be passed on", self._run_id)
            self._pieces.put([_error_piece(question.id, "internal", _UNSENT)])

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
        with self._lock:
            is_open = self._open.pop(question_id, None) is not None
        if is_open:
            with self._send_lock:
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
            by_stream = self._by_stream(pieces)
            try:
                self._send_broken()
                for reply, some in by_stream.items():
                    self._send_pieces(reply, some)
            except Exception:  # without this thread, every question would wait for ever
                log.exception("%s: answers are lost", self._run_id)
                self._break_answers(by_stream)
        with suppress(RedisError, OSError):  # otherwise it expires
            self._redis.delete(alive_key(self._run_id))

    def _by_stream(self, pieces: Sequence[AnswerPiece]) -> dict[str, list[AnswerPiece]]:
        """Return the pieces of open questions by the streams that they are for; a question ends with its last one."""
        by_stream = defaultdict(list)
        with self._lock:
            for piece in pieces:
                if (question := self._open.get(piece.question_id)) is not None:
                    by_stream[question.reply].append(piece)
                    question.choices -= piece.finish_reason is not None
                    if piece.error is not None or question.choices <= 0:
                        self._open.pop(piece.question_id, None)
        return by_stream

    def _break_answers(self, by_stream: Mapping[str, Sequence[AnswerPiece]]) -> None:
        """End the questions of these pieces, each of which is owed an error."""
        lost = {piece.question_id: reply for reply, pieces in by_stream.items() for piece in pieces}
        self._broken |= lost
        with self._lock:
            for question_id in lost:
                self._open.pop(question_id, None)

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


def _read_question(entry_id: str, fields: Mapping[str, str]) -> _OpenQuestion | None:
    """Return the question of an entry; None if it is none: anything can write to Redis."""
    try:
        body, reply = json.loads(fields[QUESTION]), fields[REPLY]
        adapter = body.get("adapter")
        if not reply.startswith(answers_stream("")) or not isinstance(adapter, str | None):
            return None
        return _OpenQuestion(str(body["id"]), entry_id, body, reply, int(body.get("n", 1)))
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _error_piece(question_id: str, code: AnswerErrorCode, message: str) -> AnswerPiece:
    return AnswerPiece(question_id=question_id, error=AnswerError(code=code, message=message))


def _as_json(pieces: Sequence[AnswerPiece]) -> str:
    return json.dumps([piece.model_dump(mode="json", exclude_defaults=True) for piece in pieces])
