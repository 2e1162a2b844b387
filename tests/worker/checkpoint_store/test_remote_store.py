"""Whole folders arrive in an object store or none, also of a hostile trainer; its errors become sentences of ours."""

import hashlib
import json
import logging
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from app.infra.files import file_manifest, object_store
from app.infra.files.object_store import MARK, StoreUnavailable, describe_store_error
from app.infra.ids import new_id
from app.infra.storage import Storage
from tests.object_store import s3
from worker.checkpoint_files import manifest
from worker.checkpoint_store import remote_store
from worker.checkpoint_store.remote_store import (
    CorruptInStore,
    LocalCheckpointCorrupt,
    LocalCheckpointMissing,
    MissingInStore,
    RemoteStore,
)

__all__ = ["s3"]

SECRET = 'connection to server at "10.1.2.3" failed for user "anneal" key AKIA123'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / MARK).touch()
    return tmp_path / "shared"


@pytest.fixture
def share(root: Path, settings: Settings) -> RemoteStore:
    return RemoteStore(f"file://{root}", Storage(settings))


def files_below(folder: Path) -> list[str]:
    """All but the mark of the store."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MARK)


class TestAStore:
    @pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.full)])
    def remote(self, request: pytest.FixtureRequest, settings: Settings, root: Path) -> RemoteStore:
        if request.param == "s3":
            return RemoteStore(request.getfixturevalue("s3"), Storage(settings))
        return RemoteStore(
            f"file://{root}" if request.param == "file" else f"memory://{new_id('run')}", Storage(settings)
        )

    def test_gives_back_every_byte_and_forgets_what_is_removed(self, remote: RemoteStore, settings: Settings) -> None:
        folder, digest = whole(settings)
        written = {name: (folder / name).read_bytes() for name in files_below(folder)}
        assert "deeper/weights" in written
        remote.send_checkpoint(folder, digest, lambda: None)
        folder.rename(folder.with_name("elsewhere"))
        remote.fetch_checkpoint(folder, digest, "wrk_test", lambda: None)
        assert {name: (folder / name).read_bytes() for name in files_below(folder)} == written
        assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint-5", "elsewhere"]
        remote.remove_folder(folder)
        with pytest.raises(MissingInStore):
            remote.fetch_checkpoint(folder, digest, "wrk_test", lambda: None)
        remote.remove_folder(folder)

    def test_a_kill_between_any_two_files_leaves_nothing_that_is_taken_for_a_copy(
        self, remote: RemoteStore, settings: Settings
    ) -> None:
        folder, digest = whole(settings)
        pieces: list[int] = []
        remote.send_checkpoint(folder, digest, lambda: pieces.append(1))
        remote.remove_folder(folder)
        for last in range(len(pieces)):
            with pytest.raises(KeyboardInterrupt):
                remote.send_checkpoint(folder, digest, killed_after(last))
            with pytest.raises(MissingInStore):
                remote.fetch_checkpoint(folder, digest, "wrk_test", lambda: None)
            assert manifest.verify(folder, digest) == [], "what is here stays as it is"


def whole(settings: Settings) -> tuple[Path, str]:
    """A checkpoint of several files; answers its folder and the hash of its manifest."""
    folder = Storage(settings).checkpoint_dir(new_id("run"), 1, 5)
    staging = folder.with_name(".staging")
    (staging / "deeper").mkdir(parents=True)
    (staging / "deeper" / "weights").write_bytes(os.urandom(9 * 2**20))
    (staging / "empty").touch()
    (staging / "state.json").write_text("{}")
    digest = manifest.write_manifest(staging, 5, {})
    manifest.commit(staging, folder)
    return folder, digest


def killed_after(pieces: int) -> Callable[[], None]:
    left = [pieces]

    def on_piece() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return on_piece


class TestWhatATrainerMayWrite:
    """Its folder is its own: the worker, which sends what is there, is not to be led elsewhere by it."""

    def test_no_link_and_no_damage_is_sent(self, settings: Settings, share: RemoteStore) -> None:
        folder, digest = whole(settings)
        (folder / "state.json").unlink()
        (folder / "state.json").symlink_to("/etc/passwd")
        with pytest.raises(LocalCheckpointCorrupt):
            share.send_checkpoint(folder, digest, lambda: None)
        folder, digest = whole(settings)
        (folder / "state.json").write_text("[]")
        with pytest.raises(LocalCheckpointCorrupt, match="other contents"):
            share.send_checkpoint(folder, digest, lambda: None)

    @pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../../outside"])
    def test_no_name_in_a_manifest_leaves_the_folder(
        self, name: str, settings: Settings, share: RemoteStore, root: Path
    ) -> None:
        folder, _ = whole(settings)
        listed = {"format": 1, "step": 5, "files": {name: {"bytes": 1, "sha256": "0" * 64}}}
        said = json.dumps(listed).encode()
        (folder / file_manifest.MANIFEST).write_bytes(said)
        digest = hashlib.sha256(said).hexdigest()
        with pytest.raises(LocalCheckpointCorrupt):
            share.send_checkpoint(folder, digest, lambda: None)
        place = root / Storage(settings).key_of(folder)
        place.mkdir(parents=True)
        (place / file_manifest.MANIFEST).write_bytes(said)
        with pytest.raises(CorruptInStore):
            share.fetch_checkpoint(folder, digest, "wrk_test", lambda: None)
        assert files_below(root) == [f"{place.relative_to(root)}/{file_manifest.MANIFEST}"]

    def test_no_link_in_its_folder_leads_the_worker_elsewhere(
        self, settings: Settings, share: RemoteStore, tmp_path: Path
    ) -> None:
        """The trainer's user owns the folder around the checkpoint, and replaces what is there while it is fetched."""
        folder, digest = whole(settings)
        share.send_checkpoint(folder, digest, lambda: None)
        user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        os.chown(folder.parent, user.pw_uid, user.pw_gid)
        outside = tmp_path / "outside"
        outside.mkdir()
        outside.chmod(0o777)
        swapped = []
        attempt = os.open(folder.parent, os.O_RDONLY)

        def attack() -> None:
            """Only what that user may do: it renames what it finds and leaves links in its place."""
            uid = os.geteuid()
            os.seteuid(user.pw_uid)
            try:
                for name in {*os.listdir(attempt), folder.name}:  # noqa: PTH208
                    if not name.startswith("moved"):
                        with suppress(FileNotFoundError):
                            os.rename(name, f"moved-{len(swapped)}", src_dir_fd=attempt, dst_dir_fd=attempt)
                        os.symlink(outside, name, dir_fd=attempt)
                        swapped.append(name)
            finally:
                os.seteuid(uid)

        try:
            attack()
            share.fetch_checkpoint(folder, digest, "wrk_test", attack)
        finally:
            os.close(attempt)
        assert swapped and list(outside.iterdir()) == []
        assert not folder.is_symlink() and manifest.verify(folder, digest) == []
        assert sorted(path.name for path in folder.parent.parent.iterdir()) == ["a1"], "nothing half fetched is left"

    def test_a_manifest_that_names_a_file_twice_is_of_a_corrupt_checkpoint(self, settings: Settings) -> None:
        folder, _ = whole(settings)
        said = json.dumps({"files": {file_manifest.MANIFEST: {"bytes": 9, "sha256": "0" * 64}}}).encode()
        remote = RemoteStore(f"memory://{new_id('run')}", Storage(settings))
        remote.objects.put(f"{Storage(settings).key_of(folder)}/{file_manifest.MANIFEST}", iter([said]))
        with pytest.raises(CorruptInStore, match="twice"):
            remote.fetch_checkpoint(folder, hashlib.sha256(said).hexdigest(), "wrk_test", lambda: None)


