"""No secret that a run was given, and nothing that looks like a key, gets from a training process into its events."""

import base64
import json
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.ingest.log_lines import MAX_LINE_BYTES, LogLines
from worker.ingest.record_parser import parse_record
from worker.ingest.redaction import LONGEST, MASK, Redactor

SECRET = 'tok/en+of=ada&0123456789"\\'
HF = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"
KEY = "anneal_" + "x-_Y9" * 8 + "abc"


def hiding(*values: str) -> Redactor:
    redact = Redactor()
    redact.hide_values(values)
    return redact


def printed(*pieces: bytes, redact: Redactor | None = None) -> str:
    """What is left of the bytes that a process prints, in such pieces."""
    lines = LogLines(redact=redact or hiding(SECRET))
    texts = [line["line"] for n, piece in enumerate(pieces) for line in lines.feed("stdout", piece, n * 2.0)]
    return "\n".join([*texts, *(line["line"] for line in lines.flush())])


@given(st.lists(st.integers(0, 60), max_size=6), st.sampled_from(["\n", "\r", "\r\n", ""]))
def test_a_secret_in_pieces_is_found_wherever_they_are_cut(cuts: list[int], end: str) -> None:
    whole = f"before {SECRET} after{end}".encode()
    places = sorted(min(cut, len(whole)) for cut in cuts)
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    assert printed(*pieces) == f"before {MASK} after"


@pytest.mark.parametrize(
    "form",
    [
        SECRET, quote(SECRET, safe=""), json.dumps(SECRET), repr(SECRET), SECRET.encode().hex(),
        f"https://ada:{quote(SECRET, safe='')}@hub.example/x", "\x1b[31m".join(SECRET), "\x1b]0;title\x07".join(SECRET),
        *(base64.b64encode(b"u" * n + SECRET.encode() + b"tail" * n).decode() for n in range(4)),
        *(base64.urlsafe_b64encode(b"u" * n + SECRET.encode()).decode() for n in range(4)),
    ],
)  # fmt: skip
def test_a_secret_is_found_in_the_forms_in_which_programs_print_it(form: str) -> None:
    shown = printed(f"the token: {form}\n".encode())
    assert MASK in shown
    assert SECRET not in shown and SECRET[4:16] not in shown
    raw = shown.encode()
    assert not any(base64.b64encode(b"." * n + SECRET.encode())[8:20] in raw for n in range(3))


@pytest.mark.parametrize("secrets", [(), (SECRET,)])
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"using {HF} now", f"using {MASK} now"),
        (f"key={KEY};", f"key={MASK};"),
        ("Authorization: Bearer abc.def-ghi_jkl/mno=", f"Authorization: Bearer {MASK}"),
        ("authorization: bearer abcdefghijkl", f"authorization: bearer {MASK}"),
        ("GET https://ada:pa%20ss@hub.example/x", f"GET https://{MASK}@hub.example/x"),
        ("hf_hub_download of hf_transfer", "hf_hub_download of hf_transfer"),
        ("the bearer of news; anneal_worker; https://hub.example/a@b:c", None),
        ("step 10 loss 0.5", None),
    ],
)
def test_what_looks_like_a_key_is_masked_and_nothing_else(
    secrets: tuple[str, ...], line: str, shown: str | None
) -> None:
    assert printed(f"{line}\n".encode(), redact=hiding(*secrets)) == (shown or line)


@pytest.mark.parametrize("over", [*range(-len(SECRET) - 3, 4), 9000 - 16384])
def test_where_a_long_line_is_cut_not_even_the_beginning_of_a_secret_is_left(over: int) -> None:
    """Both bounds: what is kept of a line while it grows, and what is shown of it (after colours are gone)."""
    for bound in (2 * MAX_LINE_BYTES, MAX_LINE_BYTES):
        for padding in ("x", "\x1b[m"):
            begin = padding * ((bound + over) // len(padding)) + "y" * ((bound + over) % len(padding))
            shown = printed((begin + SECRET + " end " * 5000 + "\n").encode())
            assert SECRET[:4] not in shown


def test_a_flood_that_is_dropped_keeps_no_secret_for_its_end() -> None:
    lines = LogLines(burst=5, rate=1, redact=hiding(SECRET))
    shown = lines.feed("stderr", f"{SECRET}\n".encode() * 1000, 0.0) + lines.flush()
    assert len(shown) > 50 and SECRET not in json.dumps([line["line"] for line in shown])
    assert not any(SECRET in line for line in lines.tail)


def test_records_are_masked_at_every_depth_in_keys_too() -> None:
    record = {"type": "config", "effective": {"a": [{"b": f"<{SECRET}>"}]}, SECRET: 1, "note": f"Bearer {HF}"}
    masked = parse_record(json.dumps(record).encode(), hiding(SECRET))
    assert masked == {"type": "config", "effective": {"a": [{"b": f"<{MASK}>"}]}, MASK: 1, "note": f"Bearer {MASK}"}


def test_what_the_trainer_or_we_cut_off_ends_with_no_beginning_of_a_secret() -> None:
    redact = hiding(SECRET)
    cut = {"type": "message", "line": "x" * 2000 + SECRET[:12] + "…", "truncated": True}
    parsed = parse_record(json.dumps(cut).encode(), redact)
    assert parsed and SECRET[:5] not in parsed["line"] and parsed["line"].endswith("x…")
    for before in range(64 * 1024 - 40, 64 * 1024 + 2):
        parsed = parse_record(json.dumps({"type": "message", "line": "x" * before + SECRET}).encode(), redact)
        assert parsed and SECRET[:5] not in parsed["line"]
    many = f"{SECRET} " * 4000
    assert SECRET[:5] not in redact.cut_text(many, 50_000)
    whole = {"type": "message", "line": "loading " * 10 + "…"}
    assert parse_record(json.dumps(whole).encode(), redact) == whole


def test_a_short_text_is_cut_as_ever() -> None:
    assert Redactor().cut_text("abc" * 100, 200) == ("abc" * 100)[:200]
    assert Redactor().cut_text("x" * (200 + LONGEST + 1), 200) == "x" * 200


def test_masking_costs_a_small_part_of_what_making_lines_costs() -> None:
    """Processor time, best of several: a line without a secret is looked at for well under a microsecond."""
    line = "step 1234 of 10000, loss 2.3456, learning rate 0.0002, 12.3 samples a second, eta 0:12:34"

    def best(redact: Redactor) -> float:
        took = []
        for _ in range(7):
            started = time.thread_time()
            for _ in range(10_000):
                redact(line)
            took.append((time.thread_time() - started) / 10_000)
        return min(took)

    assert best(Redactor()) < 1.5e-6
    assert best(hiding(SECRET, HF)) < 10e-6


def test_no_text_takes_long_to_look_through() -> None:
    """The expression has no way to go back and forth over hostile lines."""
    for piece in ("hf_", "anneal_", "Bearer ", "://a:", "hf_A", "://" + "a" * 90 + ":", "bearer x", "anneal_-"):
        text = (piece * 16384)[: 2 * MAX_LINE_BYTES]
        started = time.thread_time()
        Redactor()(text)
        assert time.thread_time() - started < 0.25, piece
