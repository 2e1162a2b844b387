"""Checks that workers have the plugins that a configuration names; each worker reports its plugins at its start."""

from collections.abc import Mapping, Sequence
from typing import Any

from anneal.contracts.errors import FieldError
from anneal.contracts.plugins import PLUGINS, named_plugins
from anneal.contracts.training_config.rules import field_error
from app.workers.online import OnlineWorker


def plugin_problems(
    workers: Sequence[OnlineWorker], config: Mapping[str, Any]
) -> tuple[list[FieldError], list[FieldError]]:
    """Return errors for plugins that no online worker has, and warnings for those that only some have.

    A worker whose version reports no plugins is assumed to have them; without any worker, the run waits for one.
    """
    refused, warned = [], []
    for field, kind, name in named_plugins(config):
        having = [worker.plugins is None or name in worker.plugins.get(kind, ()) for worker in workers]
        if any(having) and not all(having):
            message = (
                f"names {name!r}, which only {sum(having)} of {len(having)} workers have installed, and on another one "
                f"the run fails; ask the operator to install an entry point of `{PLUGINS[kind]}` on all of them"
            )
            warned.append(field_error(field, "plugin_not_everywhere", message))
        elif not all(having):
            installed = sorted({plugin for worker in workers for plugin in (worker.plugins or {}).get(kind, ())})
            message = (
                f"names {name!r}, which no worker has installed; installed are: {', '.join(installed) or 'none'}. Ask "
                f"the operator to install a package with an entry point of `{PLUGINS[kind]}` on the workers "
                "and to restart them (docs/guides/plugins.md)"
            )
            refused.append(field_error(field, "plugin_not_installed", message))
    return refused, warned
