"""A second storage that is away, half mounted or silent: told in words of our own, and nothing half arrives there."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from app.infra.files import object_store
from app.infra.files.object_store import MARK, StoreUnavailable, describe_store_error
from app.infra.storage import Storage
from tests.worker.checkpoint_store.test_replication import (
    files_below,
    killed_after,
    s3,  # noqa: F401
    whole,
)
from worker.checkpoint_store import remote_store
from worker.checkpoint_store.remote_store import LocalCheckpointCorrupt, LocalCheckpointMissing, RemoteStore

SECRET = 'connection to server at "10.1.2.3" failed for user "anneal" key AKIA123'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / MARK).touch()
    return tmp_path / "shared"


@pytest.fixture
def share(root: Path, settings: Settings) -> RemoteStore:
    return RemoteStore(f"file://{root}", Storage(settings))


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
            share.send(folder, digest, lambda: None)
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
            remote.send(folder, digest, on_piece)


class TestAFileOnItsWay:
    def test_does_not_arrive_at_a_share_when_its_sending_ends(
        self, share: RemoteStore, root: Path, settings: Settings
    ) -> None:
        folder, digest = whole(settings)
        with pytest.raises(KeyboardInterrupt):
            share.send(folder, digest, killed_after(1))
        assert files_below(root) == []

    @pytest.mark.full
    def test_does_not_arrive_at_an_object_store_either(self, settings: Settings, s3: str) -> None:  # noqa: F811
        import boto3

        folder, digest = whole(settings)
        remote = RemoteStore(s3, Storage(settings))
        remote.objects.files.default_block_size = 5 * 2**20  # so that it is sent in parts
        with pytest.raises(KeyboardInterrupt):
            remote.send(folder, digest, killed_after(2))
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
        share.send(folder, digest, lambda: None)
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
        share.send(folder, digest, lambda: None)
        assert not left.exists()


class TestAShareThatIsNotMounted:
    def test_is_distinguished_from_one_that_is(self, share: RemoteStore, root: Path, settings: Settings) -> None:
        folder, digest = whole(settings)
        share.send(folder, digest, lambda: None)
        root.rename(root.with_name("away"))
        root.mkdir()  # the place below which it is mounted
        for use in (
            lambda: share.send(folder, digest, lambda: None),
            lambda: share.fetch(folder, digest, "wrk_test", lambda: None),
            lambda: share.remove(folder),
            lambda: share.objects.mark_root(lambda: False),
        ):
            with pytest.raises(StoreUnavailable, match=f"no file {MARK}: mount"):
                use()
        assert list(root.iterdir()) == []

    def test_is_marked_before_the_first_copy_of_all(self, share: RemoteStore, root: Path) -> None:
        (root / MARK).unlink()
        share.objects.mark_root(lambda: True)
        assert (root / MARK).exists()
        root.rename(root.with_name("away"))
        with pytest.raises(StoreUnavailable, match="mount it"):
            share.objects.mark_root(lambda: True)
        assert not root.exists()


class TestWhatIsHere:
    def test_is_gone_or_different_or_cannot_be_read(
        self, share: RemoteStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, digest = whole(settings)
        (folder / "state.json").unlink()
        with pytest.raises(LocalCheckpointCorrupt):
            share.send(folder, digest, lambda: None)
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(LocalCheckpointMissing):
            share.send(folder, digest, lambda: None)

        def fails(*_: Any) -> int:
            raise OSError(24, "too many open files")

        monkeypatch.setattr(remote_store, "open_below", fails)
        with pytest.raises(OSError, match="too many"):
            share.send(folder, digest, lambda: None)


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
    for one in held:
        one.close()


@pytest.mark.full
def test_a_silent_store_is_soon_given_up(
    silent: list[float], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert object_store._SILENCE_SECONDS <= 20
    monkeypatch.setattr(object_store, "_SILENCE_SECONDS", 0.2)
    folder, digest = whole(settings)
    for use in (
        lambda remote: remote.send(folder, digest, lambda: None),  # more than the buffers on the way take
        lambda remote: remote.fetch(folder, digest, "wrk_test", lambda: None),
    ):
        silent.clear()
        with pytest.raises(StoreUnavailable, match="does not answer") as reported:
            use(RemoteStore("s3://silent/prefix", Storage(settings)))
        # Each of two tries of ours; the library below begins a cut upload once more by itself.
        assert reported.value.is_silent and len(silent) <= 4
