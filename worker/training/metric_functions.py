"""Metric functions of evaluations, which the operator installs on the workers: entry points of `anneal.metrics`.

An entry point is a factory without arguments. For each evaluation it makes an object with two methods:
`update(logits, labels)`, called with each batch, and `result() -> dict[str, float]`, called once at the end. `logits`
(batch x length x vocabulary) predict `labels` (batch x length) at the same place; labels of -100 are not to be counted.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from worker.training.failures import TrainingFailure

GROUP = "anneal.metrics"


class MetricFunction(Protocol):
    """What a factory makes."""

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take in a batch."""

    def result(self) -> Mapping[str, float]:
        """What was found, by names that get `eval_` before them."""


Factories = dict[str, Callable[[], MetricFunction]]


def load(names: Sequence[str]) -> Factories:
    """The factories with these names, each tried once.

    Raises:
        TrainingFailure: `config_error` that names what is not installed, or is not what it has to be.
    """
    if not names:
        return {}
    installed = {point.name: point for point in entry_points(group=GROUP)}
    missing = [name for name in names if name not in installed]
    if missing:
        there = ", ".join(sorted(installed)) or "none"
        raise TrainingFailure(
            "config_error",
            f"`extra.metrics`: this worker has no metric function {', '.join(missing)}; installed are: {there}. The "
            f"operator installs them as entry points of `{GROUP}`.",
        )
    factories: Factories = {}
    for name in names:
        try:
            factories[name] = installed[name].load()
        except Exception as error:  # code of others, which raises whatever it likes
            raise _wrong(name, f"cannot be imported: {error!r}") from error
        make(factories, name)
    return factories


def make(factories: Factories, name: str) -> MetricFunction:
    """An object for one evaluation.

    Raises:
        TrainingFailure: `config_error` where the factory makes none.
    """
    factory: Any = factories[name]
    if not callable(factory):
        raise _wrong(name, f"is {_a(factory)}, and has to be a factory: something that is called without arguments")
    try:
        made = factory()
    except Exception as error:
        raise _wrong(name, f"cannot be made: {error!r}") from error
    lacking = [method for method in ("update", "result") if not callable(getattr(made, method, None))]
    if lacking:
        raise _wrong(name, f"makes {_a(made)}, which has no method {' and no '.join(lacking)}")
    return made  # type: ignore[no-any-return]


class Evaluation:
    """All metric functions of a run through one evaluation; without any it does nothing."""

    def __init__(self, factories: Factories) -> None:
        self._functions = {name: make(factories, name) for name in factories}

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Show a batch as the model sees it, labels at the place of their token: here they are brought together.

        Raises:
            TrainingFailure: `config_error` that names a function which failed.
        """
        for name, function in self._functions.items():
            try:
                function.update(logits[:, :-1], labels[:, 1:])
            except Exception as error:
                raise _wrong(name, f"failed in `update`: {error!r}") from error

    def results(self, taken: Mapping[str, float]) -> dict[str, float]:
        """What all functions found, with `eval_` before each name; `taken` are the names there already.

        Raises:
            TrainingFailure: `config_error` that names a function whose result is no dict of numbers by new names.
        """
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                result: Any = function.result()
            except Exception as error:
                raise _wrong(name, f"failed in `result`: {error!r}") from error
            if not isinstance(result, Mapping):
                raise _wrong(name, f"returned {_a(result)} from `result`, and has to return a dict of numbers by name")
            for key, value in result.items():
                number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if not isinstance(key, str) or isinstance(number, bool) or not isinstance(number, int | float):
                    raise _wrong(name, f"returned {_a(value)} for {key!r}, and has to return numbers by name")
                told = f"eval_{key}"
                if told in taken or told in found:
                    raise _wrong(name, f"returned {key!r}, and evaluations have a measure `{told}` already")
                found[told] = float(number)
        return found


def _wrong(name: str, why: str) -> TrainingFailure:
    return TrainingFailure("config_error", f"The metric function `{name}` {why}.")


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
