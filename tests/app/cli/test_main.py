"""The command line: every command explains itself, and says in a sentence what is wrong."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from app.config import Settings, get_settings
from tests import programs
from tests.conftest import Services
from tests.server import ApiServer
from tests.waiting import eventually

TOKEN = "hf_" + "abcdefgh" * 4


def anneal(*arguments: str, input: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """A command that neither serves nor becomes another process: here, which saves the start of Python."""
    get_settings.cache_clear()  # a process reads the environment once
    result = CliRunner().invoke(cli, list(arguments), input=input, env={"COLUMNS": "200", **variables})
    get_settings.cache_clear()
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    command = [sys.executable, "-P", "-m", "app.cli.main", *arguments]
    return subprocess.run(command, env=environment, input="", capture_output=True, text=True, timeout=60)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a command that could not do what it was asked for."""
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("anneal: "), done.stderr
    return lines[0]


@pytest.fixture
def servers(settings: Settings) -> dict[str, str]:
    """Variables that point a command at the test's database and Redis."""
    assert settings.database_url and settings.redis_url
    return {
        "ANNEAL_HOME": str(settings.home),
        "ANNEAL_DATABASE_URL": settings.database_url,
        "ANNEAL_REDIS_URL": settings.redis_url,
    }


class TestSecrets:
    def test_a_secret_is_set_from_standard_input_and_never_shown(self, servers: dict[str, str]) -> None:
        assert anneal("secrets", "set", "hf_token", input=TOKEN + "\n", **servers).stdout == "hf_token is set.\n"
        listed = anneal("secrets", "list", **servers).stdout
        assert listed.startswith("hf_token ") and TOKEN not in listed
        (secret,) = json.loads(anneal("secrets", "list", "--json", **servers).stdout)["data"]
        assert secret["name"] == "hf_token" and set(secret) == {"name", "created_at", "updated_at"}
        assert anneal("secrets", "rotate", **servers).stdout.startswith("0 secrets")
        assert anneal("secrets", "delete", "hf_token", **servers).stdout == "hf_token is deleted.\n"
        assert anneal("secrets", "list", **servers).stdout == ""
        deleted, created = anneal("audit", "--resource", "hf_token", "--days", "1", **servers).stdout.splitlines()
        assert "CLI secrets delete  hf_token" in deleted and "CLI secrets set  hf_token" in created
        calls = json.loads(anneal("audit", "--resource", "hf_token", "--limit", "1", "--json", **servers).stdout)
        assert [call["route"] for call in calls["data"]] == ["secrets delete"] and calls["has_more"] is True
        assert "There is no secret hf_token" in refused(anneal("secrets", "delete", "hf_token", **servers))

    def test_invalid_secret_is_refused_without_showing_it(self, servers: dict[str, str]) -> None:
        reported = refused(anneal("secrets", "set", "hf_token", input="my secret of two words", **servers))
        assert "visible ASCII" in reported and "words" not in reported
        assert "lowercase letters" in refused(anneal("secrets", "set", "HF", input=TOKEN, **servers))


