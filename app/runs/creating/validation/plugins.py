"""Checks that workers have the plugins that a configuration names; each worker reports its plugins at its start."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnExpressionArgument, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.plugins import PLUGINS, named_plugins
from anneal.contracts.training_config.rules import field_error
from app.tables.workers import Worker


async def plugin_problems(
    session: AsyncSession, online: tuple[ColumnExpressionArgument[bool], ...], config: Mapping[str, Any]
) -> tuple[list[FieldError], list[FieldError]]:
    """Return errors for plugins that no `online` worker has, and warnings for those that only some have.

    A worker whose version reports no plugins is assumed to have them; without any worker, the run waits for one.
    """
    named = list(named_plugins(config))
    if not named:
        return [], []
    workers = (await session.scalars(select(Worker.plugins).where(*online))).all()
    refused, warned = [], []
    for field, kind, name in named:
        having = [found is None or name in found.get(kind, ()) for found in workers]
        if all(having):
            continue
        if any(having):
            message = (
                f"names {name!r}, which only {sum(having)} of {len(having)} workers have installed, and on another one "
                f"the run fails; ask the operator to install an entry point of `{PLUGINS[kind]}` on all of them"
            )
            warned.append(field_error(field, "plugin_not_everywhere", message))
            continue
        there = sorted({one for found in workers for one in (found or {}).get(kind, ())})
        message = (
            f"names {name!r}, which no worker has installed; installed are: {', '.join(there) or 'none'}. Ask the "
            f"operator to install a package with an entry point of `{PLUGINS[kind]}` on the workers "
            "and to restart them (docs/guides/plugins.md)"
        )
        refused.append(field_error(field, "plugin_not_installed", message))
    return refused, warned
