"""Log files of child processes: important lines come through, files stay small."""

from pathlib import Path

import pytest

from app.standalone.child_log import ChildLog
from tests.small_disk import small_disk


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "api.log"


def test_the_logs_of_the_last_five_starts_are_kept_beside_the_new_one(path: Path) -> None:
    for start in range(1, 8):
        path.write_text(f"start {start}\n")
        ChildLog(path)
        ChildLog(path)  # a start without a line keeps nothing
        assert not path.exists()
    earlier_logs = {number: path.with_name(f"api.log.{number}").read_text() for number in range(1, 6)}
    assert earlier_logs == {number: f"start {8 - number}\n" for number in range(1, 6)}
    assert len(list(path.parent.iterdir())) == 5


def test_lines_that_speak_of_an_error_are_shown_once_and_others_never(path: Path) -> None:
    log = ChildLog(path)
    assert list(log.important_lines()) == []
    append(path, "INFO all is well\nERROR no disk\nhalf an ERR")
    assert list(log.important_lines()) == ["ERROR no disk"]
    append(path, "OR line\n")
    assert list(log.important_lines()) == ["half an ERROR line"]
    assert list(log.important_lines()) == []


def test_json_log_record_is_shown_as_level_logger_and_message(path: Path) -> None:
    log = ChildLog(path)
    append(path, '{"timestamp": "t", "level": "info", "logger": "a", "event": "fine"}\n')
    append(path, '{"timestamp": "t", "level": "error", "logger": "app.x", "event": "no disk", "run_id": "run_1"}\n')
    append(path, '{"level": "error", "torn\n')
    assert list(log.important_lines()) == ["ERROR app.x: no disk", '{"level": "error", "torn']


def test_a_flood_is_cut_to_a_handful(path: Path) -> None:
    log = ChildLog(path)
    append(path, "ERROR again\n" * 1000)
    assert len(list(log.important_lines())) == 5


def test_a_file_that_grew_large_is_cut_and_a_writer_that_appends_goes_on(path: Path) -> None:
    log = ChildLog(path)
    with path.open("a") as writer:
        for _ in range(12):
            writer.write("x" * (1024**2 - 1) + "\n")
            writer.flush()
            list(log.important_lines())
        writer.write("ERROR after the cut\n")
        writer.flush()
        assert list(log.important_lines()) == ["ERROR after the cut"]
    assert path.stat().st_size < 3 * 1024**2
    assert path.with_name("api.log.1").stat().st_size > 10 * 1024**2


@pytest.mark.needs("small disk")
def test_a_file_that_grew_large_on_a_full_disk_is_cut_without_a_copy(tmp_path: Path) -> None:
    with small_disk(tmp_path / "logs", 12 * 1024**2) as disk:
        path = disk / "api.log"
        log = ChildLog(path)
        append(path, "x" * (11 * 1024**2) + "\n")
        for _ in range(12):
            list(log.important_lines())
        assert path.stat().st_size == 0 and not path.with_name("api.log.1").exists()
