"""Registry of the plugins that the operator installed: finds, loads, calls and checks entry points by kind and name.

It does not import torch, since the worker uses it to report what is installed.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from anneal.contracts.plugins import PLUGINS
from worker.training.failures import Stopped, TrainingFailure

_RAISED_UNCHANGED = (Stopped, TrainingFailure, MemoryError)


def load_plugin(kind: str, name: str) -> Callable[..., Any]:
    """Load an entry point.

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
        plugin: Any = points[name].load()
    except Exception as error:  # third-party code can raise anything
        raise plugin_error(kind, name, f"cannot be imported: {error!r}") from error
    if not callable(plugin):
        raise plugin_error(kind, name, f"is {_type_name(plugin)}, but must be a callable")
    return plugin  # type: ignore[no-any-return]


def call_plugin(kind: str, name: str, *arguments: Any, **named: Any) -> Any:
    """Call an entry point with these arguments and return its result.

    Errors about memory and stops are raised unchanged.

    Raises:
        TrainingFailure: `config_error`: as `load`, or it does not accept the arguments, or it fails.
    """
    plugin = load_plugin(kind, name)
    try:
        inspect.signature(plugin).bind(*arguments, **named)
    except TypeError as error:
        raise plugin_error(kind, name, f"does not accept its arguments: {error}") from error
    except ValueError:
        pass  # compiled code without a signature
    return call_guarded(kind, name, plugin, *arguments, **named)


def call_guarded(kind: str, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function of a plugin, and name the plugin in its errors.

    Errors about memory and stops are raised unchanged.

    Raises:
        TrainingFailure: `config_error`: it failed.
    """
    try:
        return function(*arguments, **named)
    except _RAISED_UNCHANGED:
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        raise plugin_error(kind, name, f"failed: {error!r}") from error


def check_type(kind: str, name: str, value: Any, type: type, called: str) -> Any:
    """Return the result of an entry point if it has this type, which the error message names as `called`."""
    if not isinstance(value, type):
        raise plugin_error(kind, name, f"returned {_type_name(value)}, not a {called}")
    return value


def plugin_error(kind: str, name: str, why: str) -> TrainingFailure:
    """Create the error about an entry point, which names it."""
    return TrainingFailure("config_error", f"`{PLUGINS[kind]}` entry `{name}` {why}.")


def _type_name(value: Any) -> str:
    return f"a {type(value).__name__}"
