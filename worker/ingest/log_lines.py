"""Converts printed output and the trainer's records into what the database can store.

One NUL, lone surrogate or NaN makes PostgreSQL refuse a whole batch, and one runaway loop can print faster than
anything can store, so everything is sanitized and bounded here, before it is queued.
"""

import codecs
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from app.infra.terminal_text import plain_line
from worker.ingest.redaction import Redactor

Stream = Literal["stdout", "stderr"]

Level = Literal["info", "warning", "error"]


MAX_LINE_BYTES = 8 * 1024

_MAX_PENDING = 2 * MAX_LINE_BYTES

_PROGRESS_SECONDS = 1.0

_TAIL = 50


_ERROR = re.compile(r"\s*(\[?(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|Fatal Python error|[\w.]+Error: )")

_WARNING = re.compile(r"\s*\[?WARN(ING)?\b")


LogLine = dict[str, Any]
"""One line of output as stored in the event log: `line`, `stream` (stdout or stderr), `level`, perhaps `left_out`."""


class LogLines:
    """Assembler of log lines from printed output; each stream is assembled separately, in its own order.

    A progress bar that redraws itself with carriage returns appears at most once a second, in its last state. Lines
    beyond `burst`, refilled with `rate` a second, are left out and counted; the last ones are returned at the end,
    because they say why a process failed.
    """

    def __init__(
        self,
        burst: int = 2000,
        rate: float = 200.0,
        redact: Redactor | None = None,
        *,
        label: str = "",
        on_line: Callable[[LogLine], None] = lambda _: None,
        place: Callable[[], str] = lambda: "",
        shortage: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Call `on_line` with each line, those left out too; `place` says where they are, `label` begins each line.

        While `shortage` returns a clause that says why there is no room for lines, all are left out.
        """
        redact = redact or Redactor()
        self._label = label
        self._on_line = on_line
        self._place = place
        self._shortage = shortage
        self._reason = ""
        self._streams: dict[Stream, _Stream] = {"stdout": _Stream(redact), "stderr": _Stream(redact)}
        self._burst = burst
        self._rate = rate
        self._tokens = float(burst)
        self._refilled: float | None = None
        self._left_out = 0
        self._tail: deque[LogLine] = deque(maxlen=_TAIL)

    def feed(self, source: Stream, data: bytes, now: float) -> list[LogLine]:
        """Take bytes, split anywhere, and return the lines that are complete; `now` is in seconds of any clock."""
        lines = [self._log_line(text, source) for text in self._streams[source].feed(data, now)]
        return [admitted for line in lines for admitted in self._admit_line(line, now)]

    def flush(self) -> list[LogLine]:
        """Return what is left when the process has ended: unfinished lines, and the last of those left out."""
        rest: list[LogLine] = []
        for source, stream in self._streams.items():
            rest += [self._log_line(text, source) for text in stream.flush()]
        self._tail.extend(rest)
        if not self._left_out:
            return rest
        last = list(self._tail)[-(self._left_out + len(rest)) :]
        self._left_out -= len(last) - len(rest)
        return [*self._note_left_out(), *last]

    @property
    def tail(self) -> list[str]:
        """Last lines, including those left out."""
        return [line["line"] for line in self._tail]

    def _admit_line(self, line: LogLine, now: float) -> list[LogLine]:
        self._tail.append(line)
        if self._refilled is not None:
            self._tokens = min(self._burst, self._tokens + max(now - self._refilled, 0.0) * self._rate)
        self._refilled = now
        # After a flood, output resumes with a second's worth of lines, not one by one with a note before each.
        if self._tokens < (min(self._burst, max(self._rate, 1.0)) if self._left_out else 1.0):
            return self._leave_out(f"more than {self._rate:g} a second")
        # Only now: in a flood, to look at the disk for each line would take as long as the lines themselves.
        if shortage := self._shortage():
            return self._leave_out(shortage)
        self._tokens -= 1
        return [*self._note_left_out(), line]

    def _leave_out(self, reason: str) -> list[LogLine]:
        self._left_out += 1
        self._reason = reason
        return []

    def _note_left_out(self) -> list[LogLine]:
        left_out, self._left_out = self._left_out, 0
        if not left_out:
            return []
        text = f"{self._label}… {left_out:,} lines left out: {self._reason}{self._place()}"
        return [{"line": text, "stream": "stderr", "level": "warning", "left_out": left_out}]

    def _log_line(self, text: str, stream: Stream) -> LogLine:
        line = {"line": self._label + text, "stream": stream, "level": _guess_level(text, stream)}
        self._on_line(line)
        return line


class _Stream:
    """Unfinished line of one stream; bounded, however long that line grows."""

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._cut = 0  # characters of the unfinished line that were discarded
        self._returned = False  # the last character was a carriage return, which may start a line end
        self._state: str | None = None  # state of a progress bar, not shown yet
        self._shown = -math.inf

    def feed(self, data: bytes, now: float) -> list[str]:
        lines: list[str] = []
        for piece in re.split(r"([\r\n])", self._decoder.decode(data)):
            if piece == "\n":
                lines.append(self._take_line())
                self._returned, self._state = False, None
            elif piece:
                if self._returned:
                    lines += self._replace_progress(now)
                if piece == "\r":
                    self._returned = True
                else:
                    self._append_text(piece)
        return lines

    def flush(self) -> list[str]:
        self._append_text(self._decoder.decode(b"", final=True))
        if self._pending or self._cut:
            self._state = None
            return [self._take_line()]
        state, self._state = self._state, None
        return [] if state is None else [state]

    def _replace_progress(self, now: float) -> list[str]:
        """Handle a carriage return: the text before it is one state of a progress bar, replaced by the next one."""
        self._returned = False
        if self._pending or self._cut:
            self._state = self._take_line()
        if self._state is None or now - self._shown < _PROGRESS_SECONDS:
            return []
        self._shown = now
        state, self._state = self._state, None
        return [state]

    def _append_text(self, text: str) -> None:
        room = _MAX_PENDING - len(self._pending)
        self._pending += text[:room]
        self._cut += max(len(text) - room, 0)

    def _take_line(self) -> str:
        text, cut = self._pending, self._cut
        self._pending, self._cut = "", 0
        return _visible_text(text, cut, self._redact)


def _visible_text(text: str, cut: int, redact: Redactor) -> str:
    visible = plain_line(text)  # first: a color code in the middle of a secret would hide it
    visible = redact(visible)
    if cut:
        visible = visible[: -redact.longest]  # its end may be the beginning of a secret
    encoded = visible.encode()
    if not cut and len(encoded) <= MAX_LINE_BYTES:
        return visible
    return encoded[:MAX_LINE_BYTES].decode(errors="ignore") + f" … (cut; {len(text) + cut} characters in all)"


def _guess_level(text: str, stream: Stream) -> Level:
    if stream == "stderr":
        if _ERROR.match(text):
            return "error"
        if _WARNING.match(text) or "Warning: " in text:
            return "warning"
    return "info"
