"""Every mutant can be applied to the current code, and its test exists. `make mutants` tests them."""

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.copies import ROOT
from tests.nodes import is_parametrized, is_test


def test_each_can_be_made_in_the_code_as_it_is() -> None:
    problems = {mutant.name: [change.problem(ROOT) for change in mutant.changes] for mutant in MUTANTS}
    assert {name: found for name, found in problems.items() if any(found)} == {}


def test_each_is_a_bug_of_its_own_and_breaks_a_promise() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 14
    for mutant in MUTANTS:
        assert mutant.promises and set(mutant.promises) <= set(range(1, 21)), mutant.name
        assert mutant.about.endswith("."), mutant.name
        assert all(change.old != change.new for change in mutant.changes), mutant.name


def test_the_test_of_each_is_there(request: pytest.FixtureRequest) -> None:
    assert [mutant.name for mutant in MUTANTS if not is_test(mutant.test)] == []
    assert [mutant.name for mutant in MUTANTS if is_parametrized(mutant.test) and "[" not in mutant.test] == []
    # Parameters are known after collection: if the function was collected, so was the parametrized test.
    collected = {item.nodeid.partition("@")[0] for item in request.session.items}
    functions = {node.partition("[")[0] for node in collected}
    chosen = request.config.option.keyword or any("::" in argument for argument in request.config.args)
    if not chosen:
        expected = {mutant.test for mutant in MUTANTS if mutant.test.partition("[")[0] in functions}
        assert expected - collected == set()
