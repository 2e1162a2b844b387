"""The trainer entry of every method exists."""

import inspect
import pkgutil

import pytest

from anneal.contracts.methods import METHODS, Method


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_its_trainer_takes_a_run_and_its_replacements(method: Method) -> None:
    required = [
        parameter.name
        for parameter in inspect.signature(pkgutil.resolve_name(method.trainer)).parameters.values()
        if parameter.default is parameter.empty
    ]
    assert required == ["run", "replaced"]
