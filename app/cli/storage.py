"""Commands about the storage, on the server: `storage copy`."""

import os
import sys
from typing import Annotated

import typer

from app.cli.errors import plain_errors, settings_with_urls

storage = typer.Typer(help="Manage the storage of this service.", no_args_is_help=True, rich_markup_mode=None)


@storage.callback()
def _group() -> None:
    """Have `copy` as a command of its own, although it is the only one."""


@storage.command("copy")
def copy(
    url: Annotated[str, typer.Argument(help="URL of the object store, such as s3://bucket/prefix.")],
) -> None:
    """Copy the storage from the folder ANNEAL_STORAGE to an object store, of a service that is stopped.

    Everything is verified on its way, and a copy that was interrupted continues. Then set ANNEAL_STORAGE to the URL on
    every host. Exit code 1 if a file of the folder is missing or corrupt; the others are copied.

    Example: `anneal storage copy s3://bucket/prefix`
    """
    with plain_errors():
        settings_with_urls()  # reports a missing URL as a readable error
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker.storage_copy", url])
