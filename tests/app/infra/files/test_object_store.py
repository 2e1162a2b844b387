"""Files below a URL: no key leads out of it, and a file is there completely or not at all."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import Settings
from app.infra.files.object_store import (
    INSTALLATION_MARK,
    MARK,
    SMALL_PART_BYTES,
    ObjectMissing,
    ObjectStore,
    StoreUnavailable,
    WrongStore,
)
from app.infra.files.untrusted_folder import OutsideStorage
from app.infra.storage import Storage
from tests.object_store import s3

__all__ = ["s3"]


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.full)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        return ObjectStore(f"{request.getfixturevalue('s3')}/{time.monotonic_ns()}", "ANNEAL_STORAGE")
    if request.param == "memory":
        return ObjectStore(f"memory://{time.monotonic_ns()}/prefix", "ANNEAL_STORAGE")
    return shared(tmp_path / "share")


def shared(folder: Path) -> ObjectStore:
    folder.mkdir()
    (folder / MARK).touch()
    return ObjectStore(f"file://{folder}", "ANNEAL_STORAGE")


class TestAStore:
    def test_store_returns_what_was_put_whole_or_from_an_offset(self, store: ObjectStore) -> None:
        store.put("datasets/ds_1/data.jsonl", iter([b"one\n", b"two\n"]))
        assert store.read("datasets/ds_1/data.jsonl", 8) == b"one\ntwo\n"
        with store.open("datasets/ds_1/data.jsonl") as file:
            assert (file.size, file.seek(0, os.SEEK_END), file.seek(4)) == (8, 8, 4)
            assert (file.readline(), file.tell(), file.read(10)) == (b"two\n", 8, b"")
        with pytest.raises(OutsideStorage, match="larger"):
            store.read("datasets/ds_1/data.jsonl", 7)
        with pytest.raises(ObjectMissing):
            store.open("datasets/ds_2/data.jsonl")

    def test_lists_moves_and_removes_below_a_key(self, store: ObjectStore) -> None:
        before = time.time() - 5
        for key in ("datasets/ds_1/data.jsonl", "datasets/ds_10/data.jsonl"):
            store.put(key, iter([b"x"]))
        assert sorted(one.key for one in store.list("datasets")) == [
            "datasets/ds_1/data.jsonl", "datasets/ds_10/data.jsonl",
        ]  # fmt: skip
        assert all(one.bytes == 1 and before < one.modified < time.time() + 5 for one in store.list("datasets"))
        store.move("datasets/ds_1", "aside/ds_1-a")
        assert [one.key for one in store.list("datasets")] == ["datasets/ds_10/data.jsonl"]
        assert [one.key for one in store.list("aside")] == ["aside/ds_1-a/data.jsonl"]
        store.remove("datasets/ds_10")
        store.remove("datasets/ds_10")
        assert store.list("datasets") == []

    def test_store_uploads_a_large_file_in_parts(self, store: ObjectStore) -> None:
        pieces = [os.urandom(2**20) for _ in range(20)]
        store.put("large", iter(pieces), part_bytes=SMALL_PART_BYTES)
        with store.open("large") as file:
            assert file.size == 20 * 2**20 and file.seek(17 * 2**20) and file.read(2**20) == pieces[17]
        assert b"".join(store.get("large", file.size)) == b"".join(pieces)

    def test_store_is_claimed_by_one_installation(self, store: ObjectStore) -> None:
        with pytest.raises(WrongStore, match="has no file") as refused:
            store.claim_for("ins_1", lambda: False)
        assert not refused.value.is_marked
        store.claim_for("ins_1", lambda: True)
        store.claim_for("ins_1", lambda: False)
        with pytest.raises(WrongStore, match="belongs to another installation") as refused:
            store.claim_for("ins_2", lambda: True)
        assert refused.value.is_marked
        with pytest.raises(WrongStore):
            store.check_owner(None)
        store.put(INSTALLATION_MARK, iter([b"x" * 1000]))
        with pytest.raises(WrongStore):
            store.check_owner("ins_1")

    def test_store_keeps_nothing_of_a_failed_upload(self, store: ObjectStore) -> None:
        def pieces() -> object:
            yield b"half"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.put("datasets/ds_1/data.jsonl", pieces())  # type: ignore[arg-type]
        # The store in memory has no files that appear when they are complete.
        assert "memory" in store.url or store.list("datasets") == []

    @given(st.text(alphabet=st.sampled_from("ab./\\\0~% \u202e"), max_size=12))
    def test_reaches_nothing_outside_its_url(self, key: str) -> None:
        store = ObjectStore("memory://bucket/prefix", "ANNEAL_STORAGE")
        try:
            place = store.path_of(key)
        except OutsideStorage:
            return
        assert os.path.normpath(place) == place and place.startswith("/bucket/prefix/")


def test_a_key_that_s3fs_would_cut_is_refused() -> None:
    with pytest.raises(OutsideStorage, match="versionId"):
        ObjectStore("memory://bucket", "ANNEAL_STORAGE").path_of("a?versionId=1")


def test_a_share_that_is_not_mounted_takes_nothing(tmp_path: Path) -> None:
    store = shared(tmp_path / "share")
    (tmp_path / "share" / MARK).unlink()
    with pytest.raises(StoreUnavailable, match="mount the share"):
        store.put("a", iter([b"x"]))
    assert list((tmp_path / "share").iterdir()) == []
    store.mark_root()
    store.put("a", iter([b"x"]))
    (tmp_path / "share").rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable, match="mount it"):
        store.put("a", iter([b"x"]))
    assert not (tmp_path / "share").exists()


class TestTheSettings:
    def test_a_url_has_a_working_copy_below_home(self, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, storage="s3://bucket/prefix")
        assert (settings.storage_url, settings.storage_root) == ("s3://bucket/prefix", tmp_path / "cache")
        assert Settings(home=tmp_path, storage="s3://b", cache=tmp_path / "fast").storage_root == tmp_path / "fast"
        assert settings.child_environment()["ANNEAL_STORAGE"] == "s3://bucket/prefix"

    def test_a_folder_has_none(self, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, storage=tmp_path / "shared")
        assert (settings.storage_url, settings.storage_root) == (None, tmp_path / "shared")
        assert Storage.shared(settings).objects is None

    @pytest.mark.parametrize("url", ["s3://key:secret@bucket", "s3://bucket?token=x", "s3://", "s3://a b"])
    def test_a_url_with_credentials_or_options_is_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match="without user, password and options"):
            Settings(storage=url)

    @pytest.mark.parametrize("name", ["ANNEAL_CHECKPOINT_URL", "anneal_checkpoint_url"])
    def test_the_removed_second_store_is_refused_if_it_is_set(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, "")
        assert Settings().storage_url is None
        monkeypatch.setenv(name, "s3://bucket/secret-prefix")
        with pytest.raises(ValueError, match=r"ANNEAL_CHECKPOINT_URL was removed: .*ANNEAL_STORAGE") as refused:
            Settings()
        assert "secret-prefix" not in str(refused.value)

    def test_no_training_process_gets_the_url_or_its_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "ANNEAL_STORAGE"):
            monkeypatch.setenv(name, "s3://credential")
        settings = Settings()
        assert settings.storage_url == "s3://credential"
        assert "s3://credential" not in settings.trainer_environment().values()
