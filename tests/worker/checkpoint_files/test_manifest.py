"""A checkpoint is whole or refused."""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.infra.files.file_manifest import MANIFEST
from worker.checkpoint_files.manifest import commit, verify, write_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, str]:
    staging = tmp_path / ".tmp"
    (staging / "sub").mkdir(parents=True)
    (staging / "weights").write_bytes(bytes(range(256)) * 10)
    (staging / "sub" / "state").write_text("{}")
    (staging / "weights").chmod(0o600)
    digest = write_manifest(staging, 7, {"attempt": 1})
    commit(staging, tmp_path / "checkpoint-7")
    return tmp_path / "checkpoint-7", digest


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def test_a_whole_checkpoint_passes_and_can_be_read_by_others(checkpoint: tuple[Path, str]) -> None:
    folder, digest = checkpoint
    assert verify(folder, digest) == []
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: flip(folder / "weights"), "other contents"),
        (lambda folder: flip(folder / "sub" / "state"), "other contents"),
        (lambda folder: (folder / "weights").write_bytes(b"\0" * 100), "100 bytes"),
        (lambda folder: (folder / "weights").unlink(), "missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: flip(folder / MANIFEST), "not the one"),
        (lambda folder: (folder / MANIFEST).write_text(""), "not the one"),
        (lambda folder: (folder / "extra.bin").write_bytes(b"x"), "not part"),
    ],
)
def test_any_damage_is_found_and_named(
    damage: Callable[[Path], object], word: str, checkpoint: tuple[Path, str]
) -> None:
    folder, digest = checkpoint
    damage(folder)
    (problem,) = verify(folder, digest)
    assert word in problem


@pytest.mark.parametrize("name", [MANIFEST, "weights"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "endless", "link", "link to a folder"])
def test_special_files_in_a_checkpoint_are_refused_at_once(
    kind: str, name: str, checkpoint: tuple[Path, str], tmp_path: Path
) -> None:
    folder, digest = checkpoint
    place = folder / name
    place.rename(tmp_path / "moved")
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(place))
        case "folder":
            place.mkdir()
        case "endless":
            place.touch()
            os.truncate(place, 2**40)
        case "link":
            place.symlink_to(tmp_path / "moved")
        case "link to a folder":
            (tmp_path / "outside").mkdir()
            folder.rename(tmp_path / "outside" / "real")
            folder.symlink_to(tmp_path / "outside" / "real")
    (problem,) = verify(folder, digest)
    assert name in problem or kind == "link to a folder"


def test_the_supervisor_looks_at_no_more_than_it_needs(checkpoint: tuple[Path, str]) -> None:
    folder, digest = checkpoint
    for number in range(300):
        (folder / f"{number}\x1b[2J\udc80").touch()
    problems = verify(folder, digest)
    assert len(problems) < 20 and all(problem.isprintable() for problem in problems)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"files": 3}', '{"files": {"a": {}}}', "[" * 100_000, '{"files": {"a": {"bytes": Infinity}}}',
             '{"files": {"../a": {"bytes": 1, "sha256": ""}}}'],
)  # fmt: skip
def test_a_manifest_that_says_nothing_is_a_problem_not_a_crash(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    (problem,) = verify(tmp_path, hashlib.sha256(text.encode()).hexdigest())
    assert "does not describe" in problem


def test_a_folder_that_is_not_there_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    assert verify(tmp_path / "nowhere", "0" * 64) != []


def test_a_second_commit_replaces_the_first_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        staging = tmp_path / ".tmp"
        staging.mkdir()
        (staging / "a").write_text(content)
        commit(staging, tmp_path / "output")
    assert (tmp_path / "output" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_the_supervisor_can_check_without_torch() -> None:
    program = "import sys, worker.checkpoint_files.manifest, worker.training.failures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
