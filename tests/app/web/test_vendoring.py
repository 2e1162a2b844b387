"""Promises about vendored files: their versions are pinned, their licenses are beside them, and they can be rebuilt."""

import hashlib
import json
from pathlib import Path

import pytest

from app.web import vendoring

VERSIONS = json.loads(vendoring.VERSIONS.read_text())


def test_the_files_are_those_of_the_pinned_versions_and_no_address_is_in_the_lock() -> None:
    lock = (vendoring.HERE / "package-lock.json").read_text()
    assert "http" not in lock.replace('"url": "http', "")
    packages = json.loads(lock)["packages"]
    assert set(VERSIONS["packages"]) == set(vendoring.PACKAGES)
    for name, about in VERSIONS["packages"].items():
        assert about["version"] == packages[f"node_modules/{name}"]["version"]
    for name, expected in VERSIONS["files"].items():
        assert hashlib.sha256((vendoring.STATIC / name).read_bytes()).hexdigest() == expected, name
    vendored = {path.relative_to(vendoring.STATIC).as_posix() for path in (vendoring.STATIC / "vendor").iterdir()}
    types = {"vendor/preact.d.ts", "vendor/uplot.d.ts"}  # ours; they are not served
    assert vendored - types == {name for name in VERSIONS["files"] if name.startswith("vendor/")} | {
        "vendor/LICENSES.txt", "vendor/versions.json",
    }  # fmt: skip


def test_each_license_is_beside_the_files() -> None:
    text = (vendoring.STATIC / "vendor" / "LICENSES.txt").read_text()
    for name, about in VERSIONS["packages"].items():
        assert f"{name} {about['version']} ({about['license']})" in text
    assert (
        text.count("Permission is hereby granted") >= 3 and "SIL OPEN FONT LICENSE" in text and "Apache License" in text
    )


@pytest.mark.full
def test_building_them_again_gives_the_same_bytes(tmp_path: Path) -> None:
    vendoring.build_vendored(tmp_path)
    for path in [*VERSIONS["files"], "vendor/LICENSES.txt", "vendor/versions.json"]:
        assert (tmp_path / path).read_bytes() == (vendoring.STATIC / path).read_bytes(), path
