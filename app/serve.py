"""The API's socket and its server."""

import errno
import os
import signal
import socket

from app.config import Settings
from app.home import HomeError, make_private_folder, write_private_json

_STREAM_GRACE_SECONDS = 5  # a rolling deploy closes streams within this time; their readers resume by cursor


def listen(settings: Settings) -> socket.socket:
    """The listening socket on `host` and `port` (0: any free one); HomeError when it cannot be had."""
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
            raise HomeError(f"ANNEAL_HOST={settings.host} is no address of this machine.") from None
        if isinstance(error, PermissionError):
            raise HomeError(f"You may not listen on {where}; set ANNEAL_PORT to a port above 1023.") from None
        if error.errno == errno.EADDRINUSE:
            raise HomeError(
                f"Port {settings.port} on {settings.host} is taken by another program; end that, or set ANNEAL_PORT "
                "to another port (0 takes any free one)."
            ) from None
        raise HomeError(f"Cannot listen on {where}: {error.strerror}; set ANNEAL_HOST and ANNEAL_PORT.") from None
    return listener


def base_url(listener: socket.socket) -> str:
    """Where a client on this machine reaches the API."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve the API until SIGTERM or SIGINT; tells url and process id in `run/api.json`."""
    import uvicorn

    from app.main import create_app

    run_folder = make_private_folder(settings.home / "run")
    write_private_json(run_folder / "api.json", {"url": base_url(listener), "pid": os.getpid()})
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_level="info",
            # A client's word on its own address would get round the limit on wrong keys.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_STREAM_GRACE_SECONDS,
        )
    )
    # uvicorn repeats the signal once it has shut down; by then there is nothing left to end.
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: None)
    server.run(sockets=[listener])
    if not server.started:
        raise HomeError("The API did not start; the lines above say why.")
