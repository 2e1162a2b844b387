"""Promises about the files that a run leaves: all of them, and nothing else of the machine."""

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from anneal.client.client import Anneal
from app.api.open_responses import DOWNLOADS_PER_KEY
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.state.artifacts import archive, folders
from tests.app.uploads import lines, upload
from tests.factories import Trainer, make_dataset
from tests.rows import add_run
from tests.server import ApiServer, ProcessServer
from tests.waiting import eventually


@pytest.fixture
def run(shared_api: ApiServer) -> str:
    return completed_run(shared_api)


@pytest.fixture(scope="module")
def run_beside_secrets(shared_api: ApiServer) -> str:
    """A completed run with secret files beside its output, and links to them in it."""
    run_id = completed_run(shared_api)
    storage = Storage(shared_api.settings)
    storage.journal_path(run_id).write_text("secret")
    output = storage.output_dir(run_id, 1)
    (output.parent / "journal.jsonl").write_text("secret")
    (output / "link").symlink_to(storage.journal_path(run_id))
    (output / "folder").symlink_to(storage.run_dir(run_id))
    return run_id


def completed_run(shared_api: ApiServer) -> str:
    """Complete a run with three files, one of them in a folder; return its id."""
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    run_id: str = Trainer(engine, add_run(engine).id).begin().complete().run_id
    output = Storage(shared_api.settings).output_dir(run_id, 1)
    (output / "sub").mkdir(parents=True)
    (output / "README.md").write_text("# card\n")
    (output / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 100)
    (output / "sub" / "ü b.json").write_text("{}")
    return run_id


