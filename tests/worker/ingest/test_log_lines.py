"""What a process prints becomes lines that a database and a page can hold, in bounded memory."""

import itertools
import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from worker.ingest.log_lines import MAX_LINE_BYTES, LogLine, LogLines, Stream
from worker.ingest.record_parser import clean_record, parse_record
from worker.ingest.redaction import Redactor

pieces = st.lists(
    st.tuples(
        st.sampled_from(["stdout", "stderr"]),
        st.one_of(
            st.binary(max_size=60),
            st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")),
            st.sampled_from([b"\r", b"\n", b"\r\n", b"\x1b[31m", b"\x1b]0;title\x07", b"\x00", b"\xc3", b"\xa9"]),
        ),
    ),
    max_size=30,
)


def every(lines: LogLines, fed: list[tuple[Stream, bytes]], seconds: float = 2.0) -> list[LogLine]:
    """All lines of what was fed, `seconds` apart, flushed."""
    out = [line for n, (source, data) in enumerate(fed) for line in lines.feed(source, data, n * seconds)]
    return out + lines.flush()


def texts(data: bytes, **options: Any) -> list[str]:
    return [line["line"] for line in every(LogLines(**options), [("stdout", data)])]


class TestAnyBytes:
    @given(pieces)
    def test_every_line_can_be_stored_and_sent(self, fed: list[tuple[Stream, bytes]]) -> None:
        for line in every(LogLines(), fed):
            text = line["line"]
            assert text.isprintable() or not any(ord(c) < 32 and c != "\t" for c in text)
            assert not set(text) & {"\0", "\r", "\n", "\x1b", "\x7f", "\x9b", "\u202e"}
            text.encode()
            assert json.loads(json.dumps(line)) == line

    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=30)), st.data())
    def test_plain_lines_come_back_unchanged_however_they_are_cut(self, lines: list[str], data: Any) -> None:
        whole = "".join(line + "\n" for line in lines).encode()
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
        fed: list[tuple[Stream, bytes]] = [
            ("stdout", whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        ]
        assert [line["line"] for line in every(LogLines(), fed)] == lines

    @given(st.binary(max_size=300), st.data())
    def test_cuts_change_nothing(self, whole: bytes, data: Any) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
        fed: list[tuple[Stream, bytes]] = [
            ("stderr", whole[a:b]) for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        ]
        assert every(LogLines(), fed, seconds=0) == every(LogLines(), [("stderr", whole)])

    @given(pieces)
    def test_the_streams_never_mix(self, fed: list[tuple[Stream, bytes]]) -> None:
        both = every(LogLines(), fed)
        for stream in ("stdout", "stderr"):
            # Keep the clock: the other stream's pieces become empty ones.
            alone = every(LogLines(), [(source, data if source == stream else b"") for source, data in fed])
            assert [line for line in both if line["stream"] == stream] == [
                line for line in alone if line["stream"] == stream
            ]


class TestLines:
    def test_windows_line_ends_are_line_ends(self) -> None:
        assert texts(b"a\r\nb\r\n") == ["a", "b"]

    def test_empty_lines_stay(self) -> None:
        assert texts(b"a\n\nb\n") == ["a", "", "b"]

    def test_an_unfinished_line_appears_at_the_end(self) -> None:
        assert texts(b"a\nlast words") == ["a", "last words"]

    def test_half_a_character_at_the_end_is_shown_as_broken(self) -> None:
        assert texts("é".encode()[:1]) == ["\ufffd"]

    def test_colours_titles_and_links_are_stripped(self) -> None:
        assert texts(b"\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n") == ["red link"]

    def test_other_control_characters_become_visible(self) -> None:
        assert texts("a\x00b\x07c\x7fd\u009be\u202ef\tg\n".encode()) == ["a␀b␇c␡d\\x9be\\u202ef\tg"]

    def test_a_long_line_is_cut_and_says_so(self) -> None:
        (text,) = texts(b"x" * 1_000_000 + b"\n")
        assert len(text.encode()) < MAX_LINE_BYTES + 60
        assert "1000000 characters in all" in text

    def test_a_line_that_never_ends_costs_bounded_memory(self) -> None:
        lines = LogLines()
        for _ in range(1000):
            assert lines.feed("stdout", b"y" * 65536, 0.0) == []
        assert sys.getsizeof(lines._streams["stdout"]._pending) < 10 * MAX_LINE_BYTES
        assert len(lines.flush()) == 1

    def test_a_cut_never_splits_a_character(self) -> None:
        (text,) = texts(("x" + "€" * 5000).encode())
        assert "\ufffd" not in text


class TestProgress:
    def test_a_bar_appears_once_a_second_in_its_last_state(self) -> None:
        lines = LogLines()
        shown = [
            (now, line["line"])
            for n in range(100)
            for now in [n / 20]
            for line in lines.feed("stderr", f"\r{n}%".encode(), now)
        ]
        assert len(shown) <= 6
        assert all(b[0] - a[0] >= 1 for a, b in itertools.pairwise(shown))
        assert [line["line"] for line in lines.feed("stderr", b"\r100%\n", 5.0)][-1] == "100%"

    def test_the_finished_bar_is_a_line(self) -> None:
        assert texts(b"\r 0%\r 50%\r100%\n") == [" 0%", "100%"]

    def test_a_bar_that_stops_is_shown_in_its_last_state(self) -> None:
        assert texts(b"\r10%\r20%\r30%") == ["10%", "30%"]

    def test_text_before_a_lone_return_is_not_lost(self) -> None:
        assert texts(b"10%\r20%\r") == ["10%", "20%"]


class TestFlood:
    def test_lines_beyond_burst_and_rate_are_dropped_and_counted(self) -> None:
        lines = LogLines(burst=10, rate=5)
        out = lines.feed("stdout", b"".join(b"%d\n" % n for n in range(1000)), 0.0)
        assert [line["line"] for line in out] == [str(n) for n in range(10)]
        later = lines.feed("stdout", b"again\n", 100.0)
        assert [line["line"] for line in later] == ["… 990 lines left out: more than 5 a second", "again"]

    def test_the_last_lines_of_a_flood_survive_it(self) -> None:
        lines = LogLines(burst=10, rate=5)
        lines.feed("stdout", b"spam\n" * 1000 + b"why it failed\n", 0.0)
        rest = [line["line"] for line in lines.flush()]
        assert rest[0] == "… 941 lines left out: more than 5 a second"
        assert rest[-1] == "why it failed"
        assert len(rest) == 51
        assert lines.tail[-1] == "why it failed"

    @given(st.integers(1, 50), st.integers(1, 50), st.lists(st.integers(0, 60), max_size=40))
    def test_every_line_is_shown_or_counted(self, burst: int, rate: int, bursts: list[int]) -> None:
        lines = LogLines(burst=burst, rate=rate)
        out: list[LogLine] = []
        for second, count in enumerate(bursts):
            out += lines.feed("stdout", b"x\n" * count, float(second))
        out += lines.flush()
        shown = sum(line["line"] == "x" for line in out)
        counted = sum(line.get("left_out", 0) for line in out)
        assert shown + counted == sum(bursts)
        assert shown <= burst + rate * len(bursts) + 50

    def test_every_line_is_reported_once_to_the_complete_log_and_the_note_says_where(self) -> None:
        complete: list[LogLine] = []
        lines = LogLines(10, 5, label="[rank 1] ", on_line=complete.append, place=lambda: "; read them there")
        out = lines.feed("stdout", b"".join(b"%d\n" % n for n in range(1000)) + b"unfinished", 0.0) + lines.flush()
        assert [line["line"] for line in complete] == [*(f"[rank 1] {n}" for n in range(1000)), "[rank 1] unfinished"]
        (note,) = [line for line in out if "left_out" in line]
        assert note["line"] == "[rank 1] … 941 lines left out: more than 5 a second; read them there"
        assert note["left_out"] + len(out) - 1 == len(complete)

    def test_a_steady_flood_keeps_its_rate_with_a_note_a_second(self) -> None:
        lines = LogLines(burst=100, rate=10)
        out = [line for n in range(10_000) for line in lines.feed("stdout", b"x\n", n / 1000)]
        assert sum(line["line"] == "x" for line in out) in range(100, 201)
        assert sum("left_out" in line for line in out) <= 11


class TestLevels:
    @pytest.mark.parametrize(
        ("text", "level"),
        [
            ("ERROR:root:no", "error"),
            ("Traceback (most recent call last):", "error"),
            ("ValueError: no", "error"),
            ("Fatal Python error: Segmentation fault", "error"),
            ("WARNING:root:hm", "warning"),
            ("/x.py:3: UserWarning: hm", "warning"),
            (" 10%|# | 1/10", "info"),
            ("INFO:root:ok", "info"),
        ],
    )
    def test_levels_follow_the_usual_forms(self, text: str, level: str) -> None:
        (line,) = LogLines().feed("stderr", text.encode() + b"\n", 0.0)
        assert line["level"] == level

    def test_standard_output_is_information(self) -> None:
        (line,) = LogLines().feed("stdout", b"ERROR: not really\n", 0.0)
        assert line["level"] == "info"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


class TestRecords:
    @given(json_like)
    @examples(100)
    def test_any_record_becomes_storable(self, record: Any) -> None:
        text = json.dumps(clean_record(record, Redactor()), allow_nan=False)
        assert "\\u0000" not in text
        json.dumps(clean_record(record, Redactor()), ensure_ascii=False).encode()

    def test_non_finite_numbers_are_null_and_named(self) -> None:
        record = {"type": "metric", "loss": math.nan, "extra": {"kl": -math.inf}, "list": [1.0, math.inf]}
        assert clean_record(record, Redactor()) == {
            "type": "metric",
            "loss": None,
            "extra": {"kl": None},
            "list": [1.0, None],
            "non_finite": ["loss", "extra.kl", "list.1"],
        }

    def test_a_clean_record_is_unchanged(self) -> None:
        record = {"type": "metric", "step": 3, "loss": 1.25, "extra": {"a": [True, None, "é"]}}
        assert clean_record(record, Redactor()) == record

    def test_integers_beyond_the_database_become_floats(self) -> None:
        assert clean_record({"n": 2**70, "m": 10**400}, Redactor()) == {"n": 2.0**70, "m": None, "non_finite": ["m"]}

    def test_depth_and_size_are_bounded(self) -> None:
        deep: Any = 1
        for _ in range(5000):
            deep = [deep]
        text = json.dumps(clean_record({"deep": deep, "long": "x" * 10**6, "many": [0] * 10**6}, Redactor()))
        assert len(text) < 200_000

    @pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b'{"a": 1}', b'{"type": 3}', b"\xff", b"[" * 10**5])
    def test_invalid_record_is_ignored(self, data: bytes) -> None:
        assert parse_record(data, Redactor()) is None

    def test_a_record_is_parsed_and_cleaned(self) -> None:
        assert parse_record(b'{"type": "metric", "loss": NaN, "note": "\\ud800\\u0000"}', Redactor()) == {
            "type": "metric",
            "loss": None,
            "note": "\ufffd" * 3 + "\ufffd",
            "non_finite": ["loss"],
        }
