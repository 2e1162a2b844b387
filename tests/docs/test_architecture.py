"""The architecture page names every package and module directly below `app` and `worker`."""

import re

import pytest

from tests.nodes import ROOT

PAGE = (ROOT / "docs/internals/architecture.md").read_text()
PACKAGES = PAGE.partition("## Packages")[2].partition("\n## ")[0]


@pytest.mark.parametrize("folder", ["anneal", "app", "worker"])
def test_every_package_is_named_and_exists(folder: str) -> None:
    paths = [path for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    there = {f"{folder}/{path.name}" for path in paths if path.name != "__init__.py"}
    assert set(re.findall(rf"\b{folder}/[\w.]+", PACKAGES)) == there


def test_every_package_of_runs_is_named() -> None:
    named = PACKAGES.partition("app/runs ")[2].partition("\napp/")[0]
    there = {path.parent.name for path in (ROOT / "app/runs").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/", named)) == there
