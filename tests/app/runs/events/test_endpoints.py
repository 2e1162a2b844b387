"""Whatever a run says, its event stream arrives whole at a strict reader and at a common one, however it is cut."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from httpx_sse import EventSource
from hypothesis import example, given
from hypothesis import strategies as st
from sseclient import SSEClient

from anneal.contracts.attempt.messages import MAX_RECORD_BYTES
from app.infra.ids import new_id
from app.runs.events.frames import Batch, Frame
from app.runs.events.log import NewEvent, event_json
from app.runs.events.responses import as_ndjson, as_sse
from tests.properties import examples
from worker.ingest.record_parser import clean_record
from worker.ingest.redaction import Redactor

_RUN = new_id("run")
_ODD_TEXT = st.sampled_from(
    [
        "\r", "\n", "\r\n", "\n\n", "\0", "\ud800", "\udfff", "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c",
        "\ufeff", ": ", "data: x", "\ndata: x\n\n", "id: 7", "\nid: 7\n", "event: end",
        " leading", "retry: 1", "\\u2028", "\\", '"',
    ]
)  # fmt: skip
_TEXT = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=20),
    _ODD_TEXT,
    st.lists(st.one_of(_ODD_TEXT, st.text(max_size=5)), max_size=6).map("".join),
    st.integers(1000, 20_000).map(lambda n: "long\u2028" * (n // 5)),
)
_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=4)),
    max_leaves=8,
)
# Cleaning may add to a payload, and one that is larger than a record may be is no event.
_PAYLOADS = st.lists(
    st.dictionaries(_TEXT, _VALUE, max_size=5).filter(lambda payload: len(json.dumps(payload)) < MAX_RECORD_BYTES // 2),
    max_size=8,
)
_TYPES = ("log", "metric", "progress", "checkpoint", "config", "error", "status", "eval", "sample")


@dataclass(frozen=True)
class Got:
    """An event as a reader dispatches it."""

    id: str
    event: str
    data: str


class StrictReader:
    """The event stream interpretation of the HTML standard, byte for byte; takes its input in any pieces."""

    def __init__(self) -> None:
        self.last_id = ""
        self.ids_seen: list[str] = []
        self._bytes = b""
        self._at_start = True
        self._data: list[str] = []
        self._type = ""

    def feed(self, piece: bytes, final: bool = False) -> Iterator[Got]:
        """The events that these bytes complete."""
        self._bytes += piece
        if self._at_start and (len(self._bytes) >= 3 or final):
            self._bytes = self._bytes.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if self._at_start:
            return
        while True:
            ends = [at for at in (self._bytes.find(b"\r"), self._bytes.find(b"\n")) if at >= 0]
            if not ends:
                return  # an unfinished line is never interpreted, and an unfinished event never dispatched
            end = min(ends)
            if self._bytes[end : end + 1] == b"\r":
                if end + 1 == len(self._bytes) and not final:
                    return  # the line feed that belongs to it may still come
                after = end + 2 if self._bytes[end + 1 : end + 2] == b"\n" else end + 1
            else:
                after = end + 1
            line, self._bytes = self._bytes[:end].decode("utf-8", errors="strict"), self._bytes[after:]
            yield from self._interpret(line)

    def _interpret(self, line: str) -> Iterator[Got]:
        if not line:
            if self._data:
                yield Got(self.last_id, self._type or "message", "\n".join(self._data))
            self._data, self._type = [], ""
            return
        if line.startswith(":"):
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self.last_id = value
        elif name == "retry":
            assert value.isascii() and value.isdigit()
        else:
            raise AssertionError(f"a field that we never send: {line!r}")


def cut(whole: bytes, borders: list[int]) -> list[bytes]:
    """`whole` in pieces."""
    at = sorted({border % (len(whole) + 1) for border in borders})
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


def stored(payloads: list[dict[str, Any]]) -> list[tuple[str, Any, Frame]]:
    """Type, payload as it was kept, and frame of each event, all the way from the trainer to the wire."""
    events = []
    for seq, raw in enumerate(payloads, 1):
        cleaned = clean_record(raw, Redactor())
        event = NewEvent.from_payload(_TYPES[seq % len(_TYPES)], 1_700_000_000.0 + seq, cleaned)
        body = event_json(_RUN, seq, event.ts, event.data).encode()
        events.append((event.type, cleaned, Frame(seq, event.type, body)))
    return events


async def body(form: Any, frames: list[Frame], batch: int, silent: set[int]) -> bytes:
    """What a client is sent; after some batches nothing comes for a while."""

    async def batches() -> AsyncIterator[tuple[int, Batch]]:
        for start in range(0, len(frames), batch):
            part = Batch(frames[start : start + batch])
            yield part[-1].seq, part
            if start in silent:
                yield part[-1].seq, Batch()

    return b"".join([part async for part in form(batches())])


def check(got: list[Any], events: list[tuple[str, Any, Frame]]) -> None:
    assert [(one.id, one.event) for one in got] == [(str(frame.seq), kind) for kind, _, frame in events]
    for event, (_, payload, frame) in zip(got, events, strict=True):
        read = json.loads(event.data)
        moment = datetime.fromtimestamp(1_700_000_000 + frame.seq, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        # The envelope comes first; a payload that has the same names cannot be told from it and wins, as in JSON.
        assert read == {"run_id": _RUN, "seq": frame.seq, "ts": moment, **payload}


@given(payloads=_PAYLOADS, batch=st.integers(1, 4), silent=st.sets(st.integers(0, 8)), borders=st.lists(st.integers(0)))
@example(payloads=[{"line": "a\u2028b"}, {"\r\n": "\ud800"}], batch=1, silent={0}, borders=[])
@examples(30)
async def test_every_event_reaches_both_readers_as_it_was_said(
    payloads: list[dict[str, Any]], batch: int, silent: set[int], borders: list[int]
) -> None:
    events = stored(payloads)
    sent = await body(as_sse, [frame for *_, frame in events], batch, silent)
    pieces = cut(sent, borders)
    strict = StrictReader()
    got = [one for piece in pieces for one in strict.feed(piece)]
    got += strict.feed(b"", final=True)
    assert strict._bytes == b"" and strict._data == []
    check(got, events)
    assert strict.last_id == (str(events[-1][2].seq) if events else "")

    response = httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, content=iter(pieces))
    # Its decoder also dispatches blocks without data, unlike the standard.
    check(list(EventSource(response).iter_sse()), events)
    check(list(SSEClient(iter(pieces)).events()), events)


@given(payloads=_PAYLOADS, batch=st.integers(1, 4), borders=st.lists(st.integers(0)))
@example(payloads=[{"line": "a\u2028b\x85c\u2029"}], batch=1, borders=[])
@examples(20)
async def test_readers_that_split_at_every_line_end_of_unicode_see_whole_lines(
    payloads: list[dict[str, Any]], batch: int, borders: list[int]
) -> None:
    """As `httpx.Response.iter_lines` and `str.splitlines` do, which many clients use for either form."""
    events = stored(payloads)
    for form, line_count in ((as_ndjson, 1), (as_sse, 4)):
        sent = await body(form, [frame for *_, frame in events], batch, set())
        response = httpx.Response(
            200, headers={"content-type": "text/plain; charset=utf-8"}, content=iter(cut(sent, borders))
        )
        lines = list(response.iter_lines())
        assert len(lines) == line_count * len(events) + (1 if form is as_sse else 0)
        if form is as_ndjson:
            read = [json.loads(line) for line in lines]
            assert [one["seq"] for one in read] == [frame.seq for *_, frame in events] or any(
                "seq" in kept for _, kept, _ in events
            )


@given(whole=st.binary(max_size=300), borders=st.lists(st.integers(0), max_size=8))
@examples(50)
def test_the_strict_reader_does_not_mind_how_it_is_fed(whole: bytes, borders: list[int]) -> None:
    """The yardstick itself: pieces change nothing."""

    def read(pieces: list[bytes]) -> Any:
        reader = StrictReader()
        try:
            return [*(one for piece in pieces for one in reader.feed(piece)), *reader.feed(b"", final=True)]
        except (AssertionError, UnicodeDecodeError) as error:
            return type(error)

    assert read(cut(whole, borders)) == read([whole])
