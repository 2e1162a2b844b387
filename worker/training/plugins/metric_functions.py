"""Metric functions of evaluations, installed on the workers by the operator: entry points of `anneal.metrics`.

An entry point is a factory without arguments. For each evaluation it creates an object with `result() -> dict[str,
float]`, called once at the end, and with a method that is called with each batch. That method depends on what the
training method evaluates (`_UPDATES`), and one object may have several of them.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from anneal.contracts.methods import Method
from worker.training.failures import TrainingFailure

GROUP = "anneal.metrics"


_LOGITS = "update"
_UPDATES = {"reward": "update_scores", "rl": "update_completions"}
"""Method that adds a batch, by the objective of the training method; of others it is `_LOGITS`."""


def are_given_logits(method: Method) -> bool:
    """Return True if metric functions get the logits of each batch, which are too large to keep or to send."""
    return method.objective not in _UPDATES


class MetricFunction(Protocol):
    """Object created by a factory for one evaluation; besides `result` it needs the method of the run's objective.

    - `update(logits, labels)`: `logits` (batch x length x vocabulary) predict `labels` (batch x length) at the same
      position; ignore labels of -100. In a batch of pairs, the better answers come first, then the worse ones.
    - `update_scores(chosen, rejected)`: scores of the better and the worse answers (pairs each).
    - `update_completions(prompts, completions, rewards)`: lists of texts or chats, and `rewards` (completions x reward
      functions), NaN where a function gave none.
    """

    def result(self) -> Mapping[str, float]:
        """Return the metrics by name; `eval_` is prepended to each name."""


Factories = dict[str, Callable[[], MetricFunction]]


def load_factories(names: Sequence[str], method: Method) -> Factories:
    """Load the factories with these names, and call each once to check that it can evaluate this method.

    Raises:
        TrainingFailure: `config_error` that names what is not installed or not valid.
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
        except Exception as error:  # third-party code can raise anything
            raise _function_error(name, f"cannot be imported: {error!r}") from error
        function = create_metric_function(factories, name)
        update = _UPDATES.get(method.objective, _LOGITS)
        if not callable(getattr(function, update, None)):
            raise _function_error(
                name,
                f"returned {_type_name(function)}, which has no method {update}, so it cannot evaluate `{method.name}`",
            )
    return factories


def create_metric_function(factories: Mapping[str, Callable[[], Any]], name: str) -> MetricFunction:
    """Create the object for one evaluation.

    Raises:
        TrainingFailure: `config_error` if the factory does not return one.
    """
    factory: Any = factories[name]
    if not callable(factory):
        raise _function_error(name, f"is {_type_name(factory)}, but must be a factory: a callable without arguments")
    try:
        function = factory()
    except Exception as error:
        raise _function_error(name, f"cannot be created: {error!r}") from error
    if not callable(getattr(function, "result", None)):
        raise _function_error(name, f"returned {_type_name(function)}, which has no method result")
    return function  # type: ignore[no-any-return]


class Evaluation:
    """All metric functions of a run during one evaluation; without any it does nothing."""

    def __init__(self, factories: Mapping[str, Callable[[], Any]], keeps: bool = False) -> None:
        """Create the functions; with `keeps`, batches are kept, for `take` to pass on those of all ranks."""
        self._functions = {name: create_metric_function(factories, name) for name in factories}
        self._keeps = keeps
        self.kept: list[tuple[str, tuple[Any, ...]]] = []
        """Batches that were kept, each with the method that is called with it."""

    def pass_kept(self, batches: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Pass batches that a rank has kept to all functions; raises as `update`."""
        for update, batch in batches:
            self._pass_on(update, batch)

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Pass a batch to all functions, with logits aligned to the labels that they predict.

        `labels` are as the model takes them, each at the position of its own token.

        Raises:
            TrainingFailure: `config_error` that names a function which failed.
        """
        self._pass_or_keep("update", logits[:, :-1], labels[:, 1:])

    def update_scores(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        """Pass the scores of a batch of pairs to all functions; raises as `update`."""
        self._pass_or_keep("update_scores", chosen, rejected)

    def update_completions(self, prompts: list[Any], completions: list[Any], rewards: torch.Tensor) -> None:
        """Pass completions and their rewards to all functions; raises as `update`."""
        self._pass_or_keep("update_completions", prompts, completions, rewards)

    def _pass_or_keep(self, update: str, *batch: Any) -> None:
        if not self._keeps:
            self._pass_on(update, batch)
        elif self._functions:
            on_host = tuple(one.cpu() if isinstance(one, torch.Tensor) else one for one in batch)
            self.kept.append((update, on_host))

    def _pass_on(self, update: str, batch: Sequence[Any]) -> None:
        for name, function in self._functions.items():
            try:
                getattr(function, update)(*batch)
            except Exception as error:
                raise _function_error(name, f"failed in `{update}`: {error!r}") from error

    def results(self, taken: Mapping[str, float]) -> dict[str, float]:
        """Return the results of all functions, with `eval_` before each name; `taken` has the names in use.

        Raises:
            TrainingFailure: `config_error` that names a function whose result is not a dict of numbers by new names.
        """
        named_results: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                result: Any = function.result()
            except Exception as error:
                raise _function_error(name, f"failed in `result`: {error!r}") from error
            try:
                numbers = named_numbers(result)
            except ValueError as error:
                raise _function_error(
                    name, f"returned {error} from `result`, but must return numbers by name"
                ) from error
            for key, number in numbers.items():
                metric_name = f"eval_{key}"
                if metric_name in taken or metric_name in named_results:
                    raise _function_error(
                        name, f"returned {key!r}, but evaluations already have a metric `{metric_name}`"
                    )
                named_results[metric_name] = number
        return named_results


def named_numbers(metrics: Any) -> dict[str, float]:
    """Convert what a plugin reports to numbers by name; a tensor of one element is a number.

    Raises:
        ValueError: it is not a mapping from names to numbers; the message says what it is instead.
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(_type_name(metrics))
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(name, str) or isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{_type_name(value)} for {name!r}")
        numbers[name] = float(number)
    return numbers


def _function_error(name: str, why: str) -> TrainingFailure:
    return TrainingFailure("config_error", f"The metric function `{name}` {why}.")


def _type_name(value: Any) -> str:
    return f"a {type(value).__name__}"
