"""The embedded servers: real ones, private, and back after whatever happened to them."""

import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import text
from sqlalchemy.engine import make_url

from app.config import Settings
from app.infra.broker import QUEUE, TASK, celery_app
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.home_lock import HomeLock
from app.infra.private_files import make_private_folder, write_private_json
from app.infra.server_urls import resolve_urls
from app.standalone import postgres
from app.standalone.servers import EmbeddedServers
from tests import clusters
from tests.waiting import eventually

Make = Callable[[], EmbeddedServers]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def make(home: Path) -> Iterator[Make]:
    """Makes the servers of one home, any number of times; ends them with the test."""
    started: list[EmbeddedServers] = []

    def build() -> EmbeddedServers:
        started.append(EmbeddedServers(home, durable=False))
        return started[-1]

    yield build
    for servers in started:
        servers.stop()


def ask(servers: EmbeddedServers, query: str) -> object:
    with psycopg.connect(servers.database_url or "") as connection:
        row = connection.execute(query).fetchone()
    return row and row[0]


def process_of(server: object) -> subprocess.Popen[bytes]:
    process = getattr(server, "process", None)
    assert isinstance(process, subprocess.Popen)
    return process


class WithCluster:
    """Tests of a home that already has a cluster."""

    @pytest.fixture
    def home(self, home: Path) -> Path:
        clusters.copy_to(home)
        return home


@pytest.fixture(scope="class")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers]:
    """Servers of a new home, which were started once, for tests that only look at them."""
    servers = EmbeddedServers(tmp_path_factory.mktemp("first") / "home", durable=False)
    servers.start()
    yield servers
    servers.stop()


