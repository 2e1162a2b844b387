"""Promises about secrets: sealed in the database, bound to their name and key, and never told again."""

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import psycopg
import pytest

from app.config import Settings
from app.infra.db import sync_engine
from app.secrets import store
from app.secrets.keyring import Keyring, KeyringError
from tests.app.routes import calls
from tests.server import ApiServer, ThreadServer

TOKEN = "hf_" + "abcdefgh" * 4
OTHER = "wandb-" + "0123456789" * 3


def _put(api: ApiServer, name: str, value: object) -> Any:
    return api.client.put(f"/v1/secrets/{name}", json={"value": value})


def _database(settings: Settings) -> psycopg.Connection:
    return psycopg.connect(settings.database_url or "", autocommit=True)


def _everything(settings: Settings) -> str:
    """All that a dump of these tables has."""
    with _database(settings) as connection:
        return str(connection.execute("SELECT s::text, encode(s.sealed, 'escape') FROM secrets s").fetchall())


def _values(settings: Settings, *names: str) -> dict[str, str]:
    with sync_engine(settings.database_url or "", pool_size=0).connect() as connection:
        return store.read_secrets(connection, settings, names)


def _new_key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


def test_a_secret_is_kept_listed_replaced_and_deleted_and_never_shown(api: ApiServer, settings: Settings) -> None:
    created = _put(api, "hf_token", TOKEN)
    assert created.status_code == 200 and set(created.json()) == {"name", "created_at", "updated_at"}
    again = _put(api, "hf_token", OTHER).json()
    assert again["created_at"] == created.json()["created_at"] and again["updated_at"] > created.json()["updated_at"]
    _put(api, "another", TOKEN)
    listed = api.client.get("/v1/secrets")
    assert [item["name"] for item in listed.json()["data"]] == ["another", "hf_token"]
    assert TOKEN not in listed.text and OTHER not in listed.text
    assert api.client.get("/v1/secrets/hf_token").status_code == 405
    assert _values(settings, "hf_token", "another", "unset") == {"hf_token": OTHER, "another": TOKEN}
    assert api.client.delete("/v1/secrets/hf_token").status_code == 204
    assert api.client.delete("/v1/secrets/hf_token").json()["code"] == "secret_not_found"
    assert _values(settings, "hf_token") == {}


@pytest.mark.parametrize("name", ["HF", "1a", "a-b", "a" * 64, "..%2fx", "a%00"])
def test_a_name_that_cannot_be_one_is_refused(shared_api: ApiServer, name: str) -> None:
    assert _put(shared_api, name, TOKEN).status_code in (404, 422)


@pytest.mark.parametrize(
    "value", ["", "sh0rt", "two words here", "x" * 5000, "tab\tabcdefgh", "line\nabcdefgh", "ü" * 10, 12345678, None]
)
def test_a_value_that_cannot_be_one_is_refused_without_showing_it(shared_api: ApiServer, value: object) -> None:
    answer = _put(shared_api, "hf_token", value)
    assert answer.status_code == 422
    assert not (value and str(value) in answer.text)


@pytest.mark.parametrize("scopes", [["read"], ["write"], ["read", "write"]])
def test_secrets_are_for_admins_alone(shared_api: ApiServer, scopes: list[str]) -> None:
    assert isinstance(shared_api, ThreadServer)
    ours = [call for call in calls(shared_api.application.routes) if call[1].startswith("/v1/secrets")]
    assert len(ours) == 3
    with shared_api.client_with(shared_api.key_with(scopes)) as client:
        answers = [client.request(method, path, json={"value": TOKEN}) for method, path in ours]
    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(403, "scope_missing")}


def test_a_dump_of_the_database_shows_no_secret(api: ApiServer, settings: Settings) -> None:
    _put(api, "hf_token", TOKEN)
    _put(api, "same", TOKEN)
    dump = _everything(settings)
    key = settings.secret_key_path.read_text().strip()
    for tells in (TOKEN, TOKEN.encode().hex(), base64.b64encode(TOKEN.encode()).decode(), key):
        assert tells not in dump
    with _database(settings) as connection:
        sealed = connection.execute("SELECT sealed FROM secrets").fetchall()
    assert sealed[0] != sealed[1], "nobody sees that two secrets are the same"


