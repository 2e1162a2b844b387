"""Every `anneal` command in the documents exists, with the options that are shown."""

import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from app.cli.main import cli
from docs.generator.cli import choices
from tests.nodes import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
_INLINE = re.compile(r"(?<!`)`anneal ([^`\n]*)`(?!`)")
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GLOBAL = {"--ca-file", "--help", "--install-completion", "--version"}


def commands(text: str) -> list[str]:
    """Return the arguments of each command, with alternatives such as `create|list` expanded."""
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    documented = [line.split("anneal ", 1)[1] for line in lines if re.match(r"(.*\bexec \w+ )?anneal ", line)]
    documented += _INLINE.findall(_BLOCK.sub("", text))
    return [
        " ".join(words)
        for command in documented
        for words in itertools.product(*(_alternatives(word) for word in command.split(" ")))
    ]


def _alternatives(word: str) -> list[str]:
    return word.split("|") if re.fullmatch(r"[a-z_-]+(\|[a-z_-]+)+", word) else [word]


@functools.cache
def _command(*names: str) -> Any:
    """Return the command or group of these names; None if there is none."""
    if not names:
        return typer.main.get_command(cli)
    group = _command(*names[:-1])
    return group.get_command(group.make_context("anneal", [], resilient_parsing=True), names[-1])


def problem(command: str) -> str | None:
    """Return the first unknown command, option or value of an option; None if there is none."""
    words = [word for word in shlex.split(command.partition("#")[0]) if word != "…"]
    names: list[str] = []
    while words and hasattr(_command(*names), "get_command"):
        if words[0].startswith("-"):
            return None if words[0] in _GLOBAL else words[0]
        names.append(words.pop(0))
        if _command(*names) is None:
            return names[-1]
    parameters = _command(*names).params
    options = {option: it for it in parameters for option in (*it.opts, *it.secondary_opts)}
    for word, value in itertools.pairwise([*words, ""]):
        if re.match(r"--?[a-z]", word) and word not in options.keys() | _GLOBAL:
            return word
        values = choices(options[word]) if word in options else ()
        if values and value and value not in values:
            return f"{word} {value}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    problems = [(command, problem(command)) for command in commands(page.read_text())]
    assert [(command, unknown) for command, unknown in problems if unknown] == []


def test_unknown_commands_are_found() -> None:
    inline = "`anneal runs make|list` `anneal runs stop --soon run_1` `anneal runs list --task rest --sort`\n"
    text = f"{inline}```\nanneal up --now\nanneal keys create me\n```\n"
    assert [problem(command) for command in commands(text)] == ["--now", None, "make", None, "--soon", "--task rest"]
