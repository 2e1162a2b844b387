"""`anneal up`: everything runs with one command, comes back when it dies, and leaves nothing behind."""

import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from app.config import Settings
from app.standalone.supervisor import Program, SupervisedProcess, Up
from app.workers.status_files import WorkerStatusFile, read_statuses
from tests import programs
from tests.waiting import eventually

READY_SECONDS = 90.0


class Running:
    """An `anneal up` in its own process, started once or several times on the same home."""

    process: subprocess.Popen[bytes]
    first_connection: dict[str, Any]
    """`connection.json` as it was when it appeared."""

    def __init__(self, home: Path, terminal: bool = False, **variables: str) -> None:
        self.home = home
        self.terminal = terminal
        home.mkdir(parents=True, exist_ok=True)
        self.output = home.parent / f"{home.name}.out"
        # Cold: a warm training process takes seconds to start, and these tests do not train.
        chosen = {"ANNEAL_HOME": str(home), "ANNEAL_PORT": "0", "ANNEAL_LAUNCH": "cold", "ANNEAL_LEASE_SECONDS": "3"}
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", **chosen, **variables}
        self.start()

    def start(self) -> "Running":
        """Start it, after its previous process has ended."""
        with self.output.open("wb") as output:
            if not self.terminal:
                self.process = subprocess.Popen(command("up"), env=self.environment, stdout=output, stderr=output)
                return self
        screen, terminal = pty.openpty()
        self.process = subprocess.Popen(command("up"), env=self.environment, stdout=terminal, stderr=terminal)
        os.close(terminal)
        threading.Thread(target=self._copy, args=[screen], daemon=True).start()
        return self

    def _copy(self, screen: int) -> None:
        """Write what appears on the terminal to the file, until nothing has it open any more."""
        with self.output.open("ab", buffering=0) as output, suppress(OSError):
            while piece := os.read(screen, 4096):
                output.write(piece.replace(b"\r\n", b"\n"))
        os.close(screen)

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def connection(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.home / "connection.json").read_text())
        return document

    @property
    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.connection['api_key']}"}
        # Nothing here is encrypted; loading the certificates at every look would slow down what is looked at.
        return httpx.Client(base_url=self.connection["url"], headers=headers, trust_env=False, timeout=60, verify=False)

    def until_ready(self) -> "Running":
        def ready() -> bool:
            assert self.process.poll() is None, self.said
            return "Anneal is ready" in self.said

        eventually(ready, timeout=READY_SECONDS, what=f"readiness of {self.home}")
        return self

    def answers(self, path: str = "/readyz") -> bool:
        try:
            with self.client as client:
                return client.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def until_worker_is_online(self) -> None:
        def online() -> bool:
            with self.client as client:
                workers = client.get("/v1/workers").json()["data"]
            return any((one["pid"], one["state"]) == (pid, "online") for one in workers)

        pid = self.connection["pids"]["worker"]
        eventually(online, timeout=READY_SECONDS)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `anneal up` on the test's home; whatever still runs is ended with the test."""
    started: list[Running] = []

    def build(**variables: str) -> Running:
        started.append(Running(tmp_path / "home", **variables))
        return started[-1]

    yield build
    for running in started:
        running.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    up = Running(tmp_path_factory.mktemp("up") / "home", terminal=True)
    eventually((up.home / "connection.json").exists, timeout=READY_SECONDS)
    up.first_connection = up.connection
    yield up.until_ready()
    up.end()


@pytest.fixture
def running(shared: Running) -> Running:
    """One that is ready, for tests that leave it ready, or end it and start it again on the same home."""
    if shared.process.poll() is not None:  # an earlier test failed before it started it again
        shared.start().until_ready()
    return shared


