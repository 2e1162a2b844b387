"""A machine without a browser or without root runs all other tests, and the last lines say what was not run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chromium
from tests.nodes import ROOT

CONFTEST = """
import pytest
from tests.not_run import NotRun

def pytest_configure(config):
    config.pluginmanager.register(NotRun(), "not-run")
    config.addinivalue_line("markers", "needs(what): x")
    config.addinivalue_line("markers", "full: x")

@pytest.fixture
def chromium():
    return "a browser"

@pytest.fixture
def page(chromium):
    return chromium
"""
TESTS = """
import pytest

def test_page(page): ...
def test_second_page(chromium): ...
@pytest.mark.full
def test_picture(chromium): ...
def test_other(): ...
@pytest.mark.needs("network namespaces")
def test_cut(): ...
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Environment of a machine without a browser: nothing on the path, an empty home."""
    for name in ("bin", "home", "project"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "project" / "test_sample.py").write_text(TESTS)
    (tmp_path / "project" / "pytest.ini").write_text("[pytest]\n")
    # The plugins of this environment take seconds to import.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), **plugins}


def run(folder: Path, machine: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", *options]
    done = subprocess.run(command, cwd=folder / "project", env=machine, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def add_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "several processes"])
def test_without_a_browser_the_others_run_and_the_last_lines_name_what_did_not(
    tmp_path: Path, machine: dict[str, str], options: tuple[str, ...]
) -> None:
    done = run(tmp_path, machine, *options)
    assert done.returncode == 0, done.stdout
    *_, browser, namespaces, totals = done.stdout.strip().splitlines()
    assert browser == f"2 tests need a browser, and there is none: {chromium.ADVICE}: test_sample.py (2)."
    assert namespaces.startswith("1 test needs network namespaces, for which root")
    assert re.match(r"1 passed", totals), "the test with the mark `full` was not selected and is not mentioned"


def test_with_a_browser_its_tests_run(tmp_path: Path, machine: dict[str, str]) -> None:
    add_program(tmp_path / "bin", "chromium", "echo Chromium 1.0")
    done = run(tmp_path, machine)
    assert done.returncode == 0 and "need a browser" not in done.stdout and "3 passed" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "several processes"])
def test_where_a_browser_is_required_the_session_fails_without_one(
    tmp_path: Path, machine: dict[str, str], options: tuple[str, ...]
) -> None:
    done = run(tmp_path, {**machine, "REQUIRED": "browser"}, *options)
    assert done.returncode == 1, done.stdout
    assert "REQUIRED=browser makes this an error." in done.stdout and "1 passed" in done.stdout


def test_unknown_need_is_an_error(tmp_path: Path, machine: dict[str, str]) -> None:
    path = tmp_path / "project" / "test_sample.py"
    path.write_text(TESTS.replace("network namespaces", "a moon"))
    assert run(tmp_path, machine).returncode == pytest.ExitCode.USAGE_ERROR


def test_requirement_that_is_not_known_is_an_error_and_not_met_in_silence(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    done = run(tmp_path, {**machine, "REQUIRED": "browsers"})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "REQUIRED=browsers" in done.stderr


class TestFinding:
    def test_browser_of_the_system_comes_first_then_the_newest_of_playwright(self, tmp_path: Path) -> None:
        browsers = [
            add_program(tmp_path / "bin", "google-chrome", "exit 0"),
            add_program(tmp_path / "home/.cache/ms-playwright/chromium-1300/chrome-linux64", "chrome", "exit 0"),
            add_program(tmp_path / "home/.cache/ms-playwright/chromium-1200/chrome-linux", "chrome", "exit 0"),
        ]
        environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}
        assert list(chromium.candidates(environment)) == [str(path) for path in browsers]

    def test_folder_that_playwright_was_given_is_searched(self, tmp_path: Path) -> None:
        shell = "chromium_headless_shell-1255/chrome-headless-shell-linux64"
        path = add_program(tmp_path / shell, "chrome-headless-shell", "exit 0")
        environment = {"PATH": "", "HOME": str(tmp_path / "home"), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}
        assert list(chromium.candidates(environment)) == [str(path)]

    def test_browser_that_does_not_start_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_program(tmp_path / "bin", "chromium", "echo error while loading shared libraries >&2; exit 127")
        working = add_program(tmp_path / "bin", "google-chrome", "echo Chrome 1")
        for name, value in (("PATH", tmp_path / "bin"), ("HOME", tmp_path)):
            monkeypatch.setenv(name, str(value))
        assert chromium.find_chromium.__wrapped__() == str(working)


class TestInstalling:
    def test_root_installs_the_package_of_debian_after_an_update_of_its_lists(
        self, tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        updated = tmp_path / "updated"
        browser = tmp_path / "bin" / "chromium"
        script = f"""case $1 in
            update) touch {updated} ;;
            install) test -e {updated} || exit 100
                printf '#!/bin/sh\\n' > {browser}; chmod +x {browser} ;;
        esac"""
        add_program(tmp_path / "bin", "apt-get", script)
        for name in ("touch", "chmod"):
            (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
        for name in ("PATH", "HOME"):
            monkeypatch.setenv(name, machine[name])
        chromium.find_chromium.cache_clear()
        try:
            assert chromium.install(is_root=True) == str(browser)
        finally:
            chromium.find_chromium.cache_clear()

    def test_other_users_download_that_of_playwright(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_program(tmp_path / "bin", "apt-get", "exit 1")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert list(chromium.install_commands(is_root=False)) == [
            [sys.executable, "-m", "playwright", "install", "chromium"]
        ]
        names = [Path(command[0]).name for command in chromium.install_commands(is_root=True)]
        assert names[:3] == ["apt-get"] * 3 and len(names) == 5

    def test_machine_that_cannot_have_one_continues_unless_one_is_required(self, machine: dict[str, str]) -> None:
        # No download: nothing answers there.
        offline = {"PLAYWRIGHT_DOWNLOAD_HOST": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
        add_program(Path(machine["PATH"]), "apt-get", "exit 100")
        command = [sys.executable, "-m", "tests.chromium"]
        for required, code in (("", 0), ("browser", 1)):
            environment = {**machine, **offline, "REQUIRED": required}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == code, done.stderr
            assert "It cannot be installed here" in done.stdout and "apt-get install chromium" in done.stdout
