"""What the operator has installed for trainings: entry points by kind, found, loaded, called, and refused by name.

Imports nothing heavy: the worker tells with it what there is, without torch.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from app.runs.plugins import PLUGINS
from worker.training.failures import Stopped, TrainingFailure

_OUTLIVES = (Stopped, TrainingFailure, MemoryError)


def installed() -> dict[str, list[str]]:
    """Names of all that is installed, by kind."""
    return {kind: sorted({point.name for point in entry_points(group=group)}) for kind, group in PLUGINS.items()}


def load(kind: str, name: str) -> Callable[..., Any]:
    """What an entry point leads to.

    Raises:
        TrainingFailure: `config_error` that names what is not installed, cannot be imported or cannot be called.
    """
    group = PLUGINS[kind]
    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        there = ", ".join(sorted(points)) or "none"
        raise TrainingFailure(
            "config_error",
            f"This worker has no {kind.replace('_', ' ')} `{name}`; installed are: {there}. The operator installs a "
            f"package with an entry point of `{group}` into the environment of the workers.",
        )
    try:
        found: Any = points[name].load()
    except Exception as error:  # code of others, which raises whatever it likes
        raise wrong(kind, name, f"cannot be imported: {error!r}") from error
    if not callable(found):
        raise wrong(kind, name, f"is {_a(found)}, and has to be something that can be called")
    return found  # type: ignore[no-any-return]


def call(kind: str, name: str, *arguments: Any, **named: Any) -> Any:
    """What an entry point makes of these arguments.

    Raises:
        TrainingFailure: `config_error`: as `load`, or it does not take the arguments, or it fails; what a failure says
            of memory or of a stop stays what it is.
    """
    found = load(kind, name)
    try:
        inspect.signature(found).bind(*arguments, **named)
    except TypeError as error:
        raise wrong(kind, name, f"does not take what it is called with: {error}") from error
    except ValueError:
        pass  # something compiled that does not tell its arguments
    try:
        return found(*arguments, **named)
    except _OUTLIVES:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        raise wrong(kind, name, f"failed: {error!r}") from error


def checked(kind: str, name: str, made: Any, type: type, called: str) -> Any:
    """What an entry point has made, if it is of this type, which is `called` so in the refusal."""
    if not isinstance(made, type):
        raise wrong(kind, name, f"returned {_a(made)}, not a {called}")
    return made


def wrong(kind: str, name: str, why: str) -> TrainingFailure:
    """The refusal of an entry point, by its name."""
    return TrainingFailure("config_error", f"`{PLUGINS[kind]}` entry `{name}` {why}.")


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
