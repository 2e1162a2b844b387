"""How the client reaches a service: certificates, proxies, and names that are no text."""

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anneal.client.client import Anneal
from anneal.client.errors import AnnealError
from anneal.settings import proxy_of
from app.cli.main import cli
from tests.certificates import write_certificate
from tests.http_server import serving
from tests.server import ApiServer

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Empty(BaseHTTPRequestHandler):
    """Answers each request with an empty list."""

    def do_GET(self) -> None:
        content = b'{"data": [], "has_more": false}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


class Refusing(Empty):
    """Answers as a proxy that asks for a sign-in."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving_tls(certificate: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_service_with_a_private_authority_is_used_with_its_certificate_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    certificate = write_certificate(tmp_path / "authority.pem")
    with serving_tls(certificate) as url:
        environment = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": "key"}
        refused = CliRunner().invoke(cli, ["workers", "list"], env=environment)
        assert refused.exit_code == 1 and "--ca-file" in refused.stderr and "anneal up" not in refused.stderr
        assert refused.stderr.count("\n") == 1, "it is not tried again"
        assert (
            CliRunner().invoke(cli, ["--ca-file", str(certificate), "workers", "list"], env=environment).exit_code == 0
        )
        named = environment | {"ANNEAL_CA_FILE": str(certificate)}
        assert CliRunner().invoke(cli, ["workers", "list"], env=named).exit_code == 0
        with Anneal(url, "key", ca_file=certificate) as client:
            assert list(client.workers.list()) == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with Anneal(url, "key") as client:
            assert list(client.workers.list()) == []
        wrong = CliRunner().invoke(cli, ["--ca-file", __file__, "workers", "list"], env=environment)
        assert wrong.exit_code == 1 and f"{__file__} has no certificates" in wrong.stderr


def test_service_without_tls_behind_an_https_url_is_named_so() -> None:
    with (
        serving(Empty) as url,
        Anneal(url.replace("http:", "https:"), "key", patience=0) as client,
        pytest.raises(AnnealError, match="does not speak TLS"),
    ):
        list(client.workers.list())


def test_answer_of_a_proxy_is_told_without_methods_and_paths() -> None:
    with serving(Refusing) as url, Anneal(url, "key", patience=0) as client, pytest.raises(AnnealError) as refused:
        list(client.workers.list())
    assert "ANNEAL_URL" in str(refused.value) and "GET" not in str(refused.value)


def test_sentence_of_the_service_names_calls_of_the_client(shared_api: ApiServer) -> None:
    with Anneal(shared_api.url, shared_api.key) as client, pytest.raises(AnnealError) as missing:
        client.runs.get("run_1")
    assert "`client.runs.list()`" in str(missing.value) and "GET" not in str(missing.value)
    assert "GET /v1/runs" in missing.value.detail


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("http://10.1.2.3:8000", "10.0.0.0/8", None),
        ("http://10.1.2.3:8000", "192.168.0.0/16,10.1.0.0/16", None),
        ("http://11.1.2.3:8000", "10.0.0.0/8", "http://proxy:3128"),
        ("http://[fd00::1]:8000", "fd00::/8", None),
        ("http://[fd00::1]:8000", "[fd00::]/8", None),
        ("http://anneal.example:8000", "fd00::/8", "http://proxy:3128"),
        ("http://anneal.example:8000", ".example", None),
        ("http://anneal.example:8000", "anneal.example:8000", None),
        ("http://anneal.example:8000", "*", None),
        ("https://anneal.example", "", "http://proxy:3129"),
    ],
)
def test_proxy_of_the_environment_is_used_unless_no_proxy_names_host_or_network(
    monkeypatch: pytest.MonkeyPatch, url: str, no_proxy: str, proxy: str | None
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("https_proxy", "proxy:3129")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of(url) == proxy
    with Anneal(url, "key"):
        pass


def test_proxy_that_cannot_be_used_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("http_proxy", "ftp://proxy:21")
    environment = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": "http://there.example", "ANNEAL_API_KEY": "key"}
    refused = CliRunner().invoke(cli, ["workers", "list"], env=environment)
    assert refused.exit_code == 1 and "HTTP_PROXY" in refused.stderr and refused.exception.__class__ is SystemExit


def test_file_whose_name_is_no_text_is_uploaded(shared_api: ApiServer, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"donn\xe9es.jsonl")
    path.write_text('{"text": "a"}\n')
    with Anneal(shared_api.url, shared_api.key) as client:
        assert client.datasets.upload(path).name == "donn\ufffdes.jsonl"
    environment = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
    uploaded = CliRunner().invoke(cli, ["datasets", "upload", str(path)], env=environment)
    assert uploaded.exit_code == 0 and uploaded.stdout.startswith("ds_")
    for arguments in (
        ["datasets", "show", os.fsdecode(b"\xe9")],
        ["datasets", "upload", str(path), "--name", "\udce9"],
    ):
        refused = CliRunner().invoke(cli, arguments, env=environment)
        assert refused.exit_code == 1 and "UTF-8" in refused.stderr, refused.exception


def test_output_in_an_encoding_without_a_character_is_escaped_and_json_stays_valid(
    shared_api: ApiServer, tmp_path: Path
) -> None:
    name = "日本語 é \U0001f600"
    with Anneal(shared_api.url, shared_api.key) as client:
        client.datasets.upload(b'{"text": "b"}\n', name=name)
    environment = {
        **os.environ, "ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key,
        "PYTHONIOENCODING": "latin-1",
    }  # fmt: skip

    def output(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "app.cli.main", "datasets", "list", "--limit", "1", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True).stdout.decode("latin-1")

    assert "\\u65e5\\u672c\\u8a9e é \\U0001f600" in output()
    assert json.loads(output("--json"))["data"][0]["name"] == name
