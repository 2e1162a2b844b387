"""Tests, mutants and modules named in docs/internals/promises.md exist."""

import re

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.nodes import ROOT, is_left_out, is_test

TEXT = (ROOT / "docs" / "internals" / "promises.md").read_text()
MUTANT = {mutant.name: mutant for mutant in MUTANTS}
PROMISES = {
    int(number): body
    for number, body in re.findall(r"^### (\d+)\. .*?$(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL)
}


def part(number: int, name: str) -> str:
    """Return one paragraph of a promise: `Kept by` or `Mutants`."""
    match = re.search(rf"^{name}: (.*?)(?:\n\n|\Z)", PROMISES[number], flags=re.MULTILINE | re.DOTALL)
    return match.group(1) if match else ""


def named_tests(number: int) -> list[str]:
    return re.findall(r"^- `(tests/\S+::\S+)`$", PROMISES[number], flags=re.MULTILINE)


def mutants_of(number: int) -> list[str]:
    return re.findall(r"`([a-z0-9-]+)`", part(number, "Mutants"))


def test_all_twenty_promises_are_listed_in_order() -> None:
    assert list(PROMISES) == list(range(1, 21))


@pytest.mark.parametrize("number", range(1, 21))
def test_each_promise_names_existing_mechanisms_tests_and_mutants(number: int) -> None:
    files = re.findall(r"`((?:app|worker|migrations)/[\w/]+\.py)`", part(number, "Kept by"))
    functions = re.findall(r"`machine\.(\w+)`", part(number, "Kept by"))
    assert files or functions, "the mechanism names a file or a transition"
    assert [file for file in files if not (ROOT / file).is_file()] == []
    machine = (ROOT / "app" / "runs" / "state" / "machine.py").read_text()
    assert [name for name in functions if f"def {name}(" not in machine] == []
    assert named_tests(number)
    assert [test for test in named_tests(number) if not is_test(test)] == []
    assert [test for test in named_tests(number) if is_left_out(test)] == [], "`make test` runs each of them"
    assert mutants_of(number)
    assert [name for name in mutants_of(number) if name not in MUTANT] == []


def test_every_named_test_exists() -> None:
    assert [test for test in re.findall(r"`(tests/\S+::\S+)`", TEXT) if not is_test(test)] == []


@pytest.mark.parametrize("name", MUTANT)
def test_each_mutant_is_listed_with_a_promise_and_its_test(name: str) -> None:
    mutant = MUTANT[name]
    here = [number for number in PROMISES if name in mutants_of(number)]
    assert here, "it is in the document"
    assert set(here) <= set(mutant.promises)
    for number in here:
        assert mutant.test.partition("[")[0] in named_tests(number)
