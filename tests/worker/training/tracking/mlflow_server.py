"""A real MLflow tracking server, for tests that report to one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.waiting import eventually


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """`mlflow server` with its store below `folder`, on a free port of loopback; yields its URL."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "mlflow.log"
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination", (folder / "artifacts").as_uri(), "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True) as process,
    ):
        try:
            eventually(lambda: _answers(url, process, log), timeout=90, what=f"{url} answers")
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def _answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    """Whether the store answers: MLflow makes it at the first request that needs it, and two such at once race."""
    assert process.poll() is None, log.read_text()[-3000:]
    listing = f"{url}/api/2.0/mlflow/experiments/search"
    try:
        httpx.get(f"{url}/health", trust_env=False)
        return httpx.get(listing, params={"max_results": 1}, trust_env=False, timeout=60).status_code == 200
    except httpx.TransportError:
        return False
