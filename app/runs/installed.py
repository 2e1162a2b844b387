"""Whether some worker has the plugins that a configuration names: what each has installed it tells when it starts."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.runs.conflicts import Problem, problem
from app.runs.plugins import PLUGINS, named
from app.workers.models import Worker


async def plugin_problems(
    session: AsyncSession, online: tuple[ColumnElement[bool], ...], config: Mapping[str, Any]
) -> tuple[list[Problem], list[Problem]]:
    """What no worker that is `online` has installed, and what only some of them have.

    Of workers whose version tells nothing the best is believed; without any, the run waits for one.
    """
    wanted = list(named(config))
    if not wanted:
        return [], []
    workers = (await session.scalars(select(Worker.plugins).where(*online))).all()
    refused, warned = [], []
    for field, kind, name in wanted:
        having = [found is None or name in found.get(kind, ()) for found in workers]
        if all(having):
            continue
        if any(having):
            message = (
                f"names {name!r}, which only {sum(having)} of {len(having)} workers have installed, and on another one "
                f"the run fails; the operator installs an entry point of `{PLUGINS[kind]}` on all of them"
            )
            warned.append(problem(field, "plugin_not_everywhere", message))
            continue
        there = sorted({one for found in workers for one in (found or {}).get(kind, ())})
        message = (
            f"names {name!r}, which no worker has installed; there are: {', '.join(there) or 'none'}. The operator "
            f"installs a package with an entry point of `{PLUGINS[kind]}` on the workers (docs/plugins.md)"
        )
        refused.append(problem(field, "plugin_not_installed", message))
    return refused, warned
