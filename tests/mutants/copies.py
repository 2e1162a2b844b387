"""Copies of the working tree in which mutants are tested, so that the tree itself is not changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutant import MutantError

ROOT = Path(__file__).parents[2]
VERDICTS = "MUTANT_VERDICTS"
"""Environment variable with the path of the file to which the pytest plugin writes outcomes."""
_PROBE = """
import importlib, json
print(json.dumps([importlib.import_module(name).__file__ for name in
                  ("app.runs.state.machine", "worker.attempts.supervisor", "worker.wire.reporter", "tests.stack")]))
"""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test."""

    state: str
    """One of passed, failed (by its own assertion) and broken (no verdict)."""
    why: str = ""


class Copy:
    """Copy of the git working tree, with uncommitted changes, in another folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @classmethod
    def of_the_tree(cls, place: Path) -> "Copy":
        """Copy all files that are tracked or not ignored by git."""
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listing.stdout.decode().split("\0")):
            source = ROOT / name
            if source.is_file():
                target = place / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        copy = cls(place)
        copy._check_that_it_is_what_runs()
        return copy

    def again(self, place: Path) -> "Copy":
        """Copy this copy, with its compiled modules."""
        shutil.copytree(self.place, place, symlinks=True)
        return Copy(place)

    def run(self, tests: Sequence[str], seconds: float) -> dict[str, Outcome]:
        """Run these tests in the copy; return an outcome for each, even on errors."""
        verdicts = self.place.with_name(f"{self.place.name}.verdicts")
        basetemp = self.place.with_name(f"{self.place.name}.t")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        command += ["-p", "tests.mutants.verdicts", f"--basetemp={basetemp}", *tests]
        environment = {**self._environment(), VERDICTS: str(verdicts)}
        with subprocess.Popen(
            command,
            cwd=self.place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that a timeout kills the whole group; the servers exit with their parent
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                output = f"it took longer than {seconds:.0f} s"
        shutil.rmtree(basetemp, ignore_errors=True)
        said = [json.loads(line) for line in verdicts.read_text().splitlines()] if verdicts.exists() else []
        verdicts.unlink(missing_ok=True)
        return {test: _outcome(test, said, output, self.place) for test in tests}

    def remove(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.place, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        # Tests start workers and trainers in other folders; PYTHONPATH makes them import from this copy too.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, "PYTHONPATH": str(self.place)}

    def _check_that_it_is_what_runs(self) -> None:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            cwd=self.place.parent,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode != 0:
            raise MutantError(f"the copy cannot be imported: {probe.stderr.strip().splitlines()[-1]}")
        elsewhere = [file for file in json.loads(probe.stdout) if not Path(file).is_relative_to(self.place)]
        if elsewhere:
            raise MutantError(f"a process started in another folder imports code from outside the copy: {elsewhere}")


def _outcome(test: str, said: list[dict[str, Any]], output: str, place: Path) -> Outcome:
    foreign = [file for line in said for file in line.get("files", []) if not Path(file).is_relative_to(place)]
    if foreign:
        return Outcome("broken", f"code from outside the copy was run: {foreign[0]}")
    collection = next((line["collecting"] for line in said if "collecting" in line), None)
    if collection:
        return Outcome("broken", f"it could not be collected: {collection}")
    mine = [line for line in said if line.get("node") == test]
    calls = [line for line in mine if line["when"] == "call"]
    if not calls:
        last = next((line["why"] for line in mine if line["why"]), None) or (output.strip().splitlines() or [""])[-1]
        return Outcome("broken", f"it never ran: {last}")
    if calls[-1]["outcome"] == "passed":
        return Outcome("passed")
    return Outcome("failed" if calls[-1]["asserted"] else "broken", calls[-1]["why"])
