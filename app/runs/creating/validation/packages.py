"""Checks that workers have the package of a configured optimizer; each worker reports its packages at its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from anneal.contracts.errors import FieldError
from anneal.contracts.training_config.optimizers import DEFAULT_STOCHASTIC_OPTIMIZER, OPTIMIZERS
from anneal.contracts.training_config.rules import field_error
from app.workers.online import OnlineWorker


def package_problems(
    workers: Sequence[OnlineWorker], config: Mapping[str, Any]
) -> tuple[list[FieldError], list[FieldError]]:
    """Return an error if no online worker has the package of the optimizer, and a warning if only some have.

    A worker whose version reports no packages is assumed to have it; without any worker, the run waits for one.
    """
    package = _optimizer_package(config)
    having = [worker.packages is None or package in worker.packages for worker in workers]
    if package is None or all(having):
        return [], []
    field = "optim" if "optim" in config else "weights_dtype"
    if any(having):
        message = (
            f"needs the package `{package}`, which only {sum(having)} of {len(having)} workers have, and on "
            "another one the run fails; ask the operator to install it on all of them"
        )
        return [], [field_error(field, "package_not_everywhere", message)]
    remedy = "use another optimizer" if config.get("weights_dtype") != "bfloat16" else "leave `weights_dtype` out"
    message = (
        f"needs the package `{package}`, which no worker has; ask the operator to run `pip install {package}` on the "
        f"workers and to restart them, or {remedy}"
    )
    return [field_error(field, "package_not_installed", message)], []


def _optimizer_package(config: Mapping[str, Any]) -> str | None:
    """Return the package of the configured optimizer; None if torch has it, or if a plugin is the optimizer."""
    name, extra = config.get("optim"), config.get("extra")
    has_plugin = isinstance(extra, Mapping) and extra.get("optimizer") is not None
    if name is None and config.get("weights_dtype") == "bfloat16":
        name = DEFAULT_STOCHASTIC_OPTIMIZER
    traits = OPTIMIZERS.get(name) if isinstance(name, str) and not has_plugin else None
    return None if traits is None else traits.package
