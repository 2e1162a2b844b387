"""`anneal keys`: create, list, edit and revoke API keys, on the server or over HTTP with an admin key."""

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import (
    AsJson,
    CommandGroup,
    MaxDevices,
    NewMaxDevices,
    NoMaxDevices,
    new_limit,
    open_client,
    print_json,
    print_listing,
    print_text,
)
from app.cli.errors import environment_settings, plain_errors, settings_with_urls
from app.infra.errors import SetupError

if TYPE_CHECKING:
    from anneal.contracts.schemas.administration.api_keys import KeyView

keys = typer.Typer(
    cls=CommandGroup,
    help="Manage API keys. On the server this needs no key; with ANNEAL_URL it needs one with the scope admin. "
    "Example: `anneal keys create laptop --scope write`.",
    no_args_is_help=True,
)

MaxDeviceHours = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1e9,
        help="Budget: device-hours that its runs may use in a calendar month; once they are used, no run starts. "
        "Unset: any number.",
    ),
]
KeyId = Annotated[str, typer.Argument(help="Id of the key, from `anneal keys list`.")]


def _is_remote() -> bool:
    """Return True if the environment names a service and no database: the keys are those of that service."""
    from anneal.settings import ClientSettings

    with plain_errors():
        return ClientSettings().url is not None and environment_settings().database_url is None


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name to identify the key by.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="Scope: read, write or admin; repeat for several. [default: read write]")
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(min=0.001, max=36_500, help="Days until the key expires. Unset: never.")
    ] = None,
    max_devices: MaxDevices = None,
    max_device_hours: MaxDeviceHours = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it cannot be shown again.

    Example: `anneal keys create laptop --scope read --scope write --expires-days 90`
    """
    if _is_remote():
        with open_client() as client:
            created = client.keys.create(
                name,
                scopes=scope,  # type: ignore[arg-type]
                expires_days=expires_days,
                max_devices=max_devices,
                max_device_hours=max_device_hours,
            )
        fields: dict[str, object] = created.model_dump(include={"id", "name", "scopes", "key"})
    else:
        fields = _create_here(name, scope or ["read", "write"], expires_days, max_devices, max_device_hours)
    if as_json:
        print_json(fields)
    else:
        print_text(fields["key"])


def _create_here(
    name: str,
    scopes: list[str],
    expires_days: float | None,
    max_devices: int | None,
    max_device_hours: float | None,
) -> dict[str, object]:
    from app.api.authorization import SCOPES
    from app.api_keys.service import create_key_sync, list_keys_sync

    with plain_errors():
        if unknown := set(scopes) - set(SCOPES):
            raise SetupError(f"Unknown scope {', '.join(sorted(unknown))}; the scopes are {', '.join(SCOPES)}.")
        lasts = None if expires_days is None else timedelta(days=expires_days)
        settings = settings_with_urls()
        key = create_key_sync(settings, name, scopes, lasts, max_devices, max_device_hours)
        view = next(one for one in list_keys_sync(settings) if key.startswith(one.prefix))
    return {"id": view.id, "name": view.name, "scopes": view.scopes, "key": key}


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List all keys with id, name, scopes, state, prefix, quota of devices and budget of device-hours a month.

    Example: `anneal keys list`
    """
    if _is_remote():
        with open_client() as client:
            keys_read = list(client.keys.list())
    else:
        from app.api_keys.service import list_keys_sync

        with plain_errors():
            keys_read = list_keys_sync(settings_with_urls())
    rows = [
        (key.id, key.name, key.scopes, _key_state(key), f"{key.prefix}…", key.max_devices, key.max_device_hours)
        for key in keys_read
    ]
    columns = ("id", "name", "scopes", "state", "key", "max devices", "max hours")
    print_listing(keys_read, False, as_json, columns, rows)


def _key_state(key: "KeyView") -> str:
    if key.revoked_at:
        return f"revoked {key.revoked_at:%Y-%m-%d}"
    if key.expires_at:
        return f"expires {key.expires_at:%Y-%m-%d}"
    return f"last used {key.last_used_at:%Y-%m-%d}" if key.last_used_at else "never used"


@keys.command("edit")
def edit_key(
    key_id: KeyId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    max_devices: NewMaxDevices = None,
    no_max_devices: NoMaxDevices = False,
    max_device_hours: MaxDeviceHours = None,
    no_max_device_hours: Annotated[
        bool, typer.Option("--no-max-device-hours", help="Let its runs use any number of device-hours.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Change the name, the quota of devices or the monthly budget of a key; fields that are not given are kept.

    Example: `anneal keys edit key_01k… --max-devices 4`
    """
    limits = new_limit("max_devices", max_devices, no_max_devices)
    limits |= new_limit("max_device_hours", max_device_hours, no_max_device_hours)
    if _is_remote():
        with open_client() as client:
            changed = client.keys.update(key_id, name=name, **limits)
    else:
        changed = _edit_here(key_id, limits if name is None else {"name": name, **limits})
    if as_json:
        print_json(changed)
    else:
        print_text(f"{key_id} is changed.")


def _edit_here(key_id: str, changes: dict[str, Any]) -> "KeyView":
    from pydantic import ValidationError

    from anneal.contracts.schemas.administration.api_keys import KeyEdit
    from app.api_keys.service import edit_key_sync

    with plain_errors():
        try:
            body = KeyEdit(**changes)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise SetupError(f"The key is not changed. {problems}.") from None
        changed = edit_key_sync(settings_with_urls(), key_id, body)
        if changed is None:
            raise _unknown_key(key_id)
    return changed


@keys.command("revoke")
def revoke_key(key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key: within 30 seconds it is rejected. Over HTTP the last key with the scope admin is kept.

    Example: `anneal keys revoke key_01k…`
    """
    if _is_remote():
        with open_client() as client:
            client.keys.revoke(key_id)
    else:
        from app.api_keys.service import revoke_key_sync

        with plain_errors():
            if not revoke_key_sync(settings_with_urls(), key_id):
                raise _unknown_key(key_id)
    if as_json:
        print_json({"id": key_id, "revoked": True})
    else:
        print_text(f"{key_id} is revoked.")


def _unknown_key(key_id: str) -> SetupError:
    return SetupError(f"There is no key {key_id}; `anneal keys list` shows all keys.")
