"""Folders of any depth are removed and listed, and one thing that stays keeps nothing else from going."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.infra.files.tree import files_below, remove_tree

_DEPTH = 3000


def nest(top: Path, depth: int) -> None:
    """Make folders in each other, deeper than a path may be long, with a file in each."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        os.close(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    nest(tmp_path / "deep", _DEPTH)
    remove_tree(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_cannot_be_moved_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top" / "a" / "read-only").mkdir(parents=True)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")  # as for a folder without write permission, except for root

    monkeypatch.setattr(os, "rename", refuse)
    remove_tree(tmp_path / "top")
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "kept" / "file"
    target.parent.mkdir()
    target.touch()
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    for link in (tmp_path / "top" / "link", tmp_path / "top" / "a" / "b" / "link"):
        link.symlink_to(target.parent)
    os.mkfifo(tmp_path / "top" / "a" / "pipe")
    remove_tree(tmp_path / "top")
    assert target.exists() and not (tmp_path / "top").exists()
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        (tmp_path / "link").symlink_to(target.parent)
        remove_tree(tmp_path / "link")
    assert target.exists()


def test_unremovable_entry_raises_after_all_others_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "stays", "z"):
        (tmp_path / "top" / name).mkdir(parents=True)
    rmdir = os.rmdir

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == "stays":
            raise PermissionError(13, "Permission denied")
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        remove_tree(tmp_path / "top")
    assert [path.name for path in (tmp_path / "top").iterdir()] == ["stays"]
    remove_tree(tmp_path / "top", ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "nothing")


def test_files_are_listed_without_recursion_and_as_far_as_paths_reach(tmp_path: Path) -> None:
    nest(tmp_path / "deep", _DEPTH)
    (tmp_path / "deep" / "link").symlink_to(tmp_path)
    assert 1500 < len(list(files_below(tmp_path))) <= _DEPTH
    assert list(files_below(tmp_path / "nothing")) == []
    remove_tree(tmp_path / "deep")
