"""Promises about the complete log: every line, in order, readable after a kill, within the disk's reserve."""

import gzip
import os
import resource
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from worker.ingest.log_file import LogFile

NOON = 1_767_268_800.5
HEAD = "2026-01-01T12:00:00.500Z stdout info "


def line(text: str, **values: str) -> dict[str, Any]:
    return {"line": text, "stream": "stdout", "level": "info", **values}


def written(path: Path) -> list[str]:
    """Lines of a file, as far as they were written."""
    return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(path.read_bytes()).decode().splitlines()


class Log:
    """Complete log in a folder, and what it has reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.reports: list[str] = []
        self.file = LogFile(folder, "log", options.pop("reserve", 0), self.reports.append, **options)

    def say(self, *texts: str) -> None:
        for text in texts:
            self.file.add_line(line(text), NOON)
        self.file.flush()


def test_every_line_has_time_stream_and_level_and_the_file_is_plain_gzip(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.say("one", "two ä")
    log.file.add_line(line("a\nb", stream="anneal", level="warning"), NOON)
    log.file.close()
    log.say("too late")
    assert gzip.decompress((tmp_path / "log.txt.gz").read_bytes()).decode().splitlines() == [
        f"{HEAD}one", f"{HEAD}two ä", "2026-01-01T12:00:00.500Z anneal warning a",
        "2026-01-01T12:00:00.500Z anneal warning b",
    ]  # fmt: skip
    assert not log.reports and log.file.is_complete


def test_lines_are_readable_while_it_grows_and_after_a_kill(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(100):
        log.say(f"line {number}")
        assert written(tmp_path / "log.txt.gz")[-1] == f"{HEAD}line {number}"
    assert len(written(tmp_path / "log.txt.gz")) == 100


def test_text_beyond_the_size_replaces_the_oldest_and_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path, text_bytes=10_000)
    for number in range(1000):
        log.say(f"line {number}")
    log.file.close()
    older, newer = (gzip.decompress((tmp_path / name).read_bytes()) for name in ("log.1.txt.gz", "log.txt.gz"))
    assert 10_000 < len(older + newer) <= 20_000
    numbers = [int(text.split()[-1]) for text in (older + newer).decode().splitlines()]
    assert numbers == list(range(numbers[0], 1000)) and numbers[0] > 0
    (report,) = log.reports
    assert "its oldest lines are removed" in report


def test_the_reserve_of_the_disk_is_not_touched_and_the_gap_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.ingest.log_file._RETRY_SECONDS", 0.0)
    log = Log(tmp_path, reserve=2**60)
    log.say("one", "two")
    log.say("three")
    (report,) = log.reports
    assert "ANNEAL_DISK_RESERVE_BYTES" in report and not log.file.is_complete
    assert not (tmp_path / "log.txt.gz").exists()
    log.file._reserve = 0
    log.say("four")
    first, second = written(tmp_path / "log.txt.gz")
    assert first.endswith("anneal warning 3 lines are missing here: they could not be written")
    assert second == f"{HEAD}four"


def test_a_line_that_is_half_written_on_a_full_disk_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.ingest.log_file._RETRY_SECONDS", 0.0)
    log = Log(tmp_path)
    log.say("before")
    with _largest_file((tmp_path / "log.txt.gz").stat().st_size + 100):
        log.say(os.urandom(2000).hex())
    log.say("after")
    log.file.close()
    texts = gzip.decompress((tmp_path / "log.txt.gz").read_bytes()).decode().splitlines()
    assert [text.split(" ", 3)[-1] for text in texts] == [
        "before", "1 lines are missing here: they could not be written", "after",
    ]  # fmt: skip
    assert len(log.reports) == 1


@pytest.mark.parametrize("is_link", [True, False])
def test_no_file_is_written_but_a_new_one_in_its_own_folder(tmp_path: Path, is_link: bool) -> None:
    """The folder belongs to the user that trains, who may expect a file of another user to be overwritten."""
    folder, target = tmp_path / "a1", tmp_path / "target"
    folder.mkdir()
    target.write_text("untouched")
    if is_link:
        (folder / "log.txt.gz").symlink_to(target)
    else:
        os.link(target, folder / "log.txt.gz")
    log = Log(folder)
    log.say("one")
    assert target.read_text() == "untouched" and len(log.reports) == 1


def test_a_missing_folder_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "missing")
    for _ in range(3):
        log.say("one")
    log.file.close()
    assert len(log.reports) == 1 and "No such file" in log.reports[0]


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Let files of this process grow to `size` bytes at most: a write beyond it is cut, and the next one fails."""
    before, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, action)
