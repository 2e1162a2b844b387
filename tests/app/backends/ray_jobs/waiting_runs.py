"""Runs that wait for a job of a Ray cluster, and the loop that submits it."""

from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import Engine, text

from app.backends.ray_jobs import RayJobs
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from tests import rows
from tests.rows import add_run, add_worker, run_row


async def loop_of(settings: Settings) -> AsyncIterator[RayJobs]:
    """A loop that does a round when the test says so."""
    own = async_engine(settings.database_url or "", pool_size=2)
    loop = RayJobs(own, Broker(settings), settings)
    yield loop
    await loop.stop()
    await own.dispose()


def add(engine: Engine, **values: Any) -> str:
    """A pending run of the backend; its id."""
    run_id: str = add_run(engine, backend="ray", **values).id
    return run_id


def job(run_id: str, epoch: int = 0) -> str:
    return f"anneal-{run_id}-{epoch}"


def waits_because(engine: Engine, run_id: str) -> tuple[str, str]:
    reason = run_row(engine, run_id).pending_reason
    return reason["code"], reason["message"]


def claim(engine: Engine, run_id: str, epoch: int = 0) -> Any:
    """Claim the run as the worker that its job has started."""
    worker = add_worker(engine, devices=4, backends=["ray"])
    return rows.claim(engine, worker, only_run=(run_id, epoch))


def execute(engine: Engine, statement: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement) if isinstance(statement, str) else statement)
