"""Pytest plugin for the tests in a copy: records the outcome of each test and the files of the loaded modules."""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.copies import VERDICTS

_OURS = ("app", "worker", "tests", "migrations")


def _write(**facts: Any) -> None:
    with Path(os.environ[VERDICTS]).open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _has_asserted(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """Return True if the test failed by an assertion or a missing exception, not by a timeout or another error."""
    failed = isinstance(error.value, pytest.fail.Exception) and "Timeout" not in str(error.value)
    return failed or isinstance(error.value, AssertionError)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo
    _write(
        node=item.nodeid,
        when=call.when,
        outcome=report.outcome,
        asserted=error is not None and _has_asserted(error),
        why=f"{error.typename}: {error.value}"[:300] if error else "",
    )
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(collecting=str(report.longrepr).strip().splitlines()[-1][:300])


def pytest_sessionfinish() -> None:
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in _OURS]
    _write(files=sorted({file for module in ours if (file := getattr(module, "__file__", None))}))
