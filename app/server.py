"""Listening socket and HTTP server of the API."""

import asyncio
import errno
import os
import resource
import signal
import socket
import time
from contextlib import suppress

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from anneal.local_service import read_json
from app.api.uvicorn_protocol import Protocol
from app.config import Settings
from app.infra.db import is_away, sync_engine
from app.infra.errors import SetupError
from app.infra.logs import log_setup
from app.infra.private_files import try_write_private_json
from app.tables import migrate

REQUEST_GRACE_SECONDS = 20
"""Seconds that requests in flight, such as uploads, have to finish on shutdown. Streams are closed at once."""
_FLUSH_SECONDS = 2.5
"""Seconds a client has to receive the end of a response: a rolling deploy closes all streams within 5 s."""


def open_listener(settings: Settings) -> socket.socket:
    """Return the listening socket on `host` and `port` (0: any free port); raises `SetupError` if that fails."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        if isinstance(error, socket.gaierror):
            raise SetupError(f"ANNEAL_HOST={settings.host} is not an address of this machine.") from None
        if isinstance(error, PermissionError):
            raise SetupError(f"Permission denied to listen on {where}; set ANNEAL_PORT to a port above 1023.") from None
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"Port {settings.port} on {settings.host} is in use by another program; stop it, or set ANNEAL_PORT "
                "to another port (0 selects any free port)."
            ) from None
        raise SetupError(f"Cannot listen on {where}: {error.strerror}; set ANNEAL_HOST and ANNEAL_PORT.") from None
    return listener


def base_url(listener: socket.socket) -> str:
    """Return the URL at which a client on this machine reaches the API."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn server that handles signals sent before startup and drops clients that do not read on shutdown."""

    def __init__(self, stop_signals: list[int], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_signals = stop_signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._stop_signals:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut_connections(), name="cut connections")
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_connections(self) -> None:
        """Abort connections that are closing and whose client does not read the remaining bytes."""
        closing_since: dict[object, float] = {}
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                transport = connection.transport
                if transport.is_closing() and now - closing_since.setdefault(connection, now) > _FLUSH_SECONDS:
                    transport.abort()


def serve_api(settings: Settings, listener: socket.socket) -> None:
    """Serve the API until SIGTERM or SIGINT; publishes URL and process id in `run/api.json`."""
    stop_signals: list[int] = []
    # For a signal sent before uvicorn installs its handlers; uvicorn re-raises its own after the shutdown.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda number, _: stop_signals.append(number))
    # Each stream needs a descriptor, and the usual soft limit is 1,024, for programs that call `select`.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    from app.main import create_app

    log_setup.set_up(settings.log_format)
    check_schema_version(settings)
    info_file = settings.home / "run" / "api.json"
    try_write_private_json(info_file, {"url": base_url(listener), "pid": os.getpid()})
    server = Server(
        stop_signals,
        uvicorn.Config(
            create_app(settings),
            loop="uvloop",
            http=Protocol,
            ws="none",
            lifespan="on",
            access_log=False,  # app.api.middleware.request_metrics writes it, with ids and without query strings
            log_config=None,
            log_level="info",
            # A client could bypass the limit on wrong keys with a forged address header.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=REQUEST_GRACE_SECONDS,
        ),
    )
    server.run(sockets=[listener])
    if (read_json(info_file) or {}).get("pid") == os.getpid():
        with suppress(OSError):
            info_file.unlink()
    if not server.started:
        raise SetupError("The API did not start; the lines above say why.")


def check_schema_version(settings: Settings) -> None:
    """Check the schema's revision: raises `SetupError` if it is too old; an unreachable database is not an error."""
    engine = sync_engine(settings.database_url or "", pool_size=0, name="anneal-start")
    try:
        with engine.connect() as connection:
            older = migrate.schema_error(migrate.current_revision(connection))
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        return
    finally:
        engine.dispose()
    if older:
        raise SetupError(older)