class TestWhatIsReported:
    @pytest.mark.parametrize(
        ("error", "clause"),
        [
            (PermissionError(13, SECRET), "it refuses this process"),
            (TimeoutError(SECRET), "it does not answer"),
            (ConnectionRefusedError(111, SECRET), "it does not answer"),
            (socket.gaierror(-2, SECRET), "it does not answer"),
            (FileNotFoundError(2, SECRET), "the location does not exist"),
            (OSError(28, SECRET), "it has no space left"),
            (OSError(5, SECRET), r"it answers with an error \(OSError\)"),
            (RuntimeError(SECRET), r"it answers with an error \(RuntimeError\)"),
        ],
    )
    def test_is_a_clause_of_our_own_and_the_workers_log_has_the_rest(
        self,
        error: Exception,
        clause: str,
        share: RemoteStore,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder, digest = whole(settings)

        def fails(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fails)
        with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable, match=clause) as reported:
            share.send_checkpoint(folder, digest, lambda: None)
        assert "10.1.2.3" not in str(reported.value) and "AKIA123" not in str(reported.value)
        assert "10.1.2.3" in caplog.text

    @pytest.mark.full
    def test_of_missing_credentials_names_them(self) -> None:
        from botocore.exceptions import EndpointConnectionError, NoCredentialsError

        assert "no credentials" in describe_store_error(NoCredentialsError())[0]
        assert describe_store_error(EndpointConnectionError(endpoint_url="http://10.1.2.3")) == (
            "it does not answer",
            True,
        )

    @pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.full)])
    def test_is_nothing_of_what_the_caller_raises(
        self, kind: str, share: RemoteStore, settings: Settings, request: pytest.FixtureRequest
    ) -> None:
        remote = share if kind == "file" else RemoteStore(request.getfixturevalue("s3"), Storage(settings))
        folder, digest = whole(settings)

        def on_piece() -> None:
            raise OSError(5, "the caller's own")

        with pytest.raises(OSError, match="the caller's own"):
            remote.send_checkpoint(folder, digest, on_piece)


