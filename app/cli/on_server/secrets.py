"""Commands `anneal secrets`: manage tokens for runs and imports; they need the database and the key file."""

import sys
from typing import Annotated, Any

import typer

from app.cli.console import AsJson, CommandGroup, print_json, print_text
from app.cli.errors import plain_errors, settings_with_urls
from app.infra.errors import SetupError

secrets = typer.Typer(
    cls=CommandGroup,
    help="Manage tokens for runs and imports, encrypted in the database. Example: `anneal secrets set hf_token`.",
    no_args_is_help=True,
)


@secrets.command("set")
def set_secret(
    name: Annotated[str, typer.Argument(help="Name, such as hf_token for the token of the Hugging Face Hub.")],
    as_json: AsJson = False,
) -> None:
    """Set a secret, typed without echo or read from standard input. Its value cannot be shown again.

    Example: `anneal secrets set hf_token < token.txt`
    """
    from app.audit.log import command_entry
    from app.infra.db import sync_engine
    from app.secrets import store
    from app.secrets.keyring import KeyringError

    with plain_errors():
        settings = settings_with_urls()
        try:
            value = typer.prompt(name, hide_input=True) if sys.stdin.isatty() else sys.stdin.read(8192).rstrip("\r\n")
            store.check_secret(name, value)
            with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
                keyring = store.encryption_keyring(connection, settings)
                connection.execute(store.put_secret(keyring, name, value, None))
                connection.execute(command_entry("secrets set", name))
        except UnicodeDecodeError:
            raise SetupError("The input is not text: a secret must be visible ASCII without spaces.") from None
        except (ValueError, KeyringError) as error:
            raise SetupError(str(error)) from None
    _print_result(f"{name} is set.", {"name": name, "set": True}, as_json)


@secrets.command("list")
def list_secrets(as_json: AsJson = False) -> None:
    """List names of secrets and when they were set; values cannot be shown.

    Example: `anneal secrets list`
    """
    from anneal.contracts.schemas.administration.secrets import SecretList, SecretView
    from app.infra.db import sync_engine
    from app.secrets import store

    with plain_errors():
        settings = settings_with_urls()
        with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").connect() as connection:
            rows = connection.execute(store.select_secrets().with_only_columns(*store.SHOWN)).all()
            if as_json:
                print_json(SecretList(data=[SecretView.model_validate(row) for row in rows]))
                return
            for row in rows:
                print_text(f"{row.name:<32}  set {row.updated_at:%Y-%m-%d %H:%M}  key {row.key_id}")


@secrets.command("delete")
def delete_secret(
    name: Annotated[str, typer.Argument(help="Name as shown by `anneal secrets list`.")], as_json: AsJson = False
) -> None:
    """Delete a secret; running attempts that have received it keep it until they end.

    Example: `anneal secrets delete hf_token`
    """
    from app.audit.log import command_entry
    from app.infra.db import sync_engine
    from app.secrets import store

    with plain_errors():
        settings = settings_with_urls()
        with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
            if connection.scalar(store.remove_secret(name)) is None:
                raise SetupError(f"There is no secret {name}; list all secrets with `anneal secrets list`.")
            connection.execute(command_entry("secrets delete", name))
    _print_result(f"{name} is deleted.", {"name": name, "deleted": True}, as_json)


@secrets.command("rotate")
def rotate(as_json: AsJson = False) -> None:
    """Encrypt all secrets with the first key of the key file.

    To change keys, insert a new key (`openssl rand -base64 32`) as the first line of the file on every machine, run
    this command once, then remove the old line.

    Example: `anneal secrets rotate`
    """
    from app.audit.log import command_entry
    from app.infra.db import sync_engine
    from app.secrets import store
    from app.secrets.keyring import KeyringError

    with plain_errors():
        settings = settings_with_urls()
        try:
            with sync_engine(settings.database_url or "", pool_size=0, name="anneal-secrets").begin() as connection:
                changed = store.rotate_secrets(connection, settings)
                connection.execute(command_entry("secrets rotate", "*"))
        except KeyringError as error:
            raise SetupError(str(error)) from None
    sentence = f"{changed} secrets were encrypted again; all secrets now use the first key."
    _print_result(sentence, {"sealed_anew": changed}, as_json)


def _print_result(sentence: str, problems: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(problems)
    else:
        print_text(sentence)
