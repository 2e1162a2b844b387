"""How a command ends: what a user can cause or mend is told in a sentence, a traceback is a bug of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from app.home import HomeError

if TYPE_CHECKING:  # what a help text does not need takes most of its time
    from pydantic import ValidationError

    from app.config import Settings


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can cause or mend is told in a sentence, with exit code 1; a traceback is a bug of ours."""
    from pydantic import ValidationError
    from sqlalchemy.exc import OperationalError, ProgrammingError

    try:
        yield
    except HomeError as error:
        sentence = str(error)
    except ValidationError as error:
        sentence = _setting_error(error)
    except OperationalError as error:
        reason = " ".join(str(error.orig).split())
        sentence = f"The database does not answer ({reason}); start it, or correct ANNEAL_DATABASE_URL."
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) != "42P01":  # undefined_table
            raise
        sentence = "The database has no tables of Anneal yet: run `anneal migrate`."
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    else:
        return
    typer.echo(f"anneal: {sentence}", err=True)
    raise typer.Exit(1)


def _setting_error(error: "ValidationError") -> str:
    return " ".join(
        f"ANNEAL_{'_'.join(str(part) for part in item['loc']).upper()}: {item['msg']}." for item in error.errors()
    )


def given_settings() -> "Settings":
    """Settings as the environment has them."""
    from app.config import get_settings

    return get_settings()


def settings_with_urls() -> "Settings":
    """Settings with URLs, of the running `anneal up` where none are set."""
    from app.embedded import resolve_urls

    return resolve_urls(given_settings())
