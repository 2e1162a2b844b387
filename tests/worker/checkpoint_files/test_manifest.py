"""A checkpoint is whole or refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from worker.checkpoint_files.manifest import MANIFEST, commit, size_of, verify, write_manifest


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
    assert size_of(folder) > 2560


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
