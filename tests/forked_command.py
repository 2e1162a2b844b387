"""`python -I -S forked_command.py SOCKET MODULE ARGUMENT …`: a program of `programs.py`."""

import json
import os
import socket
import sys
from pathlib import Path


def run(path: str, module: str, arguments: list[str]) -> int:
    """Return the exit code of the program."""
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "streams": [f"/proc/{os.getpid()}/fd/{number}" for number in range(3)],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("r") as messages:
            return next(message["code"] for message in map(json.loads, messages) if "code" in message)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:3], sys.argv[3:]))
