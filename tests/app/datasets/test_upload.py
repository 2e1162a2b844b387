"""Whatever bytes are uploaded: taken whole or refused with a reason, the same however they arrive in pieces."""

import hashlib
import json
import re
import time
import traceback
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.api.errors import ApiError
from app.config import Settings
from app.datasets.formats import FORMATS
from app.datasets.importer import ImportedFile
from app.datasets.readers.jsonl import LineReader
from app.datasets.row_writer import MOST_BAD_ROWS, RowWriter, TooManyBadRows, line_of
from app.datasets.token_counter import TokenCounter
from app.datasets.upload import receive_upload
from app.infra.strict_json import parse_with_gaps
from tests.properties import examples

_MOST_LINE = 2048
_CODES = {
    "not_utf8", "invalid_json", "number_too_long", "too_deep", "nul_in_text", "lone_surrogate", "duplicate_key",
    "not_finite", "line_too_long", "empty_file", "empty_line", "byte_order_mark", "not_an_object", "key_too_long",
    "too_many_columns", "ambiguous_format", "unknown_format", "wrong_type", "unknown_role", "unknown_key", "empty_text",
    "no_assistant_message", "missing_column",
}  # fmt: skip
_TEXT = st.one_of(st.text(max_size=12), st.text(st.characters(codec=None, exclude_categories=()), max_size=6))
_ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "system", "tool"]), "content": _TEXT.map("t".__add__)}
)
_ROW = st.one_of(
    st.fixed_dictionaries({"text": _TEXT.map("t".__add__)}, optional={"extra": _ANY}),
    st.fixed_dictionaries({"text": st.just("t")}),
    st.fixed_dictionaries({"prompt": st.just("p"), "completion": _TEXT}, optional={"note": _ANY}),
    st.fixed_dictionaries({"messages": st.lists(_MESSAGE, max_size=3)}),
    _ANY,
)
_GOOD = st.builds(
    lambda row, plain: json.dumps(row, ensure_ascii=not plain).encode(errors="surrogatepass"), _ROW, st.booleans()
)
_ODD = st.sampled_from(
    [
        b"", b" ", b"\t", b"\x0b", b"\x0c", b"\r", b"\x00", b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80",
        b'{"text": "a"}', b'{"text": "a"} x', b'{"text": "a"}\r{"text": "b"}', b'{"text": "a",}', b"{'text': 'a'}",
        b'{"text": "a", "text": "b"}', b'{"text": "a", "x": {"y": 1, "y": 2}}', b'{"text": "\x00"}',
        b'{"text": "\\u0000"}',
        b'{"text": "\\ud800"}', b'{"text": "\\ud83d\\ude00"}', b'{"text": "a\\\\ud800"}',
        b'{"\\udfff": 1, "text": "a"}',
        b'{"text": "a", "n": NaN}', b'{"text": "a", "n": -Infinity}', b'{"text": "a", "n": 1e999}',
        b'{"text": "a", "n": -0.0}', b'{"text": "a", "n": 1e-999}', b'{"text": "a", "n": ' + b"9" * 700 + b"}",
        b'{"text": "a", "n": 01}', b'{"text": "\xe2\x80\xa8"}', b'{"text": "\x7f\xc2\x85"}',
        b'"text"', b"[]", b"null", b"{}",
        b'{"text": "' + b"x" * _MOST_LINE + b'"}', b'{"text": ' + b"[" * 1500, b'{"text": "a", "d": ' + b'{"d":' * 400,
        *(b'{"text": "a", "d": ' + b"[" * n + b"]" * n + b"}" for n in (30, 31, 32, 33, 900)),
    ]
)  # fmt: skip
_SPOILT = st.builds(
    lambda line, at, what, drop: line[: at % (len(line) + 1)] + what + line[at % (len(line) + 1) + drop :],
    _GOOD, st.integers(0, 200), st.binary(max_size=2), st.integers(0, 2),
)  # fmt: skip
_LINE = st.one_of(_GOOD, _GOOD, _ODD, _SPOILT, st.binary(max_size=20))
_LINES = st.one_of(
    st.lists(
        st.fixed_dictionaries({"text": _TEXT.map("t".__add__)}, optional={"x": _ANY}).map(json.dumps).map(str.encode)
    ),
    st.lists(_LINE, max_size=8),
    # One odd line in a file that is good but for it.
    st.builds(lambda n, line: [b'{"text": "a"}'] * n + [line], st.integers(0, 2), st.one_of(_ODD, _ODD, _SPOILT)),
    st.builds(lambda line, times: [line] * times, _LINE, st.integers(15, 30)),
)
_FILE = st.one_of(
    st.builds(
        lambda lines, end, last: end.join(lines) + (end if last else b""),
        _LINES, st.sampled_from([b"\n", b"\n", b"\r\n"]), st.booleans(),
    ),
    st.binary(max_size=200),
)  # fmt: skip
_ENDS = [b"\r\n--=x--", b"\r\n--=x--\r\n", b"\r\n--=x\r\n", b"\n--=x--\n", b"", b"\r\n--=x-", b"\r\n--=x--\r\nrest"]
_BORDERS = st.lists(st.integers(0), max_size=8)


