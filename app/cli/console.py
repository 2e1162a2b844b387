"""Helpers shared by the commands that call the API: connection, error messages, tables and JSON."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from app.cli import error_text
from app.infra.terminal_text import plain_json, plain_line, plain_number, plain_text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from anneal.client.client import Anneal
    from anneal.contracts.errors import FieldError

_json_errors: ContextVar[bool] = ContextVar("json_errors", default=False)
_ca_file: ContextVar[Path | None] = ContextVar("ca_file", default=None)


def use_ca_file(path: Path | None) -> None:
    """Verify the service with the certificates in a file; None: with those of the settings."""
    _ca_file.set(path)


def ca_file() -> Path | None:
    """Return the file of certificates that this command names."""
    return _ca_file.get()


def use_json_errors(is_enabled: bool) -> bool:
    """Print the errors of this command as JSON, if `is_enabled`, and return it."""
    _json_errors.set(is_enabled)
    return is_enabled


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON: one document, or one line per event; an error as one line on standard error.",
        callback=use_json_errors,
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of items to print.")]
After = Annotated[str | None, typer.Option(help="Start after this id, the last one of the previous page.")]

MaxDevices = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=1_000_000,
        help="Quota: devices that its runs may use at a time; a run that would exceed it waits. Unset: any number.",
    ),
]
NewMaxDevices = Annotated[
    int | None,
    typer.Option("--max-devices", min=0, max=1_000_000, help="New number of devices that its runs may use at a time."),
]
NoMaxDevices = Annotated[
    bool, typer.Option("--no-max-devices", help="Let its runs use any number of devices at a time.")
]

# Short, because a user waits at the prompt, but long enough for one retry when the service sends Retry-After: 5.
_PATIENCE = 8.0
_WIDEST_CELL = 80
_NARROWEST_CELL = 12
_GAP = 2


class CommandGroup(TyperGroup):
    """Group whose help shows the first sentence of each command whole, on several lines if needed."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of the group."""
        listed = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, first_sentence(command.help or "")) for name, command in listed if command and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, without the period at its end."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", paragraph, maxsplit=1)[0]


