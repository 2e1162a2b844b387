"""Promises about types: mypy and pyright accept the documents' programs, and reject fields that an event lacks."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.nodes import ROOT

DOCUMENTS = (
    "README.md", "docs/guides/python.md", "docs/guides/devices.md", "docs/guides/evaluation.md",
    "docs/guides/predictions.md",
)  # fmt: skip
WRONG = """
from anneal import Anneal

for event in Anneal().runs.events("run_1"):
    print(event.loss)
    if event.type == "end":
        print(event.step)
"""
# With the configuration of the project, which is strict, so that what `make lint` has checked is not checked again.
MYPY = ("-m", "mypy", "--no-error-summary")
PYRIGHT = ("-m", "pyright", "--pythonpath", sys.executable, "--project")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Folder with the programs that the documents show, as a user would write them to files."""
    for document in DOCUMENTS:
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
        text = "".join(blocks)
        imports = "" if "import Anneal" in text else "from anneal import Anneal\n"
        (tmp_path / f"{Path(document).stem.lower()}.py").write_text(imports + text)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "reportMissingModuleSource": False})
    )
    return tmp_path


def errors(checker: tuple[str, ...], folder: Path) -> list[str]:
    """Return the lines in which the checker reports errors."""
    # Node comes as a wheel, whose programs are beside Python's.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, *checker, str(folder)], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    error_lines = [line.strip() for line in done.stdout.splitlines() if ": error:" in line or " - error:" in line]
    assert done.returncode == bool(error_lines), (done.stdout, done.stderr)
    return error_lines


@pytest.mark.parametrize(
    "checker", [pytest.param(MYPY, id="mypy", marks=pytest.mark.full), pytest.param(PYRIGHT, id="pyright")]
)
def test_events_are_told_apart_by_their_type(programs: Path, checker: tuple[str, ...]) -> None:
    assert "for event in client.runs.events(" in (programs / "readme.py").read_text()
    (programs / "wrong.py").write_text(WRONG)
    error_lines = errors(checker, programs)
    assert error_lines and all("wrong.py" in line for line in error_lines), error_lines
    assert any('"loss"' in line and "StatusEvent" in line for line in error_lines)
    assert any('"step"' in line and "EndEvent" in line for line in error_lines)


def test_editable_installation_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    """An import hook, which setuptools installs otherwise, is invisible to them."""
    build = "import setuptools.build_meta, sys; folder = sys.argv.pop(); setuptools.build_meta.build_editable(folder)"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = [name for name in archive.namelist() if "/" not in name]
        assert [archive.read(name).decode().strip() for name in top] == [str(ROOT)]
