"""What all commands over HTTP share: the way to the service, sentences for what goes wrong, tables and JSON."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from app.client import Anneal

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id that `anneal runs list` shows.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: one document, or a line for each event.")]
Limit = Annotated[int, typer.Option(min=1, help="Most items to print.")]
After = Annotated[str | None, typer.Option(help="Go on behind this id, the last one of the list before.")]

# Who waits at a prompt wants to be told soon; but a service that asks to come back in 5 s is asked once more.
_PATIENCE = 8.0
_WIDEST_CELL = 80


def noun(help: str) -> typer.Typer:
    """The commands of one noun."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@contextmanager
def connected() -> "Iterator[Anneal]":
    """A client of the service; what it cannot do is told in a sentence, with exit code 1."""
    from app.client import Anneal

    with plain_errors(), Anneal(patience=_PATIENCE) as client:
        yield client


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can mend is told, with exit code 1; a traceback is a bug of ours."""
    from pydantic import ValidationError

    from app.client.errors import AnnealError
    from app.commands.run_file import RunFileError
    from app.config import ClientSettings

    try:
        yield
    except AnnealError as error:
        fail(error.detail, *(f"  {item.field}: {item.message}" for item in error.errors))
    except RunFileError as error:
        fail(str(error))
    except ValidationError as error:
        if error.title != ClientSettings.__name__:
            raise
        fail(" ".join(f"ANNEAL_{str(item['loc'][0]).upper()}: {item['msg']}." for item in error.errors()))
    except BrokenPipeError:
        raise  # nobody reads on (`| head`): typer ends it without a word
    except OSError as error:
        fail(f"{error.filename or 'A file'}: {error.strerror or error}.")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def option_told(code: str, sentence: str) -> Iterator[None]:
    """Beside an error with this code, how what the service proposes is written on the command line."""
    from app.client.errors import AnnealError

    try:
        yield
    except AnnealError as error:
        if error.code == code:
            fail(f"{error.detail} {sentence}")
        raise


def fail(sentence: str, *details: str) -> NoReturn:
    """Say why on standard error, and end with code 1."""
    for line in (f"anneal: {sentence}", *details):
        typer.echo(line, err=True)
    raise typer.Exit(1)


def note(text: str) -> None:
    """Something for people, beside what a script reads from standard output."""
    typer.echo(text, err=True)


def deleted(id: str, as_json: bool) -> None:
    """What was asked for is done, and there is nothing left to show."""
    if as_json:
        document({"id": id, "deleted": True})
    else:
        note(f"{id} is deleted.")


def document(value: "BaseModel | Mapping[str, Any]") -> None:
    """One JSON document."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def json_line(value: "BaseModel | Mapping[str, Any]") -> None:
    """One line of a stream of JSON."""
    typer.echo(json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")))
    sys.stdout.flush()


def page(items: "Iterable[BaseModel]", limit: int) -> "tuple[list[Any], bool]":
    """The first `limit` items, and whether there are more; ask for one more than that."""
    found = list(items)
    return found[:limit], len(found) > limit


def listing(
    items: "Sequence[BaseModel]", has_more: bool, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """A list, as a table with long cells cut, or as JSON in the form of the API."""
    if as_json:
        document({"data": [_plain(item) for item in items], "has_more": has_more})
        return
    table(columns, [[_cut(shown(cell)) for cell in row] for row in rows])
    if has_more:
        note(f"There are more: --after {getattr(items[-1], 'id', '')} goes on, --limit takes more at once.")


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns under their names; on a terminal fitted to its width."""
    if not rows:
        note("There are none.")
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, header_style="bold", pad_edge=False)
        for number, column in enumerate(columns):
            grid.add_column(column.upper(), no_wrap=number == 0, overflow="fold")
        for row in rows:
            grid.add_row(*(_unmarked(cell) for cell in row))
        Console(highlight=False).print(grid)
        return
    widths = [max(len(row[n]) for row in [columns, *rows]) for n in range(len(columns))]
    for row in [[column.upper() for column in columns], *rows]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def details(pairs: Mapping[str, Any]) -> None:
    """One thing: a line for each fact that there is."""
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        if value is not None and value != "" and value != []:
            typer.echo(f"{name.ljust(width)}  {shown(value)}")


def shown(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def size(count: int) -> str:
    """A number of bytes."""
    number = float(count)
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        number /= 1000
    return f"{number:.1f} GB"


@contextmanager
def transfer(label: str, total: int) -> "Iterator[Any]":
    """A bar on a terminal for bytes that go over the line; yields what is to be called with their number."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(_unmarked(label), total=total)
        yield lambda done: progress.update(task, completed=done)


def _unmarked(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _plain(value: "BaseModel | Mapping[str, Any]") -> Any:
    return value if isinstance(value, Mapping) else value.model_dump(mode="json", by_alias=True)
