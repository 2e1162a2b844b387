"""The client programs of PostgreSQL: those of the wheel, or newer ones of the system, and never an older one."""

from pathlib import Path

import pytest

from app.backup import database_client
from app.backup.database_client import DatabaseAddress, find_client
from app.infra.errors import SetupError
from app.standalone.postgres import server_binaries


def add_client(folder: Path, major: int) -> Path:
    folder.mkdir()
    for name in ("pg_dump", "pg_restore", "psql"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {major}.1 (Debian {major}.1-1)'\n")
        (folder / name).chmod(0o755)
    return folder


def test_client_of_the_wheel_is_used_for_a_server_of_its_version_or_an_older_one() -> None:
    for major in (15, 18):
        client = find_client(major)
        assert (client.folder, client.major) == (server_binaries(), 18)


def test_newer_client_of_the_system_is_used_for_a_newer_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_client(tmp_path / "bin", 21)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    assert find_client(20).folder == folder


def test_without_a_client_that_is_new_enough_the_sentence_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(add_client(tmp_path / "bin", 17)), prepend=":")
    with pytest.raises(
        SetupError, match=r"PostgreSQL 19 or newer, and the newest one here is 18: .*postgresql-client-19"
    ):
        find_client(19)


def test_without_the_wheel_and_without_a_client_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise SetupError("The package is missing.")

    monkeypatch.setattr(database_client, "server_binaries", missing)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SetupError, match="18 or newer, and none is installed: install the client"):
        find_client(18)


def test_password_is_in_the_environment_and_not_in_the_arguments() -> None:
    url = "postgresql://me:pass%20word@db.example:6000/anneal?sslmode=require&application_name=x"
    address = DatabaseAddress.from_url(url)
    assert "pass" not in address.conninfo
    assert address.environment["PGPASSWORD"] == "pass word"
    assert {"host=db.example", "port=6000", "dbname=anneal", "sslmode=require"} <= set(address.conninfo.split())
    assert not [name for name in address.environment if name.startswith("ANNEAL_")]