def test_rows_of_a_database_cannot_be_swapped_or_changed(api: ApiServer, settings: Settings) -> None:
    """Somebody who may write to the database, but has no key file, cannot have one secret used as another."""
    _put(api, "hf_token", TOKEN)
    _put(api, "harmless", OTHER)
    with _database(settings) as connection:
        connection.execute(
            "UPDATE secrets s SET sealed = o.sealed FROM secrets o WHERE s.name = 'harmless' AND o.name = 'hf_token'"
        )
    with pytest.raises(KeyringError, match="set it again"):
        _values(settings, "harmless")
    with _database(settings) as connection:
        connection.execute("UPDATE secrets SET sealed = set_byte(sealed, 20, get_byte(sealed, 20) # 1)")
    with pytest.raises(KeyringError, match="set it again"):
        _values(settings, "hf_token")


def test_the_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    first = Keyring.from_settings(settings, make=True)
    assert stat.S_IMODE(settings.secret_key_path.stat().st_mode) == 0o600
    assert Keyring.from_settings(settings, make=True).sealing_id == first.sealing_id
    assert [path.name for path in settings.home.iterdir()] == ["secret.key"]
    for mode in (0o604, 0o644, 0o620, 0o666):
        settings.secret_key_path.chmod(mode)
        with pytest.raises(KeyringError, match="chmod 600"):
            Keyring.from_settings(settings)


@pytest.mark.parametrize("content", ["", "not base64!", "c2hvcnQ=", "ä"])
def test_a_broken_key_file_is_reported_without_its_content(tmp_path: Path, content: str) -> None:
    settings = Settings(home=tmp_path, secret_key_file=tmp_path / "keys")
    settings.secret_key_path.write_text(content)
    settings.secret_key_path.chmod(0o600)
    with pytest.raises(KeyringError, match="openssl rand"):
        Keyring.from_settings(settings)


def test_a_machine_without_the_key_file_says_so_and_makes_no_second_one(api: ApiServer, settings: Settings) -> None:
    """Else what it sealed could be read by nobody else, and what is there by nobody here."""
    _put(api, "hf_token", TOKEN)
    settings.secret_key_path.rename(settings.home / "elsewhere")
    answer = _put(api, "another", TOKEN)
    assert (answer.status_code, answer.json()["code"]) == (503, "secrets_unreadable")
    assert "ANNEAL_SECRET_KEY_FILE" in answer.json()["detail"]
    assert not settings.secret_key_path.exists()
    assert api.client.get("/v1/secrets").status_code == 200
    assert api.client.delete("/v1/secrets/hf_token").status_code == 204


def test_a_new_key_takes_over_in_three_steps_and_secrets_can_be_read_after_each(
    api: ApiServer, settings: Settings
) -> None:
    _put(api, "hf_token", TOKEN)
    old = settings.secret_key_path.read_text()
    new = _new_key()
    settings.secret_key_path.write_text(f"{new}\n{old}")
    assert _values(settings, "hf_token") == {"hf_token": TOKEN}
    with sync_engine(settings.database_url or "", pool_size=0).begin() as connection:
        assert store.rotate_secrets(connection, settings) == 1
        assert store.rotate_secrets(connection, settings) == 0
    assert _values(settings, "hf_token") == {"hf_token": TOKEN}
    settings.secret_key_path.write_text(f"{new}\n")
    assert _values(settings, "hf_token") == {"hf_token": TOKEN}
    settings.secret_key_path.write_text(old)
    with pytest.raises(KeyringError, match="not in this machine's key file"):
        _values(settings, "hf_token")


def test_the_key_file_may_lie_elsewhere(settings: Settings, tmp_path: Path) -> None:
    elsewhere = tmp_path / "keys" / "secret.key"
    with ThreadServer(settings.model_copy(update={"secret_key_file": elsewhere})) as api:
        assert _put(api, "hf_token", TOKEN).status_code == 200
    assert elsewhere.is_file() and not (settings.home / "secret.key").exists()


def test_no_representation_of_a_request_shows_the_value() -> None:
    from anneal.contracts.schemas.administration.secrets import SecretValue

    body = SecretValue.model_validate_json(json.dumps({"value": TOKEN}))
    assert TOKEN not in repr(body) and TOKEN not in body.model_dump_json()
