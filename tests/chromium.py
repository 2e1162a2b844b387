"""The browser for the tests of the dashboard: found on this machine, or installed by `python -m tests.chromium`.

Imports neither Playwright nor the product: the collection of every test run asks for the browser.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

ADVICE = (
    "install Chromium (Debian: apt-get install chromium), or run `.venv/bin/python -m playwright install --with-deps "
    "chromium`"
)
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PLAYWRIGHT = (
    "chromium-*/chrome-linux*/chrome",
    "chromium_headless_shell-*/chrome-linux*/headless_shell",
    "chromium_headless_shell-*/chrome-headless-shell-linux*/chrome-headless-shell",
    "chromium-*/chrome-mac*/*.app/Contents/MacOS/*",
)
_START_SECONDS = 60
_INSTALL_SECONDS = 600


@lru_cache(maxsize=1)
def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome that starts here, or None."""
    return next((path for path in candidates(os.environ) if _starts(path)), None)


def candidates(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the browsers on the path, then those that Playwright has downloaded, newest first."""
    for name in _NAMES:
        if (path := shutil.which(name, path=environment.get("PATH", ""))) is not None:
            yield path
    home = Path(environment.get("HOME") or Path.home())
    folders = [home / ".cache/ms-playwright", home / "Library/Caches/ms-playwright"]
    if (chosen := environment.get("PLAYWRIGHT_BROWSERS_PATH")) not in (None, "", "0"):
        folders.insert(0, Path(str(chosen)))
    for folder in folders:
        for pattern in _PLAYWRIGHT:
            yield from (str(path) for path in sorted(folder.glob(pattern), reverse=True) if os.access(path, os.X_OK))


def _starts(path: str) -> bool:
    """Return False for a browser without its libraries, and for a script that only says how to install one."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=_START_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def install_commands(is_root: bool) -> Iterator[list[str]]:
    """Yield what may install a browser, in the order to try: Debian's package, then Playwright's download."""
    apt = shutil.which("apt-get") if is_root else None
    if apt is not None:
        yield [apt, "install", "-y", "-qq", "chromium"]
        yield [apt, "update", "-qq"]
        yield [apt, "install", "-y", "-qq", "chromium"]
    playwright = [sys.executable, "-m", "playwright", "install", "chromium"]
    if apt is not None:
        yield [*playwright[:-1], "--with-deps", "chromium"]
    yield playwright


def install(is_root: bool) -> str | None:
    """Install a browser where that is possible; return its path, or None."""
    print("No Chromium for the tests of the dashboard: installing it …", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in install_commands(is_root):
        try:
            subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_INSTALL_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        find_chromium.cache_clear()
        if (path := find_chromium()) is not None:
            return path
    return None


def main() -> int:
    """Install a browser unless there is one; return 1 if there is none and one is required (REQUIRED=browser)."""
    if find_chromium() is not None or install(os.geteuid() == 0) is not None:
        return 0
    if "browser" in os.environ.get("REQUIRED", "").split(","):
        print(f"It cannot be installed here, and REQUIRED=browser makes that an error: {ADVICE}.", flush=True)
        return 1
    print(f"It cannot be installed here; the tests that need it are left out. To run them, {ADVICE}.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
