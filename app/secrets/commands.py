"""`anneal secrets`: tokens that runs and imports need, set by whoever has the database and the key file."""

import sys
from typing import Annotated, Any

import typer

from app.commands.console import AsJson, document
from app.home import HomeError
from app.plain_errors import plain_errors, settings_with_urls

secrets = typer.Typer(
    help="Tokens that runs and imports need, sealed in the database. Example: `anneal secrets set hf_token`.",
    no_args_is_help=True,
)


@secrets.command("set")
def set_secret(
    name: Annotated[str, typer.Argument(help="Such as hf_token, the token of the Hugging Face hub.")],
    as_json: AsJson = False,
) -> None:
    """Keep a secret: typed without an echo, or from standard input. It cannot be read again.

    Example: `anneal secrets set hf_token < token.txt`
    """
    from app.audit.log import of_command
    from app.db import sync_engine
    from app.secrets import store
    from app.secrets.keyring import KeyringError

    with plain_errors():
        settings = settings_with_urls()
        try:
            value = typer.prompt(name, hide_input=True) if sys.stdin.isatty() else sys.stdin.read(8192).rstrip("\r\n")
            store.check(name, value)
            with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
                keyring = store.for_sealing(connection, settings)
                connection.execute(store.put(keyring, name, value, None))
                connection.execute(of_command("secrets set", name))
        except UnicodeDecodeError:
            raise HomeError("What came is no text: a secret is visible ASCII, without spaces.") from None
        except (ValueError, KeyringError) as error:
            raise HomeError(str(error)) from None
    _tell(f"{name} is set.", {"name": name, "set": True}, as_json)


@secrets.command("list")
def list_secrets(as_json: AsJson = False) -> None:
    """List names and when they were set; values cannot be shown.

    Example: `anneal secrets list`
    """
    from app.db import sync_engine
    from app.secrets import store
    from app.secrets.schemas import SecretList, SecretView

    with plain_errors():
        settings = settings_with_urls()
        with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").connect() as connection:
            rows = connection.execute(store.listing().with_only_columns(*store.SHOWN)).all()
            if as_json:
                document(SecretList(data=[SecretView.model_validate(row) for row in rows]))
                return
            for row in rows:
                typer.echo(f"{row.name:<32}  set {row.updated_at:%Y-%m-%d %H:%M}  key {row.key_id}")


@secrets.command("delete")
def delete_secret(
    name: Annotated[str, typer.Argument(help="As `anneal secrets list` shows it.")], as_json: AsJson = False
) -> None:
    """Forget a secret; runs that have it already keep it to their end.

    Example: `anneal secrets delete hf_token`
    """
    from app.audit.log import of_command
    from app.db import sync_engine
    from app.secrets import store

    with plain_errors():
        settings = settings_with_urls()
        with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
            if connection.scalar(store.remove(name)) is None:
                raise HomeError(f"There is no secret {name}; `anneal secrets list` shows what there is.")
            connection.execute(of_command("secrets delete", name))
    _tell(f"{name} is deleted.", {"name": name, "deleted": True}, as_json)


@secrets.command("rotate")
def rotate(as_json: AsJson = False) -> None:
    """Seal all secrets with the first key of the key file.

    To change keys: put a new one into the first line (`openssl rand -base64 32`) of the file on every machine, run
    this once, then take the old line out.

    Example: `anneal secrets rotate`
    """
    from app.audit.log import of_command
    from app.db import sync_engine
    from app.secrets import store
    from app.secrets.keyring import KeyringError

    with plain_errors():
        settings = settings_with_urls()
        try:
            with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
                changed = store.rotate(connection, settings)
                connection.execute(of_command("secrets rotate", "*"))
        except KeyringError as error:
            raise HomeError(str(error)) from None
    sentence = f"{changed} secrets were sealed anew; all are under the first key now."
    _tell(sentence, {"sealed_anew": changed}, as_json)


def _tell(sentence: str, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        document(found)
    else:
        typer.echo(sentence)