def cut(whole: bytes, borders: list[int]) -> list[bytes]:
    """`whole` in pieces, some of them empty."""
    at = sorted(border % (len(whole) + 1) for border in borders)
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


def validate(pieces: list[bytes], format: str | None = None) -> tuple[Any, ...]:
    """All that is said of a JSONL file."""
    lines: list[bytes] = []
    rows = RowWriter(format, lines.append)
    reader = LineReader(rows, _MOST_LINE)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.end_file()
        errors = rows.finish_rows()
    except TooManyBadRows:
        errors = rows.errors
        assert len(errors) == MOST_BAD_ROWS
    reported = [(error.field, error.code, error.message) for error in errors]
    if reported:
        return (reported,)
    return reported, rows.format, rows.count, list(rows.columns), repr(rows.preview), b"".join(lines)


def lines_of(whole: bytes) -> list[bytes]:
    """The lines of a file that has rows in all of them, without the marks at the start of files that were joined."""
    return [line for line in (line.removeprefix(BOM_UTF8) for line in whole.split(b"\n")) if line.strip()]


def canonical(whole: bytes) -> bytes:
    """What is kept of JSONL that can be trained on, when no row has to change but for numbers that JSON lacks."""
    parsed = [(line, *parse_with_gaps(line)) for line in lines_of(whole)]
    return b"".join(line_of(row) if has_gaps else line + b"\n" for line, row, has_gaps in parsed)


@given(whole=_FILE, borders=_BORDERS, format=st.sampled_from([None, None, *FORMATS]))
@example(whole=b"", borders=[], format=None)
@example(whole=b'\xef\xbb\xbf{"text": "a"}', borders=[1, 2], format=None)
@examples(75)
def test_any_file_is_taken_or_refused_with_a_line_and_a_known_reason(
    whole: bytes, borders: list[int], format: str | None
) -> None:
    errors, *accepted = validate([whole], format)
    assert validate(cut(whole, borders), format) == (errors, *accepted)
    assert validate([whole[at : at + 1] for at in range(len(whole))], format) == (errors, *accepted)
    lines = whole.count(b"\n") + 1
    for field, code, message in errors:
        assert code in _CODES, code
        assert (field == "") if code == "empty_file" else 1 <= int(field.removeprefix("line ")) <= lines
        assert len(message) <= 300 and not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", message)
    if errors:
        return
    assert validate([whole, b"\n \t\r\n\n"], format) == (errors, *accepted), "empty lines at the end are no rows"
    detected_format, rows, columns, preview, stored = accepted
    assert stored == canonical(whole) or detected_format == "preference"
    # A file of a trainer is read in lines that end with a line feed, and only there.
    stored_rows = [json.loads(line, parse_constant=lambda _: None) for line in lines_of(whole)]
    assert len(stored_rows) == rows >= 1 and detected_format in FORMATS
    assert [parse_with_gaps(line)[0] for line in lines_of(whole)] == stored_rows
    assert list(dict.fromkeys(key for row in stored_rows for key in row)) == columns
    for row in stored_rows:
        assert isinstance(row, dict)
        text = json.dumps(row, allow_nan=False, ensure_ascii=False)
        assert "\0" not in text and "\\u0000" not in text.replace("\\\\", "")
        text.encode()
        texts = {"text": ["text"], "prompt_completion": ["prompt", "completion"]}.get(detected_format, [])
        assert all(isinstance(row[name], str) and row[name].strip() for name in texts)
        if detected_format == "chat":
            assert any(message["role"] == "assistant" for message in row["messages"])
    assert len(preview) < 3 * 40_000


@given(
    whole=_FILE,
    borders=_BORDERS,
    fields=st.lists(st.tuples(st.sampled_from(["name", "format", "format"]), st.one_of(
        st.sampled_from([name.encode() for name in FORMATS]), st.binary(max_size=8))), max_size=2),
    first=st.booleans(),
)  # fmt: skip
@example(whole=b'{"text": "a"}\n\xef\xbb\xbf\n', borders=[], fields=[], first=True)
@examples(20)
async def test_any_upload_is_kept_byte_for_byte_or_refused_the_same_however_it_arrives(
    tmp_path: Path, whole: bytes, borders: list[int], fields: list[tuple[str, bytes]], first: bool
) -> None:
    parts = [(f'name="{name}"', value) for name, value in fields]
    parts.insert(0 if first else len(parts), ('name="file"; filename="d.jsonl"', whole))
    sent = b"".join(
        b"--=x\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    sent += b"--=x--\r\n"
    reported = await upload(tmp_path, [sent])
    assert await upload(tmp_path, cut(sent, borders)) == reported
    assert await upload(tmp_path, [sent[at : at + 1] for at in range(len(sent))]) == reported
    if b"\r\n--=x" in whole:
        return
    if isinstance(reported, ImportedFile):
        stored = canonical(whole)
        assert (tmp_path / "data").read_bytes() == stored
        assert (reported.bytes, reported.sha256) == (len(stored), hashlib.sha256(stored).hexdigest())
        assert reported.rows == len(lines_of(whole))
    elif not fields:
        errors, *_ = validate([whole])
        assert [error[:2] for error in reported[1]] == [("file", "empty_file")] if not errors[0][0] else errors


@given(
    body=st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda head, value, end: b"--=x\r\n" + head + b"\r\n\r\n" + value + end,
            st.one_of(
                st.binary(max_size=40),
                st.binary(max_size=20).map(b'Content-Disposition: form-data; name="file"; filename='.__add__),
                st.binary(max_size=20).map(b"Content-Disposition: form-data; name=".__add__),
                st.binary(max_size=20).map(b"Content-Disposition: ".__add__),
                st.sampled_from(
                    [b'Content-Disposition: form-data; name="file"', b"Content-Disposition", b": x", b"a: b\r\n c: d"]
                ),
            ),
            st.binary(max_size=40),
            st.sampled_from(_ENDS),
        ),
    ),
    borders=_BORDERS,
)  # fmt: skip
@examples(30)
async def test_any_body_at_all_is_taken_or_refused(tmp_path: Path, body: bytes, borders: list[int]) -> None:
    reported = await upload(tmp_path, [body])
    again = await upload(tmp_path, cut(body, borders))
    # What a broken frame is told about depends on where the parser was.
    assert type(reported) is type(again)
    assert isinstance(reported, ImportedFile) or reported[0] in (413, 422)


