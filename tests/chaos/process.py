"""`python -m tests.chaos.process FOLDER NAME MODULE ARGUMENTS…`: service process with fault injection."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.chaos.inject import lie_about_commits


def main() -> None:
    """Run a module as `python -m` does, with fault injection in commits."""
    folder, name, module, *arguments = sys.argv[1:]
    lie_about_commits(Path(folder), name)
    if name.endswith("-without-torch"):
        _hide_torch()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _hide_torch() -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else find(name, package)

    importlib.util.find_spec = find_spec


if __name__ == "__main__":
    main()
