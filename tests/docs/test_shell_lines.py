"""No documented shell line deletes, moves or copies elsewhere than shown when a variable in it is empty."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_commands import PAGES
from tests.nodes import ROOT

_BLOCK = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SHELL = {"", "bash", "sh", "shell", "console"}
_HARMFUL = re.compile(
    r"""\b(
        (rsync|scp|rclone|gsutil|dropdb|mkfs[.\w]*|dd|shred|truncate|wipefs|unlink|rmdir)\s
      | mv\s
      | rm\s[^|;&]*?-\w*[rRf]
      | (cp|install|ln)\s[^|;&]*?-\w*[raRf]
      | (cp|rm)\s[^|;&]*?--(recursive|archive|force)
      | ch(own|mod|grp)\s[^|;&]*?(-\w*R|--recursive)
      | find\s.*?-(delete|exec)
      | tar\s+(-{0,2}\w*x|.*?(\s-\w*x|--extract))
      | (aws|gcloud|docker|podman)\s.*?\b(sync|rm|mv|cp|down|prune)\b
      | git\s+(clean|reset|checkout)\s
      | xargs\s
    )""",
    re.VERBOSE,
)
_SINGLE_QUOTED = re.compile(r"'[^'\n]*'")
_COMMENT = re.compile(r"(^|\s)#.*")
_EXPANSION = re.compile(r"(?<!\\)\$(\w+|\{[^}]*\}|\(|[@*])")
_GUARDED = re.compile(r"\$\{\w+:([?]|-.)[^}]*\}")


def shell_lines(page: str) -> Iterator[str]:
    """Yield the lines of shell blocks, continued lines joined, and the code spans of the text."""
    for language, code in _BLOCK.findall(page):
        if language in _SHELL:
            yield from re.sub(r"\\\n\s*", " ", code).splitlines()
    yield from _INLINE.findall(_BLOCK.sub("", page))


def unguarded(page: str) -> list[str]:
    """Return the lines that may do harm with an empty variable; `${VAR:?}` ends the shell command instead."""
    lines = []
    for line in shell_lines(page):
        command = _COMMENT.sub("", _SINGLE_QUOTED.sub("''", line))
        if _HARMFUL.search(command) and _EXPANSION.search(_GUARDED.sub("", command)):
            lines.append(line)
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_that_delete_move_or_copy_guard_their_variables(page: Path) -> None:
    assert unguarded(page.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        'rsync -a --delete "$ANNEAL_STORAGE/" backup:/anneal/storage/',
        "rsync -a \\\n  $FROM/ /backup/",
        "rm -rf ${FOLDER}/runs",
        "sudo rm -r $FOLDER",
        "cp -a $FROM/. /backup",
        "cp --recursive $FROM /backup",
        "mv $A/* /backup",
        "find $HOME_OF_RUNS/ -name old -delete",
        "dropdb $NAME",
        "chown -R anneal $FOLDER/",
        'curl "$URL/artifacts.tar" | tar x',
        "tar -C $FOLDER -xf runs.tar",
        'rm -r "$(anneal status)"',
        "aws s3 sync --delete $FROM s3://bucket",
        "docker compose cp $MODEL/. worker:/models/",
        "for x in *; do rm -f $x; done",
    ],
)
def test_harmful_lines_are_found(line: str) -> None:
    assert unguarded(f"Text.\n\n```\nset -e\n{line}\n```\n") != []


@pytest.mark.parametrize(
    "line",
    [
        'rsync -a --delete "${ANNEAL_STORAGE:?}/" backup:/anneal/storage/',
        'curl "${URL:?Set it.}/artifacts.tar" | tar x',
        "rm -r /srv/anneal/old  # not $HOME",
        "echo $HOME",
        "cp .env.example .env",
        "rm -r '$literal'",
        "rm -rf ${FOLDER:-/tmp/x}",
    ],
)
def test_harmless_lines_are_not_reported(line: str) -> None:
    assert unguarded(f"```bash\n{line}\n```\n`{line}`\n") == []


def test_other_languages_are_not_shell() -> None:
    assert unguarded("```python\nrm = find(f'-delete {x}') # $X\n```\n```yaml\nrun: rm -r $X\n```\n") == []


@pytest.mark.parametrize("page", [*(ROOT / "docs/guides").glob("*.md"), *(ROOT / "docs/operations").glob("*.md")])
def test_curl_lines_can_be_pasted_and_name_an_address_that_is_not_set(page: Path) -> None:
    blocks = [code for language, code in _BLOCK.findall(page.read_text()) if language in _SHELL]
    lines = [line for code in blocks for line in code.splitlines() if line.startswith("curl ")]
    assert [line for line in lines if "curl …" in line or re.search(r"\$(?!ANNEAL_API_KEY\b)\w", line)] == []


def test_anneal_is_installed_from_a_clone_and_from_no_package_index() -> None:
    # A package of this name in an index is another project's.
    from_index = re.compile(r"pip install [^`\n]*['\" ]anneal\b['\"`\[\s]")
    assert from_index.search("run `pip install 'anneal[worker]'`")
    modules = [path for name in ("anneal", "app", "worker") for path in (ROOT / name).rglob("*.py")]
    files = [*PAGES, *ROOT.glob("Dockerfile*"), *modules]
    assert [str(path) for path in files if from_index.search(path.read_text())] == []