class TestReady:
    def test_up_prints_url_key_and_a_working_curl_line(self, running: Running) -> None:
        line = re.search(r"curl .*", running.said)
        assert line and running.connection["url"] in line[0]
        # The curl line says all that a client needs: nothing but what it shows is used here.
        header, url = re.findall(r'"(.*?)" (\S+)', line[0])[0]
        name, value = header.split(": ", 1)
        answer = httpx.get(url, headers={name: value}, trust_env=False)
        assert answer.status_code == 200

    def test_connection_json_appears_with_its_key(self, running: Running) -> None:
        assert running.first_connection["api_key"] and running.first_connection["url"] == running.connection["url"]

    def test_connection_json_is_private_and_names_every_process(self, running: Running) -> None:
        assert stat.S_IMODE((running.home / "connection.json").stat().st_mode) == 0o600
        pids = running.connection["pids"]
        assert set(pids) == {"up", "postgres", "valkey", "api", "worker"}
        assert pids["up"] == running.process.pid
        assert all(psutil.Process(pid).ppid() == pids["up"] for name, pid in pids.items() if name != "up")

    def test_up_announces_that_training_processes_are_loaded(self, running: Running) -> None:
        eventually(lambda: any(note.warm for note in read_statuses(running.home)))
        eventually(lambda: ("still loading" in running.said) == ("are loaded" in running.said))

    @pytest.mark.parametrize("is_warm", [False, True])
    def test_ready_says_that_libraries_still_load_unless_the_worker_is_warm_and_later_that_they_are_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_warm: bool
    ) -> None:
        """The worker is this process, by its status file; whether API and worker are up is not in question here."""
        said: list[str] = []
        up = Up(Settings(home=tmp_path), said.append, shows_key=False)
        monkeypatch.setattr(up, "_is_ready", lambda: True)
        up._logs = []
        up._worker = Program("worker", [], tmp_path / "log", dict)
        up._worker.process = cast(Any, SimpleNamespace(pid=os.getpid()))
        note = WorkerStatusFile(tmp_path, "wrk_1")
        note.open()
        note.update(warm=is_warm)
        for _ in range(2):
            up._poll_processes()
        (ready,) = said
        assert "Anneal is ready." in ready and ("libraries are still loading" in ready) is not is_warm
        note.update(warm=True)
        for _ in range(2):
            up._poll_processes()
        assert said[1:] == ([] if is_warm else ["The training libraries are loaded: runs start at once."])

    def test_up_writes_log_files_in_console_format(self, running: Running) -> None:
        assert running.answers()
        lines = (running.home / "logs" / "api.log").read_text().splitlines()
        assert any(" INFO app.api.middleware.request_metrics: GET /readyz answered with 200" in line for line in lines)
        assert not [line for line in lines if line.startswith("{")]

    def test_a_second_one_on_the_same_home_is_refused(self, running: Running) -> None:
        second = programs.anneal("up", **running.environment)
        assert second.returncode == 1
        assert f"already running on {running.home} (process {running.process.pid})" in second.stderr
        assert running.answers()

    def test_commands_on_the_same_home_find_its_servers(self, running: Running) -> None:
        running.until_worker_is_online()
        status = programs.anneal("status", "--json", **running.environment)
        shown = json.loads(status.stdout)
        assert status.returncode == 0 and shown["ready"] and shown["up_pid"] == running.process.pid
        assert (shown["home"], shown["logs"]) == (str(running.home), str(running.home / "logs"))
        assert [worker["state"] for worker in shown["workers"]].count("online") == 1
        created = programs.anneal("keys", "create", "laptop", **running.environment)
        assert created.returncode == 0, created.stderr
        headers = {"Authorization": f"Bearer {created.stdout.strip()}"}
        with httpx.Client(base_url=running.connection["url"], headers=headers, trust_env=False) as client:
            assert client.get("/readyz").status_code == 200

    @pytest.mark.parametrize("name", ["api", "worker", "postgres", "valkey"])
    def test_whatever_is_killed_comes_back_and_connection_json_follows(self, running: Running, name: str) -> None:
        before = running.connection
        os.kill(before["pids"][name], signal.SIGKILL)

        def everything_runs_again() -> dict[str, Any] | None:
            now = running.connection
            complete = set(now["pids"]) == {"up", "postgres", "valkey", "api", "worker"}
            return now if complete and now["pids"][name] != before["pids"][name] else None

        after = eventually(everything_runs_again, timeout=60)
        assert psutil.Process(after["pids"][name]).ppid() == running.process.pid
        assert (after["url"], after["api_key"]) == (before["url"], before["api_key"])
        eventually(running.answers, timeout=60, what=f"readiness after {name} died")
        assert f"{name} was killed by SIGKILL; restarting it" in running.said