class TestAFileOnItsWay:
    def test_does_not_arrive_at_a_share_when_its_sending_ends(
        self, share: RemoteStore, root: Path, settings: Settings
    ) -> None:
        folder, digest = whole(settings)
        with pytest.raises(KeyboardInterrupt):
            share.send_checkpoint(folder, digest, killed_after(1))
        assert files_below(root) == []

    @pytest.mark.full
    def test_does_not_arrive_at_an_object_store_either(self, settings: Settings, s3: str) -> None:
        import boto3

        folder, digest = whole(settings)
        remote = RemoteStore(s3, Storage(settings))
        remote.objects.files.default_block_size = 5 * 2**20  # so that it is sent in parts
        with pytest.raises(KeyboardInterrupt):
            remote.send_checkpoint(folder, digest, killed_after(2))
        client = boto3.client("s3")
        assert "Uploads" not in client.list_multipart_uploads(Bucket="checkpoints")
        there = client.list_objects_v2(Bucket="checkpoints", Prefix=f"of-anneal/{Storage(settings).key_of(folder)}")
        assert "Contents" not in there

    def test_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_next(
        self, share: RemoteStore, root: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, digest = whole(settings)
        done: list[str] = []
        fsync, replace = os.fsync, os.replace

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")

        def named(source: Path, target: Path) -> None:
            replace(source, target)
            done.append(f"name {Path(target).name}")

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", named)
        share.send_checkpoint(folder, digest, lambda: None)
        for name in ("weights", "manifest.json"):
            at = done.index(f"name {name}")
            assert done[at - 1].startswith(f"sync .{name}.")
            assert done[at + 1] == f"sync {'deeper' if name == 'weights' else 'checkpoint-5'}"
        assert done[-1] == f"sync {root.name}"

    def test_of_one_that_was_killed_goes_with_the_next_try(
        self, share: RemoteStore, root: Path, settings: Settings
    ) -> None:
        folder, digest = whole(settings)
        left = root / Storage(settings).key_of(folder) / ".state.json.0123.part"
        left.parent.mkdir(parents=True)
        left.touch()
        share.send_checkpoint(folder, digest, lambda: None)
        assert not left.exists()


class TestAShareThatIsNotMounted:
    def test_is_distinguished_from_one_that_is(self, share: RemoteStore, root: Path, settings: Settings) -> None:
        folder, digest = whole(settings)
        share.send_checkpoint(folder, digest, lambda: None)
        root.rename(root.with_name("away"))
        root.mkdir()  # the place below which it is mounted
        for use in (
            lambda: share.send_checkpoint(folder, digest, lambda: None),
            lambda: share.fetch_checkpoint(folder, digest, "wrk_test", lambda: None),
            lambda: share.remove_folder(folder),
        ):
            with pytest.raises(StoreUnavailable, match=f"no file {MARK}: mount"):
                use()
        assert list(root.iterdir()) == []

    def test_is_marked_before_the_first_copy_of_all(self, share: RemoteStore, root: Path) -> None:
        (root / MARK).unlink()
        share.objects.mark_root()
        assert (root / MARK).exists()
        root.rename(root.with_name("away"))
        with pytest.raises(StoreUnavailable, match="mount it"):
            share.objects.mark_root()
        assert not root.exists()


class TestWhatIsHere:
    def test_is_gone_or_different_or_cannot_be_read(
        self, share: RemoteStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, digest = whole(settings)
        (folder / "state.json").unlink()
        with pytest.raises(LocalCheckpointCorrupt):
            share.send_checkpoint(folder, digest, lambda: None)
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(LocalCheckpointMissing):
            share.send_checkpoint(folder, digest, lambda: None)

        def fails(*_: Any) -> int:
            raise OSError(24, "too many open files")

        monkeypatch.setattr(remote_store, "open_below", fails)
        with pytest.raises(OSError, match="too many"):
            share.send_checkpoint(folder, digest, lambda: None)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A store that takes connections and says nothing; answers when each was made."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[float] = []
    held: list[socket.socket] = []

    def take() -> None:
        while True:
            try:
                held.append(listener.accept()[0])
            except OSError:
                return
            taken.append(time.monotonic())

    thread = threading.Thread(target=take)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield taken
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in held:
        connection.close()


@pytest.mark.full
def test_a_silent_store_is_soon_given_up(
    silent: list[float], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert object_store._SILENCE_SECONDS <= 20
    monkeypatch.setattr(object_store, "_SILENCE_SECONDS", 0.2)
    folder, digest = whole(settings)
    for use in (
        lambda remote: remote.send_checkpoint(folder, digest, lambda: None),  # more than the buffers on the way take
        lambda remote: remote.fetch_checkpoint(folder, digest, "wrk_test", lambda: None),
    ):
        silent.clear()
        with pytest.raises(StoreUnavailable, match="does not answer") as reported:
            use(RemoteStore("s3://silent/prefix", Storage(settings)))
        # Each of two tries of ours; the library below begins a cut upload once more by itself.
        assert reported.value.is_silent and len(silent) <= 4
