"""PostgreSQL's client programs: which ones to use, dump and restore of a database."""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo
from sqlalchemy import create_engine

from app.config import database_client_environment
from app.infra.db import driver_url
from app.infra.errors import SetupError
from app.infra.process.children import last_lines, start_child, stop_child
from app.standalone.postgres import server_binaries

Report = Callable[[int], None]
"""Takes the number of bytes done so far."""

_POLL_SECONDS = 0.2
_STOP_SECONDS = 5.0
_PIECE_BYTES = 1 << 20
_SHOWN_ERROR_BYTES = 600
_HEADER_LINES = 40
_LOCK_WAIT_MS = 60_000
"""Time that pg_dump waits for a table which a migration has locked."""
_TRANSACTION_TIMEOUT = b"SET transaction_timeout = 0;\n"
_HAS_TRANSACTION_TIMEOUT = 17


@dataclass(frozen=True)
class ClientPrograms:
    """Folder with `pg_dump`, `pg_restore` and `psql` of one version."""

    folder: Path
    major: int

    def program_path(self, name: str) -> str:
        """Return the path of a program."""
        return str(self.folder / name)


def find_client(least_major: int) -> ClientPrograms:
    """Return client programs of at least this major version: those of the wheel, otherwise those on the path.

    Raises:
        SetupError: There are none.
    """
    clients = []
    for folder in _client_folders():
        major = _major_version(folder / "pg_dump")
        if major is not None and (folder / "pg_restore").exists() and (folder / "psql").exists():
            clients.append(ClientPrograms(folder, major))
    fitting = next((client for client in clients if client.major >= least_major), None)
    if fitting is None:
        newest = max((client.major for client in clients), default=None)
        present = "none is installed" if newest is None else f"the newest one here is {newest}"
        raise SetupError(
            f"This needs pg_dump, pg_restore and psql of PostgreSQL {least_major} or newer, and {present}: install the "
            f"client of that version (Debian: apt-get install postgresql-client-{least_major})."
        )
    return fitting


def _client_folders() -> list[Path]:
    folders = []
    try:
        folders.append(server_binaries())
    except SetupError:
        pass  # an installation with a server of its own need not have the wheel
    if (program := shutil.which("pg_dump")) is not None:
        folders.append(Path(program).parent)
    return folders


def _major_version(program: Path) -> int | None:
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\) (\d+)", done.stdout)
    return int(match[1]) if done.returncode == 0 and match else None


@dataclass(frozen=True)
class DatabaseAddress:
    """Database as client programs address it."""

    conninfo: str
    """Connection string without the password."""
    password: str | None

    @classmethod
    def from_url(cls, url: str) -> "DatabaseAddress":
        """Return the address in a URL of SQLAlchemy or PostgreSQL."""
        engine = create_engine(driver_url(url))
        _, parameters = engine.dialect.create_connect_args(engine.url)
        password = parameters.pop("password", None)
        # The rest is for the driver itself.
        options = {option.keyword.decode() for option in Conninfo.get_defaults()}
        return cls(make_conninfo(**{name: it for name, it in parameters.items() if name in options}), password)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a client program."""
        return database_client_environment(self.password)


def dump_database(
    address: DatabaseAddress, client: ClientPrograms, snapshot: str | None, target: Path, report: Report
) -> None:
    """Write a dump of the database to `target`; `snapshot`: exported by a transaction that is still open.

    Raises:
        SetupError: pg_dump failed; the message has its last lines.
    """
    # Owner and rights are those of the role that restores it.
    options = ["--format=custom", "--no-owner", "--no-privileges", "--no-password"]
    options += [f"--lock-wait-timeout={_LOCK_WAIT_MS}", f"--file={target}", f"--dbname={address.conninfo}"]
    if snapshot is not None:
        options.append(f"--snapshot={snapshot}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "pg_dump.log"
        child = start_child([client.program_path("pg_dump"), *options], log=log, environment=address.environment)
        try:
            while child.poll() is None:
                report(target.stat().st_size if target.exists() else 0)
                time.sleep(_POLL_SECONDS)
        finally:
            stop_child(child, _STOP_SECONDS)
        if child.returncode != 0:
            raise SetupError(f"The database could not be dumped: {_one_line(last_lines(log))}")
    target.chmod(0o600)


def restore_database(
    address: DatabaseAddress,
    client: ClientPrograms,
    server_major: int,
    source: Path,
    before: Sequence[str],
    report: Report,
) -> None:
    """Execute the statements `before` and then a dump in one transaction: completely or not at all.

    Raises:
        SetupError: The dump is damaged, or the database refuses it.
    """
    with tempfile.TemporaryFile() as reader_errors, tempfile.TemporaryFile() as writer_errors:
        reader = subprocess.Popen(
            [client.program_path("pg_restore"), "--no-owner", "--no-privileges", "--file=-", str(source)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=reader_errors,
            env=address.environment,
        )
        writer = subprocess.Popen(
            [client.program_path("psql"), "--no-psqlrc", "--quiet", "--no-password", "--set=ON_ERROR_STOP=1",
             "--output=/dev/null", f"--dbname={address.conninfo}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=writer_errors,
            env=address.environment,
        )  # fmt: skip
        try:
            is_sent = _send_script(reader, writer, server_major, before, report)
            if is_sent and reader.wait() != 0:
                raise SetupError(f"The dump {source} cannot be read: {_error_tail(reader_errors)}")
            if is_sent:
                # Only now: where the script ends early, psql ends without a commit.
                is_sent = _commit_transaction(writer)
            if writer.wait() != 0 or not is_sent:
                raise SetupError(f"The database refuses the backup: {_error_tail(writer_errors)}")
        finally:
            for process in (reader, writer):
                process.kill()
                process.wait()


def _send_script(
    reader: "subprocess.Popen[bytes]",
    writer: "subprocess.Popen[bytes]",
    server_major: int,
    before: Sequence[str],
    report: Report,
) -> bool:
    """Send the script of the dump to psql; return False if psql ended before its end."""
    assert reader.stdout is not None and writer.stdin is not None  # noqa: S101
    sent = 0
    try:
        writer.stdin.write("".join(f"{statement};\n" for statement in ("BEGIN", *before)).encode())
        for _ in range(_HEADER_LINES):
            line = reader.stdout.readline()
            if server_major >= _HAS_TRANSACTION_TIMEOUT or line != _TRANSACTION_TIMEOUT:
                writer.stdin.write(line)
        while piece := reader.stdout.read(_PIECE_BYTES):
            writer.stdin.write(piece)
            sent += len(piece)
            report(sent)
        writer.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _commit_transaction(writer: "subprocess.Popen[bytes]") -> bool:
    assert writer.stdin is not None  # noqa: S101
    try:
        writer.stdin.write(b"\nCOMMIT;\n")
        writer.stdin.close()
    except BrokenPipeError:
        return False
    return True


def _error_tail(file: IO[bytes]) -> str:
    file.seek(0)
    return _one_line(file.read()[-_SHOWN_ERROR_BYTES:].decode(errors="replace"))


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "it gave no reason"