class TestKeys:
    def test_a_key_is_made_listed_without_being_shown_and_revoked(self, servers: dict[str, str]) -> None:
        key = anneal("keys", "create", "laptop", "--scope", "read", "--expires-days", "2", **servers).stdout.strip()
        assert key.startswith("anneal_")
        listed = anneal("keys", "list", **servers).stdout
        assert "laptop" in listed and "read" in listed and "expires" in listed
        assert key not in listed
        header, line = listed.splitlines()
        assert header.split() == ["ID", "NAME", "SCOPES", "STATE", "KEY", "MAX", "DEVICES", "MAX", "HOURS"]
        key_id = line.split()[0]
        assert anneal("keys", "revoke", key_id, **servers).stdout.strip() == f"{key_id} is revoked."
        assert "revoked" in anneal("keys", "list", **servers).stdout
        (shown,) = json.loads(anneal("keys", "list", "--json", **servers).stdout)["data"]
        assert (shown["id"], shown["scopes"]) == (key_id, ["read"]) and shown["revoked_at"].endswith("Z")
        assert "digest" not in shown
        created = json.loads(anneal("keys", "create", "ci", "--scope", "read", "--json", **servers).stdout)
        assert created["scopes"] == ["read"] and created["key"].startswith("anneal_")
        ended = json.loads(anneal("keys", "revoke", created["id"], "--json", **servers).stdout)
        assert ended == {"id": created["id"], "revoked": True}

    def test_a_key_may_read_and_write_unless_restricted(self, servers: dict[str, str]) -> None:
        anneal("keys", "create", "usual", **servers)
        assert "read, write" in anneal("keys", "list", **servers).stdout

    def test_the_name_and_the_quota_of_a_key_are_changed(self, servers: dict[str, str]) -> None:
        created = json.loads(
            anneal("keys", "create", "laptop", "--scope", "read", "--max-devices", "1", "--json", **servers).stdout
        )
        assert anneal("keys", "list", **servers).stdout.endswith("…  1            -\n")
        changed = anneal("keys", "edit", created["id"], "--max-devices", "4", **servers).stdout
        assert changed == f"{created['id']} is changed.\n"
        shown = json.loads(anneal("keys", "edit", created["id"], "--name", "tower", "--json", **servers).stdout)
        assert (shown["name"], shown["max_devices"], shown["scopes"]) == ("tower", 4, ["read"])
        assert anneal("keys", "list", **servers).stdout.endswith("…  4            -\n")
        assert anneal("keys", "edit", created["id"], "--no-max-devices", **servers).returncode == 0
        assert anneal("keys", "list", **servers).stdout.endswith("…  -            -\n")
        assert anneal("audit", "--resource", created["id"], **servers).stdout.count("CLI keys edit") == 3
        assert "name: " in refused(anneal("keys", "edit", created["id"], "--name", "", **servers))
        assert "`anneal keys list`" in refused(anneal("keys", "edit", "key_none", "--name", "x", **servers))

    def test_an_unknown_scope_names_the_known_ones(self, servers: dict[str, str]) -> None:
        assert "read, write, admin" in refused(anneal("keys", "create", "x", "--scope", "root", **servers))

    def test_an_unknown_key_says_where_to_look(self, servers: dict[str, str]) -> None:
        assert "`anneal keys list`" in refused(anneal("keys", "revoke", "key_none", **servers))

    def test_keys_commands_with_a_url_use_that_service(self, emptied_api: ApiServer, tmp_path: Path) -> None:
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": emptied_api.url, "ANNEAL_API_KEY": emptied_api.key}
        created = json.loads(anneal("keys", "create", "ci", "--scope", "read", "--json", **there).stdout)
        assert created["scopes"] == ["read"] and created["key"].startswith("anneal_")
        assert created["key"] not in anneal("keys", "list", **there).stdout
        edit = ("keys", "edit", created["id"], "--json")
        assert json.loads(anneal(*edit, "--max-devices", "4", **there).stdout)["max_devices"] == 4
        assert "…  4            -\n" in anneal("keys", "list", **there).stdout
        assert json.loads(anneal(*edit, "--no-max-devices", **there).stdout)["max_devices"] is None
        assert json.loads(anneal(*edit, "--max-device-hours", "40", **there).stdout)["max_device_hours"] == 40
        assert json.loads(anneal(*edit, "--no-max-device-hours", **there).stdout)["max_device_hours"] is None
        assert anneal("keys", "revoke", created["id"], **there).stdout.strip() == f"{created['id']} is revoked."
        listed = json.loads(anneal("keys", "list", "--json", **there).stdout)["data"]
        assert [key["id"] for key in listed if key["revoked_at"]] == [created["id"]]
        assert "scopes" in anneal("keys", "create", "x", "--scope", "root", **there).stderr
        assert "`anneal keys list`" in anneal("keys", "revoke", "key_none", **there).stderr


class TestVersion:
    def test_version_is_that_of_the_package(self) -> None:
        assert anneal("--version").stdout == f"anneal {version('anneal')}\n"

    def test_an_unknown_command_is_answered_with_a_similar_one_that_deletes_nothing(self) -> None:
        for typed, near in (
            ("run", "`anneal runs`"), ("prun", ""), ("stat", "`anneal status`"), ("xyz", ""),
            ("watch", "`anneal runs watch`"),
        ):  # fmt: skip
            refused = anneal(typed)
            assert refused.returncode == 2 and f"There is no command '{typed}'; " in refused.stderr
            assert near in refused.stderr and "`anneal prune`" not in refused.stderr


class TestMigrate:
    def test_migrate_upgrades_an_empty_database_and_is_idempotent(self, services: Services) -> None:
        url = services.create_database(template="template1")
        try:
            first = process("migrate", ANNEAL_DATABASE_URL=url)
            assert first.returncode == 0, first.stderr
            assert first.stdout.startswith("From nothing to ")
            assert programs.anneal("migrate", ANNEAL_DATABASE_URL=url).stdout.startswith("Already at revision ")
            again = json.loads(programs.anneal("migrate", "--json", ANNEAL_DATABASE_URL=url).stdout)
            assert again["before"] == again["after"] == first.stdout.split()[-1].rstrip(".")
        finally:
            services.drop_database(url)

    def test_replicas_that_start_at_once_both_succeed(self, services: Services, tmp_path: Path) -> None:
        url = services.create_database(template="template1")
        try:
            environment = {**os.environ, "ANNEAL_DATABASE_URL": url}
            logs = [tmp_path / f"replica-{number}.log" for number in range(3)]
            replicas = [programs.start("app.cli.main", ["migrate"], environment, log) for log in logs]
            assert [replica.wait(60) for replica in replicas] == [0, 0, 0]
            assert sum("From nothing to " in log.read_text() for log in logs) == 1
        finally:
            services.drop_database(url)