class TestFirstStart:
    def test_first_start_serves_postgres_18_in_utf8_and_valkey_9(self, servers: EmbeddedServers) -> None:
        assert str(ask(servers, "SHOW server_version")).startswith("18.")
        assert ask(servers, "SHOW server_encoding") == "UTF8"
        assert ask(servers, "SHOW dynamic_shared_memory_type") == "mmap", "a container has little /dev/shm"
        with redis.Redis.from_url(servers.redis_url or "") as client:
            assert client.info("server")["valkey_version"].startswith("9.")

    def test_the_role_of_the_service_is_no_superuser(self, servers: EmbeddedServers) -> None:
        assert ask(servers, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False

    def test_neither_server_lets_anybody_in_without_its_password(self, servers: EmbeddedServers) -> None:
        for wrong in ("", "guess"):
            url = make_url(servers.database_url or "").set(password=wrong)
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(url.render_as_string(hide_password=False))
        unrelated = redis.Redis(unix_socket_path=urlsplit(servers.redis_url or "").path, retry=Retry(NoBackoff(), 0))
        with unrelated, pytest.raises(redis.AuthenticationError):
            unrelated.ping()

    def test_both_listen_on_sockets_that_no_other_user_reaches_and_on_no_port(self, make: Make, home: Path) -> None:
        clusters.copy_to(home)
        (home / "sockets").mkdir(mode=0o755)
        servers = make()
        servers.start()
        sockets = {path.name: path.stat() for path in (home / "sockets").iterdir() if path.is_socket()}
        assert set(sockets) == {".s.PGSQL.5432", "valkey"}
        for status in (*sockets.values(), (home / "sockets").stat()):
            assert stat.S_IMODE(status.st_mode) == 0o700
        for server in servers.servers:
            connections = psutil.Process(process_of(server).pid).net_connections()
            assert not [connection for connection in connections if connection.status == "LISTEN"]

    def test_a_server_in_its_place_that_asks_for_the_password_is_not_sent_it(self, make: Make, tmp_path: Path) -> None:
        received: list[bytes] = []

        def ask_for_password(listener: socket.socket) -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(connection.recv(4096))
                connection.sendall(b"R\x00\x00\x00\x08\x00\x00\x00\x03")  # AuthenticationCleartextPassword
                received.append(connection.recv(4096))

        url = make_url(make().database_url or "").update_query_dict({"host": str(tmp_path)})
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / ".s.PGSQL.5432"))
            listener.listen()
            thread = threading.Thread(target=ask_for_password, args=[listener])
            thread.start()
            with pytest.raises(psycopg.OperationalError, match="server requested a cleartext password"):
                psycopg.connect(url.render_as_string(hide_password=False))
            thread.join(30)
        assert b"anneal" in received[0] and received[1] == b""

    def test_a_home_whose_name_has_any_characters_is_as_good(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        # Not `tmp_path`, which has the name of the test: the path of a socket is short.
        home = tmp_path_factory.mktemp("h") / 'it\'s 100%:\u00fc "\\x" #$'
        servers = EmbeddedServers(home, durable=False)
        try:
            servers.start()
            urls = resolve_urls(Settings(home=home))
            engine = sync_engine(urls.database_url or "", pool_size=0)
            with engine.connect() as connection:
                assert connection.scalar(text("SELECT 1")) == 1
            app = celery_app(urls.redis_url or "")
            app.send_task(TASK, ignore_result=True)
            app.close()
            with redis.Redis.from_url(urls.redis_url or "") as client:
                assert client.llen(QUEUE) == 1
        finally:
            servers.stop()

    def test_what_holds_a_password_is_for_its_owner_only(self, servers: EmbeddedServers) -> None:
        home = servers.home
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        for name in ("secrets.json", "embedded.json", "valkey/valkey.conf"):
            assert stat.S_IMODE((home / name).stat().st_mode) == 0o600, name
        for server in servers.servers:
            assert "secret" not in " ".join(psutil.Process(process_of(server).pid).cmdline())
        assert not (home / "postgres" / "initdb.password").exists()

    def test_a_creation_that_was_killed_half_way_is_restarted(self, make: Make, home: Path) -> None:
        torn = home / "postgres" / "data.new"
        torn.mkdir(parents=True)
        (torn / "PG_VERSION").write_text("18\n")
        servers = make()
        servers.start()
        assert ask(servers, "SELECT 1") == 1


class TestStartAgain(WithCluster):
    def test_data_are_there_after_a_kill_of_both_servers(self, make: Make) -> None:
        servers = make()
        servers.start()
        with psycopg.connect(servers.database_url or "", autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        for server in servers.servers:
            process_of(server).kill()
            process_of(server).wait()
        servers.start()
        assert ask(servers, "SELECT answer FROM kept") == 42

    def test_urls_stay_the_same(self, make: Make) -> None:
        first = make()
        first.start()
        urls = first.database_url, first.redis_url
        first.stop()
        second = make()
        second.start()
        assert (second.database_url, second.redis_url) == urls

    def test_a_stale_pid_file_that_names_an_unrelated_process_is_no_hindrance(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        process_of(first.postgres).kill()
        process_of(first.postgres).wait()
        first.stop()
        pid_files = (home / "postgres" / "data" / "postmaster.pid", home / "sockets" / ".s.PGSQL.5432.lock")
        unrelated = subprocess.Popen(["sleep", "60"])
        try:
            for file in pid_files:
                file.write_text(file.read_text().replace(file.read_text().split()[0], str(unrelated.pid), 1))
            second = make()
            second.start()
            assert ask(second, "SELECT 1") == 1
            assert unrelated.poll() is None
        finally:
            unrelated.kill()
            unrelated.wait()

    def test_a_damaged_append_only_file_is_set_aside(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        with redis.Redis.from_url(first.redis_url or "") as client:
            client.set("hint", "lost")
        first.stop()
        damaged = next((home / "valkey" / "appendonlydir").glob("*.incr.aof"))
        damaged.write_bytes(b"this is no append-only file\r\n" * 20)
        second = make()
        second.start()
        with redis.Redis.from_url(second.redis_url or "") as client:
            assert client.get("hint") is None
        assert list((home / "valkey").glob("appendonlydir.broken-*"))


class TestNothingIsLeftBehind(WithCluster):
    def test_servers_end_with_an_owner_that_was_killed(self, home: Path) -> None:
        owner = start_owner(home)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert {child.name() for child in children} >= {"postgres", "valkey-server"}
        owner.kill()
        owner.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive

    def test_a_server_that_stayed_all_the_same_is_ended_by_the_next_start(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        stayed = [psutil.Process(process_of(server).pid) for server in first.servers]
        second = make()
        second.start()
        for server in first.servers:
            process_of(server).wait(60)
        assert not any(process.is_running() for process in stayed)
        assert ask(second, "SELECT 1") == 1


class TestAccounts:
    def test_postgres_runs_for_any_user_who_starts_it(self, make: Make) -> None:
        servers = make()
        servers.start()
        assert ask(servers, "SELECT 1") == 1
        if os.geteuid() == 0:
            seen = Path(f"/proc/{process_of(servers.postgres).pid}/uid_map").read_text().split()
            assert seen[0] != "0"

    def test_without_user_namespaces_root_starts_it_as_another_user(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_unshare(tmp_path / "bin", monkeypatch, ["setpriv", "sh", "id"])
        servers = make()
        servers.start()
        assert ask(servers, "SELECT 1") == 1
        uids = psutil.Process(process_of(servers.postgres).pid).uids()
        assert uids.effective != 0
        servers.stop()
        monkeypatch.undo()
        again = make()
        again.start()
        assert ask(again, "SELECT 1") == 1

    def test_root_without_a_usable_account_gets_instructions(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_unshare(tmp_path / "bin", monkeypatch, ["sh", "id"])
        servers = make()
        if os.geteuid() == 0:
            with pytest.raises(SetupError, match="run as a regular user, or set ANNEAL_DATABASE_URL"):
                servers.start()
        else:
            servers.start()

    def test_the_account_of_training_processes_never_owns_the_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_unshare(tmp_path / "bin", monkeypatch, ["setpriv", "sh", "id"])
        if os.geteuid() != 0:
            with pytest.raises(SetupError, match=r"ANNEAL_TRAINER_USER=.* owns the database"):
                postgres._choose_account(tmp_path, pwd.getpwuid(os.geteuid()).pw_name)
            return
        usual = postgres._choose_account(tmp_path, None)
        trainer = pwd.getpwuid(usual.owner[0]).pw_name
        try:
            other = postgres._choose_account(tmp_path, trainer)
        except SetupError as error:
            assert "than that of training processes (ANNEAL_TRAINER_USER)" in str(error)
        else:
            assert other.owner[0] != usual.owner[0]


class TestSentences:
    def test_a_home_in_use_names_the_process_that_uses_it(self, home: Path) -> None:
        with HomeLock(home), pytest.raises(SetupError, match=rf"already running on .* \(process {os.getpid()}\)"):
            HomeLock(home).__enter__()
        with HomeLock(home):
            pass

    def test_lost_passwords_are_reported_before_anything_starts(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        first.stop()
        (home / "secrets.json").unlink()
        with pytest.raises(SetupError, match=r"secrets\.json .* restore it"):
            make()

    def test_wrong_passwords_are_reported(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        first.stop()
        (home / "secrets.json").write_text('{"postgres_admin": "a", "postgres": "b", "valkey": "c"}')
        with pytest.raises(SetupError, match=r"rejects the password in secrets\.json"):
            make().start()

    def test_data_of_another_version_are_reported(self, make: Make, home: Path) -> None:
        data = home / "postgres" / "data"
        servers = make()
        data.mkdir(parents=True)
        (data / "PG_VERSION").write_text("17\n")
        with pytest.raises(SetupError, match="was written by PostgreSQL 17"):
            servers.start()

    def test_a_folder_that_cannot_be_made_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SetupError, match="set ANNEAL_HOME"):
            EmbeddedServers(tmp_path / "file" / "home")

    def test_a_home_too_deep_for_a_socket_is_reported_with_the_length_that_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match="set ANNEAL_HOME to a folder whose path has at most 85 bytes"):
            EmbeddedServers(tmp_path / ("x" * 86))

    def test_a_link_in_the_place_of_the_sockets_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "sockets").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(SetupError, match="is not a folder of this user"):
            EmbeddedServers(tmp_path / "home")


class TestResolvingUrls:
    def test_urls_without_servers_name_the_next_step(self, home: Path) -> None:
        with pytest.raises(SetupError, match="start `anneal up` first or set ANNEAL_DATABASE_URL"):
            resolve_urls(Settings(home=home))

    def test_urls_of_the_user_win(self, home: Path) -> None:
        make_private_folder(home)
        write_private_json(home / "embedded.json", {"database_url": "postgresql://own/one", "redis_url": "redis://own"})
        own = Settings(home=home, database_url="postgresql://mine/one")
        assert resolve_urls(own).database_url == "postgresql://mine/one"
        assert resolve_urls(own).redis_url


def start_owner(home: Path) -> subprocess.Popen[bytes]:
    """A process that starts the servers, says so, and waits to be killed."""
    program = (
        "import sys, pathlib, signal; from app.standalone.servers import EmbeddedServers;"
        "EmbeddedServers(pathlib.Path(sys.argv[1]), durable=False).start();"
        "print('started', flush=True); signal.pause()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert eventually(owner.stdout.readline, timeout=60) == b"started\n"
    assert owner.poll() is None
    return owner


def without_unshare(folder: Path, monkeypatch: pytest.MonkeyPatch, programs: list[str]) -> None:
    folder.mkdir()
    for program in programs:
        (folder / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(folder))
