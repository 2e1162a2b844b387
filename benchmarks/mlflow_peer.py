"""MLflow as a peer: its SQL store in a separate database on the same server with the same settings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psycopg
from sqlalchemy.engine import make_url

from tests.ports import free_port
from tests.stack import Stack
from tests.waiting import eventually

_DURABILITY = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_level", "shared_buffers")
os.environ |= {
    "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false", "GIT_PYTHON_REFRESH": "quiet"
}  # fmt: skip


class Mlflow:
    """MLflow store, a client that writes directly to it, and an experiment."""

    def __init__(self, service: Stack) -> None:
        from mlflow import MlflowClient

        with psycopg.connect(service.settings.database_url or "", autocommit=True) as connection:
            connection.execute("CREATE DATABASE mlflow")
        url = make_url(service.settings.database_url or "").set(database="mlflow")
        self.dsn = url.render_as_string(hide_password=False)
        # The driver that MLflow's documentation recommends.
        self.uri = url.set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
        self.artifacts = service.home / "mlflow-artifacts"
        self.client: Any = MlflowClient(tracking_uri=self.uri)
        self.experiment_id: str = self.client.create_experiment("runs", self.artifacts.as_uri())
        self._log = service.home / "mlflow.log"

    def new_run(self) -> str:
        """Create a run and return its id."""
        run_id: str = self.client.create_run(self.experiment_id).info.run_id
        return run_id

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection]:
        """Connect to its database, to insert rows faster than through MLflow."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection

    @contextmanager
    def server(self) -> Iterator[str]:
        """Start `mlflow server` on this store with one worker process; yield its URL."""
        port = free_port()
        command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.uri, "--host", "127.0.0.1",
            "--port", str(port), "--workers", "1", "--artifacts-destination", self.artifacts.as_uri(),
        ]  # fmt: skip
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        url = f"http://127.0.0.1:{port}"
        with (
            self._log.open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True) as process,
        ):
            try:
                eventually(lambda: _answers(url, process, self._log), timeout=120, what=f"{url} answers")
                yield url
            finally:
                os.killpg(process.pid, 15)


def settings(service: Stack, how: str) -> str:
    """Return the settings of both sides as text."""
    with psycopg.connect(service.settings.database_url or "") as connection:
        values = [f"{name} {_shown(connection, name)}" for name in _DURABILITY]
    return f"PostgreSQL of both: {', '.join(values)}; MLflow {version('mlflow-skinny')}: {how}"


def _shown(connection: psycopg.Connection, name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def _answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
