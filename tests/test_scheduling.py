"""The tests of a file run in one process. When this stopped working once, nothing failed: runs only took longer."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests import scheduling
from tests.nodes import ROOT

_CONFTEST = "from tests.scheduling import pytest_xdist_make_scheduler\n"
_FILE = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(8))
def test_note_the_process(number, tmp_path_factory):
    with (Path(__file__).parents[{up}] / os.environ["PYTEST_XDIST_WORKER"]).open("a") as file:
        file.write("{name}\\n")
"""


def processes_of_files(folder: Path, names: list[str]) -> dict[str, set[str]]:
    """Run files of eight tests each in two processes; return the processes that ran each file."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_FILE.format(name=name, up=len(Path(name).parts) - 1))
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "no:schemathesis"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert f"{8 * len(names)} passed" in done.stdout, done.stdout + done.stderr
    processes = defaultdict(set)
    for noted in folder.glob("gw*"):
        for name in noted.read_text().split():
            processes[name].add(noted.name)
    return processes


def test_the_tests_of_a_file_run_in_one_process_and_those_of_e2e_together(tmp_path: Path) -> None:
    e2e = ["tests/e2e/test_x.py", "tests/e2e/test_y.py"]
    processes = processes_of_files(tmp_path, ["tests/test_a.py", "tests/test_b.py", "tests/test_c.py", *e2e])
    assert {name: len(ran) for name, ran in processes.items()} == dict.fromkeys(processes, 1)
    assert processes[e2e[0]] == processes[e2e[1]]
    assert len(set.union(*processes.values())) == 2, "both processes had work"


def test_this_session_uses_that_scheduler(pytestconfig: pytest.Config) -> None:
    hook = getattr(pytestconfig.pluginmanager.hook, "pytest_xdist_make_scheduler", None)
    assert hook is not None, "pytest-xdist is installed and active"
    # Of several implementations, the last that was registered is called first, and the first result counts.
    assert hook.get_hookimpls()[-1].function is scheduling.pytest_xdist_make_scheduler
