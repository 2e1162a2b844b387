"""Promises about the modules of the dashboard that need no page: Node, which Playwright brings along, runs them."""

import subprocess
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

import app.web

_WEB = Path(app.web.__file__).parent
_TESTS = sorted((Path(__file__).parent / "js").glob("*.test.js"))


def test_curves_logs_formats_addresses_and_forms() -> None:
    node = compute_driver_executable()[0]
    run = subprocess.run([node, "--test", *map(str, _TESTS)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr
    count = sum(path.read_text().count("\ntest(") for path in _TESTS)
    assert f"# tests {count}" in run.stdout.replace("ℹ", "#")


def test_no_line_of_a_module_or_style_sheet_has_more_than_120_columns() -> None:
    # Prettier splits neither texts nor comments.
    files = [*_WEB.glob("*.js"), *_WEB.glob("static/js/**/*.js"), *_WEB.glob("static/css/*.css"), *_TESTS]
    long_lines = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120
    ]
    assert files and long_lines == []