class TestEnd:
    def test_sigterm_of_anneal_down_ends_everything_cleanly_and_the_next_start_replaces_a_revoked_key(
        self, running: Running
    ) -> None:
        running.until_worker_is_online()
        before, said = running.connection, running.said
        listed = programs.anneal("keys", "list", **running.environment)
        (key_id,) = (line.split()[0] for line in listed.stdout.splitlines() if "  anneal up  " in line)
        assert programs.anneal("keys", "revoke", key_id, **running.environment).returncode == 0
        log = running.home / "logs" / "worker.log"
        logged = log.read_text()
        family = psutil.Process(running.process.pid).children(recursive=True)
        down = programs.anneal("down", **running.environment)
        assert (down.returncode, down.stderr.splitlines()[-1]) == (0, "Stopped.")
        assert running.process.wait(60) == 0
        assert not [process for process in family if process.is_running()]
        assert running.connection == {"url": before["url"], "api_key_id": before["api_key_id"], "pids": {}}
        assert "runs are released" in log.read_text().removeprefix(logged)
        assert "killed" not in running.said.removeprefix(said)
        again = programs.anneal("down", **running.environment)
        assert again.returncode == 0 and "nothing to stop" in again.stderr
        after = running.start().until_ready().connection
        assert after["api_key"] != before["api_key"] and running.answers("/v1/workers")
        headers = {"Authorization": f"Bearer {before['api_key']}"}
        assert httpx.get(f"{after['url']}/v1/workers", headers=headers, trust_env=False).status_code == 401

    @pytest.mark.full
    @pytest.mark.parametrize("moment", ["Starting ", "Starting the API"])
    def test_sigterm_ends_it_while_it_starts_too_and_the_next_start_finds_nothing_amiss(
        self, start: Start, moment: str
    ) -> None:
        first = start()
        eventually(lambda: moment in first.said, timeout=READY_SECONDS)
        family = psutil.Process(first.process.pid).children(recursive=True)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0, first.said
        assert "Traceback" not in first.said
        assert moment == "Starting the API" or "Starting the API" not in first.said
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        start().until_ready()

    def test_the_worker_has_longer_to_end_than_its_trainers_have_to_save(self, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, lease_seconds=3)
        assert Up(settings, print, False)._worker_grace >= settings.save_grace_seconds + 10

    def test_sigkill_leaves_nothing_behind_and_hinders_no_new_start(self, running: Running) -> None:
        family = psutil.Process(running.process.pid).children(recursive=True)
        assert len(family) >= 4
        running.process.kill()
        running.process.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        before = running.connection
        # Now any user may listen on its port, and is sent nothing.
        with socket.create_server(("127.0.0.1", urlsplit(before["url"]).port or 0)) as listener:
            listed = programs.anneal("runs", "list", **running.environment)
            assert listed.returncode == 1 and "No service found" in listed.stderr
            assert not select.select([listener], [], [], 0)[0]
        after = running.start().until_ready().connection
        assert after["api_key_id"] == before["api_key_id"] and after["api_key"] != before["api_key"]


class TestOwnServers:
    @pytest.mark.full
    def test_up_with_both_urls_starts_no_embedded_server(self, start: Start, settings: Settings) -> None:
        assert settings.database_url and settings.redis_url
        up = start(ANNEAL_DATABASE_URL=settings.database_url, ANNEAL_REDIS_URL=settings.redis_url).until_ready()
        assert set(up.connection["pids"]) == {"up", "api", "worker"}
        assert up.connection["api_key"] not in up.said and str(up.home / "connection.json") in up.said
        assert not (up.home / "postgres").exists()
        assert up.answers()

    def test_a_database_that_does_not_answer_is_reported_in_a_sentence(self, tmp_path: Path) -> None:
        away = {
            "ANNEAL_DATABASE_URL": "postgresql://me:secret@127.0.0.1:1/x",
            "ANNEAL_REDIS_URL": "redis://127.0.0.1:1",
        }
        up = programs.anneal("up", ANNEAL_HOME=str(tmp_path), ANNEAL_PORT="0", **away)
        assert up.returncode == 1
        assert "The database does not answer" in up.stderr
        assert "Traceback" not in up.stderr and "secret" not in up.stdout + up.stderr


class TestPortTaken:
    def test_a_taken_port_is_reported_in_a_sentence_and_nothing_is_started(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            up = programs.anneal("up", ANNEAL_HOME=str(tmp_path), ANNEAL_PORT=str(port))
        assert up.returncode == 1
        assert f"Port {port} on 127.0.0.1 is in use by another program" in up.stderr
        assert "Traceback" not in up.stderr
        assert not (tmp_path / "postgres").exists()


class TestBackOff:
    def test_what_dies_at_once_is_started_again_less_and_less_eagerly(self) -> None:
        said: list[str] = []
        broken = Broken()
        broken.start()
        supervised = SupervisedProcess(broken, said.append)

        def starts() -> bool:
            supervised.check_process()
            return broken.starts >= 4

        eventually(starts, timeout=60)
        endings = [line for line in said if "exited" in line]
        assert endings == [
            "broken exited with code 3; restarting it",
            "broken exited with code 3; restarting it in 0.5 s",
            "broken exited with code 3; restarting it in 1 s",
        ]


class Broken:
    """A program that ends with an error as soon as it is started."""

    name = "broken"

    def __init__(self) -> None:
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.starts += 1
        self.process = subprocess.Popen(["sh", "-c", "exit 3"])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "app.cli.main", *arguments]