class TestSentences:
    @pytest.mark.parametrize("command", ["api", "worker", "migrate", "keys list"])
    def test_command_without_servers_names_the_next_step(self, command: str, tmp_path: Path) -> None:
        sentence = refused(programs.anneal(*command.split(), ANNEAL_HOME=str(tmp_path)))
        assert "start `anneal up` first or set ANNEAL_DATABASE_URL" in sentence

    def test_a_database_that_is_down_is_reported_without_its_password(self, tmp_path: Path) -> None:
        url = "postgresql://me:hidden@127.0.0.1:1/x"
        sentence = refused(programs.anneal("migrate", ANNEAL_HOME=str(tmp_path), ANNEAL_DATABASE_URL=url))
        assert "The database does not answer" in sentence and "hidden" not in sentence

    @pytest.mark.parametrize("name", ["ANNEAL_DATABASE_URL", "ANNEAL_REDIS_URL"])
    @pytest.mark.parametrize("command", ["up", "api"])
    def test_a_url_that_is_none_is_named(self, command: str, name: str, tmp_path: Path) -> None:
        assert name in refused(programs.anneal(command, **{"ANNEAL_HOME": str(tmp_path), name: "nonsense"}))

    @pytest.mark.parametrize("command", ["up", "api"])
    def test_a_store_without_its_library_is_reported_before_anything_starts(self, command: str, tmp_path: Path) -> None:
        servers = {"ANNEAL_DATABASE_URL": "postgresql://me@127.0.0.1:1/x", "ANNEAL_REDIS_URL": "redis://127.0.0.1:1"}
        done = programs.anneal(
            command, **{"ANNEAL_HOME": str(tmp_path), "ANNEAL_STORAGE": "unheard://bucket", **servers}
        )
        assert "ANNEAL_STORAGE=unheard://bucket cannot be used: Protocol not known" in refused(done) and not done.stdout

    def test_a_wrong_setting_is_named_with_what_to_do(self, tmp_path: Path) -> None:
        other = {"ANNEAL_HOME": str(tmp_path)}
        sentence = refused(programs.anneal("up", ANNEAL_STORAGE="s3://user:word@bucket", **other))
        assert sentence.startswith("anneal: ANNEAL_STORAGE: must be a URL such as s3://bucket/prefix")
        removed = refused(programs.anneal("worker", ANNEAL_CHECKPOINT_URL="s3://bucket/prefix", **other))
        assert removed.startswith("anneal: ANNEAL_CHECKPOINT_URL was removed: unset it, and set ANNEAL_STORAGE to ")
        page = removed.strip().removesuffix(" describes.").rpartition(" as ")[2]
        assert (Path(__file__).parents[3] / page).read_text().startswith("# From ANNEAL_CHECKPOINT_URL")

    def test_a_database_without_tables_is_reported(self, services: Services) -> None:
        url = services.create_database(template="template1")
        try:
            done = anneal("keys", "list", ANNEAL_DATABASE_URL=url, ANNEAL_REDIS_URL=services.redis_url)
            assert "run `anneal migrate`" in refused(done)
        finally:
            services.drop_database(url)

    def test_a_setting_that_makes_no_sense_is_named(self, tmp_path: Path) -> None:
        sentence = refused(programs.anneal("up", ANNEAL_HOME=str(tmp_path), ANNEAL_PORT="seventy", ANNEAL_SLOTS="0"))
        assert sentence.startswith("anneal: ANNEAL_PORT must be a valid integer; correct it in the environment. ")
        assert "ANNEAL_SLOTS must be greater than or equal to 1; correct it" in sentence

    def test_a_port_in_use_is_reported(self, servers: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert f"Port {port} on 127.0.0.1 is in use" in refused(
                programs.anneal("api", "--port", str(port), **servers)
            )

    def test_an_address_of_another_machine_is_reported(self, servers: dict[str, str]) -> None:
        sentence = refused(programs.anneal("api", "--port", "0", ANNEAL_HOST="192.0.2.1", **servers))
        assert "set ANNEAL_HOST" in sentence


class TestApi:
    def test_api_command_reports_its_free_port_and_ends_on_sigterm(
        self, servers: dict[str, str], settings: Settings
    ) -> None:
        command = [sys.executable, "-P", "-m", "app.cli.main", "api", "--port", "0"]
        few_files = ["sh", "-c", 'ulimit -Sn 512; exec "$@"', "sh"]
        process = subprocess.Popen([*few_files, *command], env={**os.environ, **servers})
        try:
            address_file = settings.home / "run" / "api.json"
            address = eventually(
                lambda: json.loads(address_file.read_text()) if address_file.exists() else None, timeout=30
            )
            assert address["pid"] == process.pid
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard, "streams are limited by the soft limit of open files"
            with httpx.Client(base_url=address["url"], trust_env=False) as client:
                assert client.get("/healthz").json() == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
