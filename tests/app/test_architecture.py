"""Promises about the code itself, kept by running them."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("anneal", "app", "worker", "tests", "benchmarks", "migrations")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("anneal", "app", "worker", "migrations")]
MAX_MODULES = 16
_ASSIGNED = re.compile(r"UPDATE\s+runs\b.*?\bSET\b(.*?)(?:\bWHERE\b|$)", re.DOTALL | re.IGNORECASE)
HEAVY = (
    "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "numpy", "worker",
    "pyarrow", "tokenizers", "huggingface_hub", "httpx", "alembic", "rich",
)  # fmt: skip


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _trees(paths: Iterable[Path], *words: str) -> Iterator[tuple[Path, ast.Module]]:
    """Parse the files that contain one of the words."""
    for path in paths:
        text = path.read_text()
        if any(word in text for word in words):
            yield path, ast.parse(text, filename=str(path))


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    # Every migration is kept, and is a file of its own.
    migrations = ROOT / "migrations" / "versions"
    folders = Counter(path.parent for path in PRODUCT if path.name != "__init__.py" and path.parent != migrations)
    assert len(folders) > 40
    assert {_name(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


FOUNDATION = (
    "fastapi, uvicorn, sse_starlette, pydantic_settings, sqlalchemy.orm, sqlalchemy.ext.asyncio, "
    "sqlalchemy.dialects.postgresql, psycopg, celery.app.base, kombu.entity, redis.asyncio, prometheus_client, "
    "app.infra.logs.lean_structlog, pydantic.v1"
)
"""Modules of the libraries that `app.main` loads; `celery` and `kombu` alone load nothing before their first use."""


@functools.cache
def _loaded_by(modules: str) -> frozenset[str]:
    """The modules that are loaded in a fresh process that has imported these."""
    code = f"import json, sys\nimport {modules}\nprint(json.dumps([*sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return frozenset(json.loads(run.stdout))


@pytest.mark.parametrize("module", ["app.main", "app.cli.main"])
def test_the_api_and_the_command_line_import_nothing_heavy(module: str) -> None:
    assert sorted(_loaded_by(module) & {*HEAVY}) == []


def test_help_waits_for_nothing_and_the_client_knows_no_server() -> None:
    slow = {"pydantic", "pydantic_settings", "httpx", "rich", "sqlalchemy", "fastapi", "starlette", "plotext"}
    commands = "app.cli.main, app.cli.runs.commands, app.cli.datasets, app.cli.experiments, app.cli.workers"
    assert sorted(_loaded_by(commands) & slow) == []
    server = {"fastapi", "starlette", "sqlalchemy", "psycopg", "redis", "uvicorn", "plotext"}
    assert sorted(_loaded_by("anneal.client.client") & server) == []


def test_the_supervisor_imports_neither_torch_nor_http() -> None:
    unwanted = {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "numpy", "fastapi"}
    assert sorted(_loaded_by("worker.main") & unwanted) == []


def test_the_api_is_imported_in_hardly_more_time_than_what_it_stands_on() -> None:
    """On a machine that imports FastAPI, SQLAlchemy, Celery and so on in 1 s it starts in under 1.9.

    Processor time against processor time of the same process, the best of five: a slow or busy machine does not count.
    The garbage collector is off, because whichever import reaches its threshold pays for the objects of all others.
    """
    assert any(_own_share() < 0.9 for _ in range(5))


def _own_share() -> float:
    """Import `FOUNDATION` and then the rest of `app.main`; return the time of the second as a share of the first.

    The first call may compile modules of a new checkout, and must be able to store what it has compiled.
    """
    code = (
        f"import gc, time\ngc.disable()\ntimes = [time.process_time()]\nimport {FOUNDATION}\n"
        "times.append(time.process_time())\nimport app.main\ntimes.append(time.process_time())\n"
        "print((times[2] - times[1]) / (times[1] - times[0]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_the_foundation_is_loaded_by_the_api() -> None:
    """Otherwise libraries that the API does not import would count as its foundation."""
    assert sorted(_loaded_by(FOUNDATION) - _loaded_by("app.main")) == []


def test_only_the_settings_read_the_environment() -> None:
    """Setting a variable, as a training process does for the libraries that it loads, is not reading.

    Nor is it to take a secret away, before a library hands it on to a process of its own.
    """
    readers = set()
    for path, tree in _trees(PRODUCT, "environ", "getenv"):
        set_only = {
            id(node.value)
            for node in ast.walk(tree)
            if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del))
            or (isinstance(node, ast.Attribute) and node.attr in ("update", "pop"))
        }
        for node in ast.walk(tree):
            names_it = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
            if names_it and id(node) not in set_only:
                readers.add(_name(path))
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                readers |= {_name(path) for name in node.names if name.name in ("environ", "getenv")}
    assert readers == {"app/config.py"}


def test_only_the_state_machine_writes_the_status_of_a_run() -> None:
    """No `.values(status=…)`, no `run.status = …`, no SQL text that sets it, anywhere else in the product."""
    writers = set()
    for path, tree in _trees(PRODUCT, "status"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "values":
                named = {keyword.arg for keyword in node.keywords}
                keys = {
                    key.value
                    for argument in node.args
                    if isinstance(argument, ast.Dict)
                    for key in argument.keys
                    if isinstance(key, ast.Constant)
                }
                if "status" in named | keys:
                    writers.add(_name(path))
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(it, ast.Attribute) and it.attr == "status" and _of_run(it) for it in targets):
                    writers.add(_name(path))
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if any("status" in assigned for assigned in _ASSIGNED.findall(text)):
                writers.add(_name(path))
    assert writers <= {"app/runs/state/machine.py", "app/runs/state/transitions.py"}, (
        "the verbs, and the move beneath them"
    )


def _of_run(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and "run" in target.value.id.lower()


def test_no_test_is_skipped_and_no_test_sleeps() -> None:
    unwanted = {"skip", "skipif", "xfail", "importorskip"}
    violations = set()
    tests = (path for path in SOURCES if path.relative_to(ROOT).parts[0] == "tests")
    for path, tree in _trees(tests, *unwanted, "sleep"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in unwanted and "pytest" in ast.dump(node.value):
                violations.add((_name(path), node.attr))
            if isinstance(node, ast.Attribute) and node.attr == "sleep" and "'time'" in ast.dump(node.value):
                violations.add((_name(path), "time.sleep"))
    assert violations == set(), "`tests/not_run.py` leaves out what the machine cannot run, and reports it"
