"""Each target of the Makefile that users run installs what it needs and nothing else; read by a dry run of `make`."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.nodes import ROOT
from tests.test_pins import PROJECT


def commands(target: str, folder: Path) -> list[list[str]]:
    """Return the programs that `make` would run for a target in a fresh clone, with their arguments."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "app/web/package.json", "app/web/package-lock.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    # Without what `make test` hands on to a `make` that it starts, which would print more.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", target], cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return [shlex.split(line, comments=True) for line in done.stdout.replace("\\\n", " ").splitlines()]


def installed(command_lines: list[list[str]]) -> Iterator[str]:
    """Yield what `pip install` installs in these commands: the requirements, of the project the names of its extras."""
    for words in command_lines:
        if "pip" in words and "install" in words:
            arguments = words[words.index("install") + 1 :]
            options = [word for word in arguments if word.startswith("-")]
            assert "-r" not in options, "a list of requirements is not looked into here"
            for word in arguments:
                if word.startswith((".", "anneal")):
                    yield from Requirement(f"anneal{word.removeprefix('.')}").extras
                elif word not in options and word != "constraints.txt":
                    yield word


def packages(extra: str) -> set[str]:
    """Return the names of the packages that an extra requires, with those of the extras that it builds on."""
    requirements = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
    own = {one.name for one in requirements if one.name != "anneal"}
    return own.union(*(packages(other) for one in requirements if one.name == "anneal" for other in one.extras))


@pytest.mark.parametrize(("target", "runs"), [("up", ["anneal", "up"]), ("demo", ["anneal", "demo"])])
def test_running_the_service_installs_neither_test_tools_nor_node(target: str, runs: list[str], tmp_path: Path) -> None:
    command_lines = commands(target, tmp_path)
    assert set(installed(command_lines)) == {"worker"}
    assert [words for words in command_lines if "npm" in " ".join(words)] == []
    *_, last = command_lines
    assert [Path(word).name for word in last if word != "exec"] == runs
    server = {Requirement(text).name for text in PROJECT["dependencies"]}
    test_tools = packages("dev") - server
    assert {"pytest", "mypy", "ruff", "hypothesis"} <= test_tools
    assert not packages("worker") & (test_tools | packages("integrations") | packages("docs") | packages("bench"))


def test_only_the_tests_of_a_release_install_integrations(tmp_path: Path) -> None:
    assert set(installed(commands("test", tmp_path))) == {"worker", "dev"}
    assert "integrations" in set(installed(commands(".venv/.integrations", tmp_path)))


def test_tests_look_for_a_browser_first_and_the_command_of_the_project_demands_one(tmp_path: Path) -> None:
    modules = [words[words.index("-m") + 1] for words in commands("test", tmp_path) if "-m" in words]
    assert modules.index("tests.chromium") < len(modules) - 1 and modules[-1] == "pytest"
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert last == "REQUIRED=browser exec make test", "a machine without a browser must not pass it"
