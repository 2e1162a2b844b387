"""A process of pytest-xdist is a copy of the template, and otherwise like one that pytest-xdist has started."""

import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

from tests import xdist_processes

_CODE = """
import os, sys
print(sys.stdin.readline().strip(), "fractions" in sys.modules, os.environ["LETTER"], os.getcwd(), os.getppid())
print("an error", file=sys.stderr)
"""


def test_code_runs_with_the_callers_streams_environment_and_folder_in_a_copy_of_the_template(tmp_path: Path) -> None:
    spec = SimpleNamespace(python=None)
    with xdist_processes.template([spec], ["fractions"]):
        started = [
            subprocess.run(
                [*shlex.split(spec.python), "-u", "-c", _CODE],
                input="a line\n", env={**os.environ, "LETTER": letter}, cwd=tmp_path, capture_output=True, text=True,
                timeout=60,
            )
            for letter in "ab"
        ]  # fmt: skip
    answers = [line.stdout.rsplit(maxsplit=1) for line in started]
    assert [answer for answer, _ in answers] == [f"a line True {letter} {tmp_path}" for letter in "ab"]
    assert len({template for _, template in answers}) == 1, "both are forked from one process"
    assert [line.stderr for line in started] == ["an error\n"] * 2
