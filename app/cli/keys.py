"""`anneal keys`: create, list and revoke API keys on the server."""

from datetime import timedelta
from typing import Annotated

import typer

from app.cli.console import AsJson, document, say
from app.cli.errors import plain_errors, settings_with_urls
from app.infra.errors import SetupError

keys = typer.Typer(help="Manage API keys. Example: `anneal keys create laptop --scope write`.", no_args_is_help=True)


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name to identify the key by.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="Scope: read, write or admin; repeat for several. [default: read write]")
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(min=0.001, max=36_500, help="Days until the key expires. Unset: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it cannot be shown again.

    Example: `anneal keys create laptop --scope read --scope write --expires-days 90`
    """
    from app.api.authorization import SCOPES
    from app.api_keys.service import create_key_sync, list_keys_sync

    with plain_errors():
        if unknown := set(scope or []) - set(SCOPES):
            raise SetupError(f"Unknown scope {', '.join(sorted(unknown))}; the scopes are {', '.join(SCOPES)}.")
        lasts = None if expires_days is None else timedelta(days=expires_days)
        settings = settings_with_urls()
        key = create_key_sync(settings, name, scope or ["read", "write"], lasts)
        if as_json:
            view = next(one for one in list_keys_sync(settings) if key.startswith(one.prefix))
            document({"id": view.id, "name": view.name, "scopes": view.scopes, "key": key})
        else:
            say(key)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List all keys with id, prefix, scopes and state.

    Example: `anneal keys list`
    """
    from app.api_keys.service import list_keys_sync
    from app.contracts.schemas.api_keys import KeyView
    from app.contracts.schemas.page import Page

    with plain_errors():
        found = list_keys_sync(settings_with_urls())
        if as_json:
            document(Page[KeyView](data=found, has_more=False))
            return
        for key in found:
            if key.revoked_at:
                state = f"revoked {key.revoked_at:%Y-%m-%d}"
            elif key.expires_at:
                state = f"expires {key.expires_at:%Y-%m-%d}"
            else:
                state = f"last used {key.last_used_at:%Y-%m-%d}" if key.last_used_at else "never used"
            say(f"{key.id}  {key.prefix}…  {','.join(key.scopes):<16}  {state:<20}  {key.name}")


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Id of the key, from `anneal keys list`.")], as_json: AsJson = False
) -> None:
    """Revoke a key: within 30 seconds it is rejected.

    Example: `anneal keys revoke key_01k…`
    """
    from app.api_keys.service import revoke_key_sync

    with plain_errors():
        if not revoke_key_sync(settings_with_urls(), key_id):
            raise SetupError(f"There is no key {key_id}; `anneal keys list` shows all keys.")
    if as_json:
        document({"id": key_id, "revoked": True})
    else:
        say(f"{key_id} is revoked.")
