"""Leaves out tests that this machine cannot run, and says so in the last lines.

REQUIRED=browser makes it an error that a browser is missing; several needs are separated by commas.

A test that uses the fixture `chromium` needs a browser; others name what they need: `@pytest.mark.needs("root")`.
"""

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import chromium, small_disk

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "/opt/llama.cpp"))
"""Clone of llama.cpp for the tests that need its programs."""


def _no_browser() -> str | None:
    if chromium.find_chromium() is not None:
        return None
    return f"a browser, and there is none: {chromium.ADVICE}"


def _no_network_namespaces() -> str | None:
    if os.geteuid() == 0 and shutil.which("ip") is not None:
        return None
    return "network namespaces, for which root and the command `ip` are necessary: run them as root"


def _no_root() -> str | None:
    return None if os.geteuid() == 0 else "another Unix user, to which only root can change: run them as root"


@cache
def _no_mount() -> str | None:
    if small_disk.can_mount():
        return None
    return "a small file system of their own, which root may mount: run them as root, with `mount`"


def _no_systemd() -> str | None:
    if shutil.which("systemd-analyze") is not None:
        return None
    return "systemd-analyze: install systemd, where it is the service manager"


def _no_helm() -> str | None:
    if shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is not None:
        return None
    return "helm: install it, since its package is for x86_64 alone"


def _no_liger() -> str | None:
    if all(importlib.util.find_spec(package) is not None for package in ("liger_kernel", "triton")):
        return None
    return "liger-kernel and triton: install `.[kernels-liger]` where torch is the one for NVIDIA GPUs"


def _no_llama_cpp() -> str | None:
    if (LLAMA_CPP / "convert_hf_to_gguf.py").is_file() and (LLAMA_CPP / "build/bin/llama-quantize").is_file():
        return None
    return "llama.cpp: name a clone of it, with `llama-quantize` built in `build`, in LLAMA_CPP"


NEEDS: Mapping[str, Callable[[], str | None]] = {
    "browser": _no_browser,
    "network namespaces": _no_network_namespaces,
    "root": _no_root,
    "small disk": _no_mount,
    "liger-kernel": _no_liger,
    "systemd": _no_systemd,
    "helm": _no_helm,
    "llama.cpp": _no_llama_cpp,
}
"""For each need, a function that returns why it is not met and how to meet it, or None if it is met."""


def required_needs() -> set[str]:
    """Return the needs that must be met, or the session fails; raises `UsageError` for one that is not known."""
    required = set(os.environ.get("REQUIRED", "").split(",")) - {""}
    if unknown := required - NEEDS.keys():
        raise pytest.UsageError(f"REQUIRED={','.join(sorted(unknown))}: it may name {', '.join(NEEDS)}")
    return required


def needs_of(item: pytest.Item) -> set[str]:
    """Return what a test needs of the machine."""
    needs = {str(mark.args[0]) for mark in item.iter_markers("needs")}
    if unknown := needs - NEEDS.keys():
        raise pytest.UsageError(
            f"{item.nodeid} needs {', '.join(sorted(unknown))}, which tests/not_run.py does not know"
        )
    return needs | ({"browser"} if "chromium" in getattr(item, "fixturenames", ()) else set())


class NotRun:
    """Plugin of one session: in a process of pytest-xdist it reports to the controlling process."""

    def __init__(self) -> None:
        self._left_out: dict[str, str] = {}
        """Need that is not met, by test."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what cannot run, of the tests that `-m` and `-k` have selected."""
        required_needs()  # a wrong name is an error before the tests
        needs = {item: needs_of(item) for item in items}
        unmet = {need for need in set().union(*needs.values()) if NEEDS[need]() is not None}
        left_out = {item: min(unmet & needs[item]) for item in items if unmet & needs[item]}
        if not left_out:
            return
        self._left_out = {item.nodeid: need for item, need in left_out.items()}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report to the controlling process of pytest-xdist; in that one, fail if everything must run."""
        if self._unmet_required():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["not_run"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the report of a process, each of which has collected all tests."""
        self._left_out |= getattr(node, "workeroutput", {}).get("not_run", {})

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say last what was not run."""
        if self._left_out:
            terminalreporter.section("not run on this machine", yellow=True)
            for sentence in _sentences(self._left_out):
                terminalreporter.line(f"{sentence}.", yellow=True)
            for need in self._unmet_required():
                terminalreporter.line(f"REQUIRED={need} makes this an error.", red=True)

    def _unmet_required(self) -> list[str]:
        return sorted(set(self._left_out.values()) & required_needs())


def _sentences(left_out: Mapping[str, str]) -> list[str]:
    """Return a sentence for each need, with the files of its tests."""
    sentences = []
    for need in sorted(set(left_out.values())):
        files = Counter(test.partition("::")[0] for test, unmet in left_out.items() if unmet == need)
        count = sum(files.values())
        named = ", ".join(f"{file} ({number})" for file, number in sorted(files.items()))
        sentences.append(f"{count} test{'s need' if count > 1 else ' needs'} {NEEDS[need]() or need}: {named}")
    return sentences
