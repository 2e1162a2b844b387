"""Promises about files: where they lie, and that nothing leads out of there."""

from pathlib import Path

import pytest

from app.config import Settings
from app.infra.files.untrusted_folder import OutsideStorage, open_below, refuse_outside
from app.infra.ids import new_id
from app.infra.storage import Storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(Settings(home=tmp_path / "home", storage=tmp_path / "storage"))


def test_every_file_of_a_run_lies_below_its_folder(storage: Storage) -> None:
    run = new_id("run")
    assert storage.run_dir(run) == storage.root / "runs" / run
    assert storage.attempt_dir(run, 2) == storage.run_dir(run) / "a2"
    assert storage.checkpoint_dir(run, 2, 40) == storage.attempt_dir(run, 2) / "checkpoint-40"
    assert storage.output_dir(run, 2) == storage.attempt_dir(run, 2) / "output"
    assert storage.journal_path(run) == storage.run_dir(run) / "journal.jsonl"


@pytest.mark.parametrize("id", ["", "..", "run_", "run_../../x", "/etc", "run_" + "A" * 26, "run_" + "0" * 25 + "\n"])
def test_only_an_id_leads_to_a_folder(storage: Storage, id: str) -> None:
    with pytest.raises(OutsideStorage):
        storage.run_dir(id)
    with pytest.raises(OutsideStorage):
        storage.dataset_file(id, "jsonl")


def test_staging_leaves_nothing_but_what_was_promoted(storage: Storage) -> None:
    target = storage.dataset_file(new_id("ds"), "jsonl")
    with storage.staging_folder() as folder:
        (folder / "data").write_bytes(b"kept")
        (folder / "rest").write_bytes(b"gone")
        storage.promote_staged(folder / "data", target)
    assert target.read_bytes() == b"kept"
    assert [path for path in storage.root.rglob("*") if path.is_file()] == [target]
    assert not folder.exists()


def test_staging_is_gone_after_a_failure(storage: Storage) -> None:
    with pytest.raises(RuntimeError), storage.staging_folder() as folder:
        (folder / "data").write_bytes(b"x")
        raise RuntimeError
    assert not folder.exists()


def test_two_stagings_never_meet(storage: Storage) -> None:
    with storage.staging_folder() as first, storage.staging_folder() as second:
        assert first != second


def test_removing_what_is_not_there_is_fine(storage: Storage) -> None:
    storage.remove_dataset(new_id("ds"))


@pytest.mark.parametrize("path", ["a", "a/b", "a b/ü.txt", ".hidden", "a..b", "..."])
def test_a_path_below_is_accepted(path: str) -> None:
    refuse_outside(path)


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../x", "a/../b", "a/..", "/etc/passwd", "//x", "a//b", "a/", "a\0b", "a\\..\\b", "./a", "a/./b"],
)
def test_every_other_path_is_refused(path: str) -> None:
    with pytest.raises(OutsideStorage):
        refuse_outside(path)


def test_a_link_is_refused_wherever_it_leads(storage: Storage, tmp_path: Path) -> None:
    storage.root.mkdir()
    (tmp_path / "secret").write_text("x")
    (storage.root / "inside").write_text("x")
    (storage.root / "file").symlink_to(tmp_path / "secret")
    (storage.root / "folder").symlink_to(tmp_path)
    (storage.root / "near").symlink_to(storage.root / "inside")
    (storage.root / "dangling").symlink_to(tmp_path / "nothing")
    for path in ("file", "folder", "folder/secret", "near", "dangling"):
        with pytest.raises((OutsideStorage, NotADirectoryError)):
            open_below(storage.root, path)
