"""Whatever a process prints, and however the pipe cuts it: bounded lines of plain text that Postgres can keep."""

import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties import examples
from worker.ingest.log_lines import MAX_LINE_BYTES, LogLine, LogLines, Stream

_CUT_NOTE = re.compile(r" … \(cut; (\d+) characters in all\)$")
_MOST = MAX_LINE_BYTES + len(" … (cut; 1000000000 characters in all)".encode())
# Everything that a terminal or a page would not show as itself: controls but the tab, direction marks, half characters.
_UNFIT = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PIECE = st.one_of(
    st.binary(max_size=30),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=12).map(
        lambda text: text.encode(errors="surrogatepass")
    ),
    st.sampled_from(
        [
            b"\r", b"\n", b"\r\n", b"\r\r\n", b"\n\r", b"\x1b", b"\x1b[31m", b"\x1b[", b"\x1b]0;title", b"\x07",
            b"\x1b\\", b"\x1bPq", b"\x00", b"\xc3", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0\x80",
            b"\xc2\x9b31m", "\u202e\u2066".encode(), b"ERROR: no", b"Traceback (most recent call last):",
        ]
    ),
    # Around the longest line that is shown, and the longest that is held.
    st.builds(
        lambda text, size, by: text * ((size + by) // len(text)),
        st.sampled_from([b"x", "€".encode(), "😀".encode(), b"\x00", b"\x1b[0m", b"\x85", b"\xc2\x85"]),
        st.sampled_from([MAX_LINE_BYTES, 2 * MAX_LINE_BYTES, 4 * MAX_LINE_BYTES]),
        st.integers(-4, 4),
    ),
)  # fmt: skip
_OUTPUT = st.lists(_PIECE, max_size=8).map(b"".join)


def every(pieces: list[tuple[Stream, bytes]], **options: Any) -> list[LogLine]:
    lines = LogLines(**options)
    return [line for source, data in pieces for line in lines.feed(source, data, 0.0)] + lines.flush()


@given(whole=_OUTPUT, borders=st.lists(st.integers(0), max_size=8), source=st.sampled_from(["stdout", "stderr"]))
@example(whole=b"x\r", borders=[1], source="stdout")
@examples(75)
def test_borders_change_nothing_and_every_line_is_fit_to_be_kept(
    whole: bytes, borders: list[int], source: Stream
) -> None:
    at = sorted(border % (len(whole) + 1) for border in borders)
    pieces = [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]
    lines = every([(source, whole)])
    assert every([(source, piece) for piece in pieces]) == lines
    if len(whole) < 2000:
        assert every([(source, whole[n : n + 1]) for n in range(len(whole))]) == lines
    for line in lines:
        text = line["line"]
        assert not _UNFIT.search(text)
        assert len(text.encode()) <= _MOST
        assert len(text.encode()) <= MAX_LINE_BYTES or _CUT_NOTE.search(text)
    if b"\r" not in whole:
        said = whole.decode(errors="replace").split("\n")
        for line, text in zip(lines, said, strict=False):
            note = _CUT_NOTE.search(line["line"])
            assert note is None or len(text) < 2000 or note[1] == str(len(text))
    # Each line feed ends exactly one line; returns may add states of a progress bar, and the end what was left.
    assert whole.count(b"\n") <= len(lines) <= whole.count(b"\n") + whole.count(b"\r") + 1


@given(
    fed=st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), _OUTPUT), max_size=6),
    burst=st.integers(1, 5),
    rate=st.floats(0.5, 10),
)
@examples(30)
def test_a_flood_is_counted_and_its_notes_are_lines_like_others(
    fed: list[tuple[Stream, bytes]], burst: int, rate: float
) -> None:
    everything = every(fed, burst=1_000_000)
    lines = every(fed, burst=burst, rate=rate)
    notes = [line for line in lines if "left_out" in line]
    assert all(re.fullmatch(r"… [\d,]+ lines left out: more than [\d.]+ a second", note["line"]) for note in notes)
    left_out = sum(note["left_out"] for note in notes)
    assert len(lines) - len(notes) + left_out == len(everything)
    for line in lines:
        assert not _UNFIT.search(line["line"]) and len(line["line"].encode()) <= _MOST
