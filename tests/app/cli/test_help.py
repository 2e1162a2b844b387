"""Every command explains itself, also to the shell."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli.main import cli


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command there is, by its words."""
    group = group or typer.main.get_command(cli)
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def test_there_are_many_commands() -> None:
    named = {
        "up",
        "audit",
        "prune",
        "keys create",
        "secrets set",
        "runs watch",
        "runs compare",
        "runs pin",
        "runs unpin",
    }
    assert named | {"workers list", "datasets content"} <= {" ".join(command) for command in commands()}


def test_command_without_arguments_lists_commands() -> None:
    result = CliRunner().invoke(cli, [])
    assert all(re.search(rf"^  {command[0]} ", result.output, re.MULTILINE) for command in commands()), result.output


@pytest.mark.parametrize("group", ["", "runs", "datasets", "keys", "secrets", "storage", "actions"])
def test_help_of_a_group_has_the_first_sentence_of_each_command_whole(group: str) -> None:
    output = CliRunner().invoke(cli, [*group.split(), "--help"], env={"COLUMNS": "60"}).output
    text = " ".join(output.split())
    for command in commands():
        if " ".join(command[:-1]) == group:
            own = CliRunner().invoke(cli, [*command, "--help"], env={"COLUMNS": "60"}).output.split("\n\n")[1]
            assert re.split(r"\.(?:\s|$)", " ".join(own.split()))[0] in text
    assert "..." not in text.replace("[ARGS]...", "")


def test_negative_number_is_a_value(tmp_path: Path) -> None:
    arguments = ["actions", "set-learning-rate", "run_01k3x9m6q2v8s4t0w7y5z1a3b6", "-1"]
    refused = CliRunner().invoke(cli, arguments, env={"ANNEAL_HOME": str(tmp_path)})
    assert refused.exit_code == 1 and "No service found" in refused.stderr


def test_help_imports_nothing_heavy() -> None:
    heavy = ["pydantic", "sqlalchemy", "fastapi", "httpx", "cryptography", "yaml", "rich.console"]
    script = "import sys; from app.cli.main import cli; cli(['--help'], standalone_mode=False); "
    script += f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert re.search(rf"Example: `[^`]*anneal {' '.join(command)}\b", text), text


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_with_output_has_json(command: tuple[str, ...]) -> None:
    # Programs, and what is JSON anyway.
    others = {
        ("up",), ("api",), ("worker",), ("demo",), ("storage", "copy"), ("datasets", "content"),
        ("import", "openai-jobs"),
    }  # fmt: skip
    assert ("--json" in CliRunner().invoke(cli, [*command, "--help"]).stdout) is (command not in others)


def test_completion_can_be_installed_and_knows_the_nouns(tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'anneal'; from app.cli.main import main; main()"
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash"}
    command = [sys.executable, "-c", script]
    variables = {"_ANNEAL_COMPLETE": "complete_bash", "COMP_WORDS": "anneal runs wa", "COMP_CWORD": "2"}
    done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["watch"], done
    # From a shell of its own: the option looks for the one it was called from, and a test need not have any above it.
    line = f"{shlex.join([*command, '--install-completion'])}; exit $?"
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert (tmp_path / ".bash_completions" / "anneal.sh").exists()