def command_group(help: str) -> typer.Typer:
    """Create the Typer group for one noun."""
    return typer.Typer(
        cls=CommandGroup, help=help, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def new_limit(name: str, value: float | None, is_removed: bool) -> dict[str, Any]:
    """Return the change of a limit that the options ask for; empty if they ask for none."""
    if is_removed and value is not None:
        option = name.replace("_", "-")
        raise typer.BadParameter(f"--no-{option} contradicts --{option}; use only one of them.")
    return {name: value} if is_removed or value is not None else {}


@contextmanager
def open_client() -> "Iterator[Anneal]":
    """Yield a client of the service; print its errors as one sentence and exit with code 1."""
    from anneal.client.client import Anneal
    from anneal.client.errors import AnnealError

    reported: list[AnnealError] = []

    def on_retry(error: AnnealError) -> None:
        if not reported and not _json_errors.get():
            print_note(f"{error_text.in_commands(error.detail)} Trying again for {_PATIENCE:.0f} s …")
        reported.append(error)

    with plain_errors(), Anneal(ca_file=ca_file(), patience=_PATIENCE, on_retry=on_retry) as client:
        yield client


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that the user can fix and exit with code 1. A traceback is a bug in Anneal."""
    from pydantic import ValidationError

    from anneal.client.errors import AnnealError
    from anneal.settings import ClientSettings
    from app.config import Settings

    try:
        yield
    except AnnealError as error:
        fail(*error_text.error_lines(error), code=error.code, errors=error.errors)
    except RunFileError as error:
        fail(str(error), code="invalid_file")
    except ValidationError as error:
        if error.title not in (ClientSettings.__name__, Settings.__name__):
            raise
        settings = ("_".join(("ANNEAL", *map(str, item["loc"]))).upper() for item in error.errors())
        messages = (item["msg"].removeprefix("Value error, ") for item in error.errors())
        fail(" ".join(map("{}: {}.".format, settings, messages)), code="invalid_setting")
    except UnicodeEncodeError as error:
        fail(
            f"{plain_line(error.object)!r} has bytes that are no text in UTF-8: write it again, or convert it.",
            code="not_utf8",
        )
    except BrokenPipeError:
        raise  # the reader closed the pipe (`| head`): Typer exits without a message
    except OSError as error:
        fail(f"{error.filename or 'A file'}: {error.strerror or error}.", code="file_error")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def option_hint(code: str, sentence: str) -> Iterator[None]:
    """Append to errors with this code a sentence that names the matching command-line option."""
    from anneal.client.errors import AnnealError

    try:
        yield
    except AnnealError as error:
        if error.code == code:
            fail(f"{error_text.in_commands(error.detail)} {sentence}", code=error.code, errors=error.errors)
        raise


def print_text(text: object, *, err: bool = False) -> None:
    """Print text; a name or a log line in it, which anyone may have chosen, controls no terminal."""
    typer.echo(plain_text(str(text)), err=err)


def fail(sentence: str, *details: str, code: str = "refused", errors: "Sequence[FieldError]" = ()) -> NoReturn:
    """Print the error on standard error and exit with code 1; with `--json` as an object with the stable `code`."""
    if _json_errors.get():
        items = [item.model_dump(mode="json") for item in errors]
        detail = sentence if items else "\n".join((sentence, *details))
        problem = {"code": code, "detail": detail, "errors": items}
        typer.echo(_json_text(problem, sys.stderr), err=True)
    else:
        for line in (f"anneal: {sentence}", *details):
            print_text(line, err=True)
    raise typer.Exit(1)


def confirm_or_exit(consequence: str, otherwise: str = "Nothing is deleted.") -> None:
    """Print the consequence and ask; unless the answer is yes, print `otherwise` and exit with code 1."""
    print_note(consequence)
    try:
        agreed = typer.confirm("Continue?", err=True)
    except typer.Abort:  # Ctrl-C, or standard input has no answer
        print_note("")
        agreed = False
    if not agreed:
        fail(f"{otherwise} In a script, use --yes.", code="not_confirmed")


def print_note(text: str) -> None:
    """Print a message for people on standard error; scripts read standard output."""
    print_text(text, err=True)


def report_changed(resource: Any, as_json: bool) -> None:
    """Report that the resource is changed."""
    if as_json:
        print_json(resource)
    print_note(f"{resource.id} is changed.")


def report_deleted(id: str, as_json: bool) -> None:
    """Report that the resource is deleted."""
    if as_json:
        print_json({"id": id, "deleted": True})
    else:
        print_note(f"{id} is deleted.")


def print_json(value: "BaseModel | Mapping[str, Any]") -> None:
    """Print one JSON document."""
    typer.echo(_json_text(_plain_value(value), sys.stdout, indent=2))


def json_line(value: "BaseModel | Mapping[str, Any]") -> None:
    """Print one line of JSON and flush it."""
    typer.echo(_json_text(_plain_value(value), sys.stdout, separators=(",", ":")))
    sys.stdout.flush()


def _json_text(value: Any, stream: TextIO, **options: Any) -> str:
    """Return JSON that controls no terminal, with escapes where the stream is not in UTF-8."""
    is_unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
    return plain_json(json.dumps(value, ensure_ascii=not is_unicode, **options))


def split_page(items: "Iterable[BaseModel]", limit: int) -> "tuple[list[Any], bool]":
    """Return the first `limit` items and True if there are more; request `limit + 1` items for this."""
    fetched = list(items)
    return fetched[:limit], len(fetched) > limit


def print_listing(
    items: "Sequence[BaseModel]", has_more: bool, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Print a list as a table with long cells truncated, or as JSON in the format of the API."""
    if as_json:
        print_json({"data": [_plain_value(item) for item in items], "has_more": has_more})
        return
    cells = [[_cut_cell(value_text(cell)) for cell in row] for row in rows]
    print_table([column.upper() for column in columns], cells, fits=True)
    if has_more:
        print_note(
            f"There are more. Use --after {getattr(items[-1], 'id', '')} for the next page, or a higher --limit."
        )


def _cut_cell(text: str) -> str:
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, fits: bool = False) -> None:
    """Print rows under column headers; on a terminal, long cells continue on the next line.

    With `fits`, each row takes one line of a terminal: its last columns are left out, and long cells cut, as needed.
    """
    if not rows:
        print_note("There are none.")
        return
    rows = [[plain_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in [columns, *rows]) for n in range(len(columns))]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False)
        grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
        cut_widths: Sequence[int | None] = _fitting_widths(widths, console.width) if fits else [None] * len(columns)
        for number, (column, width) in enumerate(zip(columns, cut_widths, strict=False)):
            overflow: Literal["ellipsis", "fold"] = "ellipsis" if fits else "fold"
            grid.add_column(column, no_wrap=fits or number == 0, overflow=overflow, width=width)
        for row in rows:
            grid.add_row(*(_escape_markup(cell) for cell in row[: len(cut_widths)]))
        console.print(grid)
        return
    for row in [columns, *rows]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _fitting_widths(widths: Sequence[int], line: int) -> list[int]:
    """Return the widths of the columns that fit on a line of so many characters, of which only the first is whole."""

    def cut_columns(most: int) -> list[int]:
        return [widths[0], *(min(width, most) for width in widths[1:column_count])]

    def is_fitting(columns: Sequence[int]) -> bool:
        return sum(columns) + _GAP * (len(columns) - 1) <= line

    column_count = len(widths)
    while column_count > 1 and not is_fitting(cut_columns(_NARROWEST_CELL)):
        column_count -= 1
    return next(
        (cut_columns(most) for most in range(max(widths), _NARROWEST_CELL, -1) if is_fitting(cut_columns(most))),
        cut_columns(_NARROWEST_CELL),
    )


def print_details(pairs: Mapping[str, Any]) -> None:
    """Print one line for each value that is set."""
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        if value is not None and value != "" and value != []:
            print_text(f"{name.ljust(width)}  {value_text(value)}")


def value_text(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, list | tuple):
        return ", ".join(value_text(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def format_size(count: int) -> str:
    """Format a number of bytes."""
    number = float(count)
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        number /= 1000
    return f"{number:.1f} GB"


@contextmanager
def show_transfer(label: str, total: int | None) -> "Iterator[Any]":
    """Show a progress bar on a terminal for a transfer.

    Yields a callback that takes the number of bytes transferred so far, or None without a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(_escape_markup(label), total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def show_phases() -> "Iterator[Callable[[str, float | None, float | None], None]]":
    """Show the phases of a long work: as a progress bar on a terminal, elsewhere with a line for each phase.

    Yields a callback that takes the phase, with what is done of how much.
    """
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def print_phase(phase: str, _done: float | None, _total: float | None) -> None:
            if phase not in begun:
                begun.add(phase)
                print_note(f"{phase} …")

        yield print_phase
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def update_bar(phase: str, done: float | None, total: float | None) -> None:
            progress.update(task, description=_escape_markup(phase), completed=done or 0, total=total or None)

        yield update_bar


def _escape_markup(text: str) -> str:
    from rich.markup import escape

    return escape(plain_line(text))


def _plain_value(value: "BaseModel | Mapping[str, Any]") -> Any:
    return value if isinstance(value, Mapping) else value.model_dump(mode="json", by_alias=True)


class RunFileError(ValueError):
    """Invalid run file or `--set` option."""
