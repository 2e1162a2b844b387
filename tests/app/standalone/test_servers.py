"""The embedded servers: real ones, private, and back after whatever happened to them."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy.engine import make_url

from app.config import Settings
from app.infra.errors import SetupError
from app.infra.server_urls import resolve_urls
from app.standalone import postgres, valkey
from app.standalone.home_lock import HomeLock
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
    made: list[EmbeddedServers] = []

    def build() -> EmbeddedServers:
        made.append(EmbeddedServers(home, durable=False))
        return made[-1]

    yield build
    for servers in made:
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


class TestFirstStart:
    def test_it_serves_postgres_18_in_utf8_and_valkey_9(self, make: Make) -> None:
        servers = make()
        servers.start()
        assert str(ask(servers, "SHOW server_version")).startswith("18.")
        assert ask(servers, "SHOW server_encoding") == "UTF8"
        with redis.Redis.from_url(servers.redis_url or "") as client:
            assert client.info("server")["valkey_version"].startswith("9.")

    @pytest.mark.parametrize("module", [postgres, valkey])
    def test_a_port_that_another_process_has_taken_meanwhile_is_left_to_it(
        self, make: Make, module: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        choose = module.free_port
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports = iter([taken.getsockname()[1]])
            monkeypatch.setattr(module, "free_port", lambda preferred=None: next(ports, None) or choose(preferred))
            servers = make()
            servers.start()
        assert ask(servers, "SELECT 1") == 1
        with redis.Redis.from_url(servers.redis_url or "") as client:
            assert client.ping()

    def test_the_role_of_the_service_is_no_superuser(self, make: Make) -> None:
        servers = make()
        servers.start()
        assert ask(servers, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False

    def test_neither_server_lets_anybody_in_without_its_password(self, make: Make) -> None:
        servers = make()
        servers.start()
        for wrong in ("", "guess"):
            url = make_url(servers.database_url or "").set(password=wrong)
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(url.render_as_string(hide_password=False))
        port = make_url(servers.redis_url or "").port or 0
        unrelated = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
        with unrelated, pytest.raises(redis.AuthenticationError):
            unrelated.ping()

    def test_both_listen_on_loopback_only(self, make: Make) -> None:
        servers = make()
        servers.start()
        for server in servers.servers:
            listening = [c for c in psutil.Process(process_of(server).pid).net_connections() if c.status == "LISTEN"]
            assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}

    def test_what_holds_a_password_is_for_its_owner_only(self, make: Make, home: Path) -> None:
        servers = make()
        servers.start()
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

    def test_urls_stay_the_same_when_no_one_took_the_ports(self, make: Make) -> None:
        first = make()
        first.start()
        urls = first.database_url, first.redis_url
        first.stop()
        second = make()
        second.start()
        assert (second.database_url, second.redis_url) == urls

    def test_a_port_that_was_taken_meanwhile_is_replaced_and_reported(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        first.stop()
        assert first.postgres and first.valkey
        with socket.create_server(("127.0.0.1", first.postgres.port or 0)):
            second = make()
            second.start()
            assert second.postgres and second.postgres.port != first.postgres.port
            found = resolve_urls(Settings(home=home))
            assert found.database_url == second.database_url

    def test_a_stale_pid_file_that_names_an_unrelated_process_is_no_hindrance(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        process_of(first.postgres).kill()
        process_of(first.postgres).wait()
        first.stop()
        pid_file = home / "postgres" / "data" / "postmaster.pid"
        unrelated = subprocess.Popen(["sleep", "60"])
        try:
            pid_file.write_text(pid_file.read_text().replace(pid_file.read_text().split()[0], str(unrelated.pid), 1))
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
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive

    def test_a_server_that_stayed_all_the_same_is_ended_by_the_next_start(self, make: Make, home: Path) -> None:
        first = make()
        first.start()
        stayed = [psutil.Process(process_of(server).pid) for server in first.servers]
        second = make()
        second.start()
        for server in first.servers:
            process_of(server).wait(10)
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

    def test_with_neither_way_root_gets_instructions(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_unshare(tmp_path / "bin", monkeypatch, ["sh", "id"])
        servers = make()
        if os.geteuid() == 0:
            with pytest.raises(SetupError, match="run as a regular user, or set ANNEAL_DATABASE_URL"):
                servers.start()
        else:
            servers.start()


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


class TestResolvingUrls:
    def test_without_servers_the_next_step_is_reported(self, home: Path) -> None:
        with pytest.raises(SetupError, match="start `anneal up` first or set ANNEAL_DATABASE_URL"):
            resolve_urls(Settings(home=home))

    def test_urls_of_the_user_win(self, make: Make, home: Path) -> None:
        make().publish()
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