@pytest.fixture
def failed(shared_api: ApiServer) -> str:
    """A failed run with records of its attempt beside what is not served."""
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    run_id: str = Trainer(engine, add_run(engine).id).begin().fail().run_id
    folder = Storage(shared_api.settings).attempt_dir(run_id, 1)
    for name in ("tensorboard/events.1", "metrics.jsonl", "job.json", "checkpoint-1/metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    (folder / "distributions.jsonl").symlink_to("/etc/passwd")
    return run_id


def test_all_files_are_listed_by_path(shared_api: ApiServer, run: str) -> None:
    assert shared_api.client.get(f"/v1/runs/{run}/artifacts").json() == {
        "data": [
            {"path": "README.md", "bytes": 7},
            {"path": "adapter_model.safetensors", "bytes": 25600},
            {"path": "sub/ü b.json", "bytes": 2},
        ],
        "has_more": False,
        "left_out": 0,
    }


def test_every_listed_file_can_be_fetched(shared_api: ApiServer, run: str) -> None:
    for item in shared_api.client.get(f"/v1/runs/{run}/artifacts").json()["data"]:
        answer = shared_api.client.get(f"/v1/runs/{run}/artifacts/{item['path']}")
        assert (answer.status_code, len(answer.content)) == (200, item["bytes"])
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"


class TestUnreadDownloads:
    """Archives and files that a client requests and does not read."""

    def _request(self, api: ApiServer, path: str) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", api.port))
        connection.settimeout(20)
        head = f"Host: localhost\r\nAuthorization: Bearer {api.key}\r\n\r\n"
        connection.sendall(f"GET {path} HTTP/1.1\r\n{head}".encode())
        return connection

    @pytest.mark.parametrize("kind", ["artifacts.tar", "artifacts/big.bin"])
    def test_unread_downloads_of_a_key_are_limited_until_they_end(
        self, shared_api: ApiServer, run: str, kind: str
    ) -> None:
        path = f"/v1/runs/{run}/{kind}"
        with (Storage(shared_api.settings).output_dir(run, 1) / "big.bin").open("wb") as file:
            file.truncate(64 * 2**20)
        with ExitStack() as connections:
            for _ in range(DOWNLOADS_PER_KEY):
                connection = connections.enter_context(self._request(shared_api, path))
                assert connection.recv(12) == b"HTTP/1.1 200"
            refused = shared_api.client.get(f"/v1/runs/{run}/artifacts.tar")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_downloads")
            assert int(refused.headers["retry-after"]) > 0
            with shared_api.client_with(shared_api.key_with(["read"])) as other:
                assert other.get(f"/v1/runs/{run}/artifacts/README.md").content == b"# card\n"
        again = f"/v1/runs/{run}/artifacts/README.md"
        eventually(lambda: shared_api.client.get(again).status_code == 200, timeout=20, what="the downloads are over")

    def test_hold_little_memory(self, shared_api: ApiServer, run: str) -> None:
        """Most of what is read of a file waits in the connections, of which each has two pieces."""
        with (Storage(shared_api.settings).output_dir(run, 1) / "big.bin").open("wb") as file:
            file.truncate(64 * 2**20)
        with ProcessServer(shared_api.settings) as api, ExitStack() as connections:
            api.client.get(f"/v1/runs/{run}/artifacts.tar", headers={"Range": "bytes=0-0"})
            process = psutil.Process(api.process.pid)
            before = peak = process.memory_info().rss
            opened = [connections.enter_context(self._request(api, f"/v1/runs/{run}/artifacts.tar")) for _ in range(60)]
            statuses = [connection.recv(12)[9:] for connection in opened]
            assert (statuses.count(b"200"), statuses.count(b"429")) == (DOWNLOADS_PER_KEY, 60 - DOWNLOADS_PER_KEY)
            for _ in range(20):
                assert api.client.get("/healthz").status_code == 200
                peak = max(peak, process.memory_info().rss)
            assert peak - before < 32 * 2**20


def test_all_of_them_come_as_one_archive(shared_api: ApiServer, run: str, tmp_path: Path) -> None:
    output = Storage(shared_api.settings).output_dir(run, 1)
    (output / ("n" * 150 + ".txt")).write_text("a name longer than an old header takes")
    (output / "empty").touch()
    (output / "link").symlink_to("/etc/passwd")
    answer = shared_api.client.get(f"/v1/runs/{run}/artifacts.tar")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    files = {
        path.relative_to(output): path.read_bytes()
        for path in output.rglob("*")
        if not path.is_symlink() and path.is_file()
    }
    unpacked = {path.relative_to(tmp_path / run): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert unpacked == files and len(files) == 5
    assert subprocess.run(["tar", "t"], input=answer.content, capture_output=True, check=True).stderr == b""
    assert shared_api.client.get(f"/v1/runs/{new_id('run')}/artifacts.tar").status_code == 404


def test_an_output_that_is_gone_from_the_storage_is_reported(shared_api: ApiServer, run: str) -> None:
    shutil.rmtree(Storage(shared_api.settings).run_dir(run))
    for path in ("artifacts", "artifacts.tar"):
        answer = shared_api.client.get(f"/v1/runs/{run}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "artifacts_missing")


def test_a_range_is_answered_with_its_bytes(shared_api: ApiServer, run: str) -> None:
    url = f"/v1/runs/{run}/artifacts/adapter_model.safetensors"
    whole = shared_api.client.get(url).content
    part = shared_api.client.get(url, headers={"Range": "bytes=100-299"})
    assert (part.status_code, part.content) == (206, whole[100:300])
    assert part.headers["content-range"] == "bytes 100-299/25600"
    rest = shared_api.client.get(url, headers={"Range": "bytes=25500-"})
    assert (rest.status_code, rest.content) == (206, whole[25500:])
    behind = shared_api.client.get(url, headers={"Range": "bytes=99999-"})
    assert (behind.status_code, behind.json()["code"]) == (416, "requested_range_not_satisfiable")
    assert behind.headers["content-range"] == "bytes */25600"
    odd = shared_api.client.get(url, headers={"Range": "lines=1-2"})
    assert (odd.status_code, odd.json()["code"]) == (400, "bad_request")


def test_a_run_without_output_says_when_there_will_be_one(api: ApiServer) -> None:
    engine = sync_engine(api.settings.database_url or "", pool_size=0)
    failed = Trainer(engine, add_run(engine).id).fail().run_id
    waiting = add_run(engine).id
    for path in ("artifacts", "artifacts/README.md"):
        answer = api.client.get(f"/v1/runs/{waiting}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "no_artifacts")
        assert "pending" in answer.json()["detail"] and "/events" in answer.json()["detail"]
    assert "failed" in api.client.get(f"/v1/runs/{failed}/artifacts").json()["detail"]


def test_an_unknown_run_is_404(shared_api: ApiServer) -> None:
    assert shared_api.client.get(f"/v1/runs/{new_id('run')}/artifacts").json()["code"] == "run_not_found"
    assert shared_api.client.get("/v1/runs/..%2f../artifacts").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "../journal.jsonl", "..%2fjournal.jsonl", "%2e%2e/journal.jsonl", "%252e%252e%252fjournal.jsonl",
        "..%5cjournal.jsonl", "sub/../../journal.jsonl", "sub%2f..%2f..%2fjournal.jsonl", "/etc/passwd",
        "%2fetc%2fpasswd", "//etc/passwd", "file:%2f%2f/etc/passwd", "README.md%00", "%00", "README.md/", "sub", "sub/",
        ".", "..", "README.md/../../../journal.jsonl", "link", "folder/journal.jsonl", "x" * 5000,
    ],
)  # fmt: skip
def test_nothing_but_a_file_of_the_output_is_ever_sent(
    shared_api: ApiServer, run_beside_secrets: str, path: str
) -> None:
    """Sent raw, as a client's own normalisation would hide the attack."""
    request = (
        f"GET /v1/runs/{run_beside_secrets}/artifacts/{path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {shared_api.key}\r\nConnection: close\r\n\r\n"
    )
    answer = _raw(shared_api, request.encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 422")), answer[:200]
    assert b"secret" not in answer and b"root:" not in answer
    assert str(Path(shared_api.settings.storage_root)).encode() not in answer


def test_links_are_not_even_listed(shared_api: ApiServer, run: str) -> None:
    output = Storage(shared_api.settings).output_dir(run, 1)
    (output / "link").symlink_to("/etc/passwd")
    (output / "folder").symlink_to("/etc")
    assert len(shared_api.client.get(f"/v1/runs/{run}/artifacts").json()["data"]) == 3


@pytest.mark.parametrize(
    "name", [os.fsdecode(b"\xff"), "\x1b]0;owned\x07", "a\nb", "a\tb", "\x9b2J", "a\u202etxt", "..\\..\\a", "\x1b[2J/a"]
)
def test_a_name_that_is_not_plain_text_is_left_out_and_counted(
    shared_api: ApiServer, run: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = Storage(shared_api.settings).output_dir(run, 1)
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("no terminal may see its name")
    shown = shared_api.client.get(f"/v1/runs/{run}/artifacts").json()
    assert (len(shown["data"]), shown["left_out"]) == (3, 1)
    assert shared_api.client.get(f"/v1/runs/{run}/artifacts/{quote(os.fsencode(name))}").status_code in (404, 422)
    archived = shared_api.client.get(f"/v1/runs/{run}/artifacts.tar").content
    with tarfile.open(fileobj=io.BytesIO(archived)) as tar:
        assert len(tar.getnames()) == 3
    with Anneal(shared_api.url, shared_api.key) as client:
        folder = client.runs.download(run, tmp_path / "downloaded")
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 3
    assert f"1 file(s) of run {run} are not downloaded" in caplog.text


def test_very_many_files_are_not_listed(
    shared_api: ApiServer, run: str, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions that a trainer left would fill the memory; those of checkpoints do not count among the records."""
    monkeypatch.setattr(folders, "MAX_FILES", 3)
    for path in (f"/v1/runs/{run}/artifacts", f"/v1/runs/{run}/artifacts.tar"):  # three files in two folders
        answer = shared_api.client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (409, "too_many_artifacts")
    assert shared_api.client.get(f"/v1/runs/{run}/artifacts/README.md").status_code == 200
    assert shared_api.client.get(f"/v1/runs/{failed}/attempts/1/artifacts").status_code == 200


def test_an_output_that_is_a_link_is_none(shared_api: ApiServer, run: str, tmp_path: Path) -> None:
    """The training process owns the folder that its output is in, and may put anything into its place."""
    output = Storage(shared_api.settings).output_dir(run, 1)
    (tmp_path / "secret.key").write_text("secret")
    shutil.rmtree(output)
    output.symlink_to(tmp_path)
    for path in ("artifacts", "artifacts.tar", "artifacts/secret.key"):
        answer = shared_api.client.get(f"/v1/runs/{run}/{path}")
        assert answer.status_code == 404 and "secret\n" not in answer.text, path


def test_a_pipe_in_the_place_of_a_file_keeps_no_reader_waiting(shared_api: ApiServer, run: str) -> None:
    os.mkfifo(Storage(shared_api.settings).output_dir(run, 1) / "pipe")
    assert shared_api.client.get(f"/v1/runs/{run}/artifacts/pipe").status_code == 404


def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_followed(
    shared_api: ApiServer, run: str, tmp_path: Path
) -> None:
    output = Storage(shared_api.settings).output_dir(run, 1)
    folder = folders.LocalFolder(output)
    members = archive.list_members(folder, run)
    (tmp_path / "other").write_bytes(b"secret" * 10_000)
    (output / "adapter_model.safetensors").unlink()
    (output / "adapter_model.safetensors").symlink_to(tmp_path / "other")
    sent = []
    with pytest.raises(OSError):
        sent.extend(archive.stream_archive(folder, members))
    assert b"secret" not in b"".join(sent)


class TestAnOutputAsAModel:
    """A run may name the output of another one, and so has the API read files that a training process has written."""

    @pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
    def test_output_as_a_model_reads_no_file_outside_itself(
        self, shared_api: ApiServer, run: str, kind: str, tmp_path: Path
    ) -> None:
        output = Storage(shared_api.settings).output_dir(run, 1)
        secrets = {
            "config.json": {"architectures": ["SecretForSequenceClassification"], "max_position_embeddings": 7},
            "adapter_config.json": {"task_type": "SEQ_CLS", "base_model_name_or_path": "secret/model"},
            "tokenizer.json": {"secret": 1},
        }
        (tmp_path / "outside").mkdir()
        for name, content in secrets.items():
            (tmp_path / "outside" / name).write_text(json.dumps(content))
            if kind == "link":
                (output / name).symlink_to(tmp_path / "outside" / name)
            elif kind == "pipe":
                os.mkfifo(output / name)
        if kind == "folder":
            shutil.rmtree(output)
            output.symlink_to(tmp_path / "outside")
        body = {
            "dataset_id": make_dataset(sync_engine(shared_api.settings.database_url or "", pool_size=0), "text"),
            "config": {"base_model": run, "method": "lora", "max_seq_length": 100},
        }
        client = shared_api.client
        answers = [client.post("/v1/runs/validate", json=body), client.post("/v1/runs/estimate", json=body)]
        (code,) = [one["code"] for one in answers[0].json()["errors"] if one["field"] == "config.base_model"]
        assert code == "model_not_found"
        (output / "config.json").unlink(missing_ok=True)
        if kind != "folder":
            (output / "config.json").write_text("{}")
            answers += [client.post("/v1/runs/validate", json=body), client.post("/v1/runs/estimate", json=body)]
            answers.append(upload(shared_api, lines({"text": "a"}), tokenizer=run))
            assert answers[-1].json()["code"] == "bad_tokenizer"
        assert not [answer.text for answer in answers if "secret" in answer.text.lower() or answer.status_code >= 500]


def test_no_descriptor_stays_open(shared_api: ApiServer, run: str) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    shared_api.client.get(f"/v1/runs/{run}/artifacts/README.md")
    before = count()
    for _ in range(20):
        assert shared_api.client.get(f"/v1/runs/{run}/artifacts/README.md").content == b"# card\n"
        assert shared_api.client.get(f"/v1/runs/{run}/artifacts/sub").status_code == 404
    eventually(lambda: count() <= before + 2, what="files are closed")


def _raw(api: ApiServer, request: bytes) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(request)
        while piece := connection.recv(65536):
            received += piece
    return received


class TestRecordsOfAnAttempt:
    def test_records_of_a_failed_attempt_are_listed_and_fetched(self, shared_api: ApiServer, failed: str) -> None:
        path = f"/v1/runs/{failed}/attempts/1/artifacts"
        listed = [one["path"] for one in shared_api.client.get(path).json()["data"]]
        assert listed == ["metrics.jsonl", "tensorboard/events.1"]
        assert [shared_api.client.get(f"{path}/{name}").text for name in listed] == ["{}\n", "{}\n"]

    @pytest.mark.parametrize(
        "name", ["job.json", "checkpoint-1/metrics.jsonl", "distributions.jsonl", "tensorboard/..%2Fjob.json"]
    )
    def test_records_download_serves_nothing_else_of_the_folder(
        self, shared_api: ApiServer, failed: str, name: str
    ) -> None:
        answer = shared_api.client.get(f"/v1/runs/{failed}/attempts/1/artifacts/{name}")
        assert (answer.status_code, answer.json()["code"]) == (404, "artifact_not_found")

    @pytest.mark.parametrize("attempt", [0, 2, 10**30])
    def test_an_attempt_that_never_was_is_a_404(self, shared_api: ApiServer, failed: str, attempt: int) -> None:
        answer = shared_api.client.get(f"/v1/runs/{failed}/attempts/{attempt}/artifacts")
        assert (answer.status_code, answer.json()["code"]) == (404, "attempt_not_found")
