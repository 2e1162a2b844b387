"""Checks that workers have the package of a configured optimizer; each worker reports its packages at its start."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnExpressionArgument, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.training_config.optimizers import DEFAULT_STOCHASTIC_OPTIMIZER, OPTIMIZERS
from anneal.contracts.training_config.rules import field_error
from app.tables.workers import Worker


async def package_problems(
    session: AsyncSession, online: tuple[ColumnExpressionArgument[bool], ...], config: Mapping[str, Any]
) -> tuple[list[FieldError], list[FieldError]]:
    """Return an error if no `online` worker has the package of the optimizer, and a warning if only some have.

    A worker whose version reports no packages is assumed to have it; without any worker, the run waits for one.
    """
    field = "optim" if "optim" in config else "weights_dtype"
    extra = config.get("extra")
    has_plugin = isinstance(extra, Mapping) and extra.get("optimizer") is not None
    name = config.get("optim")
    if name is None and config.get("weights_dtype") == "bfloat16":
        name = DEFAULT_STOCHASTIC_OPTIMIZER
    traits = OPTIMIZERS.get(name) if isinstance(name, str) and not has_plugin else None
    if traits is None or traits.package is None:
        return [], []
    package = traits.package
    workers = (await session.scalars(select(Worker.packages).where(*online))).all()
    equipped = [packages is None or package in packages for packages in workers]
    if all(equipped):
        return [], []
    if any(equipped):
        message = (
            f"needs the package `{package}`, which only {sum(equipped)} of {len(equipped)} workers have, and on "
            "another one the run fails; ask the operator to install it on all of them"
        )
        return [], [field_error(field, "package_not_everywhere", message)]
    remedy = "use another optimizer" if config.get("weights_dtype") != "bfloat16" else "leave `weights_dtype` out"
    message = (
        f"needs the package `{package}`, which no worker has; ask the operator to run `pip install {package}` on the "
        f"workers and to restart them, or {remedy}"
    )
    return [field_error(field, "package_not_installed", message)], []
