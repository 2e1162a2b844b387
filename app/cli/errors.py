"""Error handling of commands: errors that a user can fix become one sentence; a traceback means a bug."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from app.cli.console import fail
from app.infra.errors import SetupError

if TYPE_CHECKING:  # these imports would take most of the time of `--help`
    from pydantic import ValidationError

    from app.config import Settings


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can fix as one sentence and exit with code 1; other exceptions propagate."""
    from pydantic import ValidationError
    from sqlalchemy.exc import OperationalError, ProgrammingError

    from app.infra.files.disk_space import FULL

    try:
        yield
    except SetupError as error:
        sentence = str(error)
    except ValidationError as error:
        sentence = _setting_error(error)
    except OperationalError as error:
        reason = " ".join(str(error.orig).split())
        sentence = f"The database does not answer ({reason}); start it, or correct ANNEAL_DATABASE_URL."
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) != "42P01":  # undefined_table
            raise
        sentence = "The database does not have Anneal's tables yet: run `anneal migrate`."
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f" of {error.filename}" if error.filename else ""
        sentence = f"The disk{where} is full ({error.strerror}); free some space, and run the command again."
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    else:
        return
    fail(sentence, code="setup")


def _setting_error(error: "ValidationError") -> str:
    sentences = []
    for item in error.errors():
        name = "_".join(str(part) for part in item["loc"]).upper()
        message = item["msg"].removeprefix("Value error, ")
        if message.startswith("Input should "):  # without the value, which may be a secret
            must = message.removeprefix("Input should ").partition(", unable to parse")[0]
            sentences.append(f"ANNEAL_{name} must {must}; correct it in the environment.")
        else:
            sentences.append(f"ANNEAL_{name}: {message}." if name else f"{message}.")  # two settings that contradict
    return " ".join(sentences)


def environment_settings() -> "Settings":
    """Return the settings from the environment."""
    from app.config import get_settings

    return get_settings()


def settings_with_urls() -> "Settings":
    """Return the settings with URLs, using those of the running `anneal up` where none are set."""
    from app.infra.server_urls import resolve_urls

    return resolve_urls(environment_settings())