_HEADER = st.text(st.characters(max_codepoint=255), max_size=20)  # as a server decodes headers


@given(content_type=st.one_of(_HEADER, _HEADER.map("multipart/form-data; boundary=".__add__)))
@examples(25)
async def test_any_content_type_is_taken_or_refused(tmp_path: Path, content_type: str) -> None:
    reported = await upload(tmp_path, [b"--x\r\n"], content_type)
    assert reported[0] in (415, 422)


async def test_the_row_of_a_refused_upload_is_released_at_once(tmp_path: Path) -> None:
    columns = b",".join(b"c%d" % number for number in range(700_000)) + b"\n"
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="x.csv"\r\n\r\n'

    async def pieces() -> AsyncIterator[bytes]:
        yield head + columns + b"\r\n--x--\r\n"

    with pytest.raises(ApiError) as refused:
        settings = Settings(home=tmp_path)
        await receive_upload("multipart/form-data; boundary=x", pieces(), tmp_path, settings, no_tokenizer)
    frames = [frame for frame, _ in traceback.walk_tb(refused.tb)]
    assert {frame.f_code.co_name for frame in frames} >= {"receive_upload", "end_body"}
    assert not {"_take_record", "_end_record"} & {frame.f_code.co_name for frame in frames}
    assert refused.value.__context__ is None


def no_tokenizer(name: str) -> TokenCounter:
    raise ApiError(422, "model_not_found", name)


async def upload(folder: Path, pieces: list[bytes], content_type: str = "multipart/form-data; boundary==x") -> Any:
    """What comes of these pieces: what was received, or status and errors."""
    settings = Settings(home=folder, max_line_bytes=_MOST_LINE, max_upload_bytes=100_000)

    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    try:
        return await receive_upload(content_type, chunks(), folder, settings, no_tokenizer)
    except ApiError as error:
        errors = error.errors or []
        return error.status, [(one.field, one.code, one.message) for one in errors]


async def test_a_long_file_of_no_use_is_refused_long_before_its_end(tmp_path: Path) -> None:
    """A field behind it may be what it lacks, but no more than a few megabytes are skipped to look for one."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="d.jsonl"\r\n\r\n'
        while True:
            piece = b'{"question": "q"}\n' * 4096
            sent += len(piece)
            yield piece

    with pytest.raises(ApiError) as refused:
        await receive_upload(
            "multipart/form-data; boundary=x", endless(), tmp_path, Settings(home=tmp_path), no_tokenizer
        )
    assert refused.value.code == "bad_rows" and sent < 12 * 1024 * 1024


@pytest.mark.parametrize("row", [b"x" * 100, b'{"text": "' + b"a" * 60 + b'"}\n', b"\n", b'{"text": "a", "k%d": 1}\n'])
def test_a_file_of_any_size_costs_bounded_memory(row: bytes) -> None:
    reader = LineReader(RowWriter(None, len), 64 * 1024)
    chunks = [b"".join(row.replace(b"%d", b"%d" % (n * 50 + k)) for k in range(50)) for n in range(60)]
    reader.feed(chunks[0])
    tracemalloc.start()
    try:
        for _ in range(5):
            for chunk in chunks:
                reader.feed(chunk)
    except TooManyBadRows:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024 * 1024


def test_a_key_that_is_there_twice_is_found_in_a_row_of_a_hundred_thousand() -> None:
    raw = b'{"text": "a", ' + b", ".join(b'"%d": 1' % n for n in range(100_000)) + b', "99999": 2}\n'
    rows = RowWriter("text", len)
    reader = LineReader(rows, 16 * 1024**2)
    began = time.process_time()
    reader.feed(raw)
    assert [error.code for error in rows.finish_rows()] == ["duplicate_key"]
    assert time.process_time() - began < 5
