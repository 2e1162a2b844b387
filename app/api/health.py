"""Liveness and readiness endpoints."""

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncEngine

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.health import Alive, Ready
from app.api.errors import RETRY_SECONDS, ApiError, as_api_error
from app.infra.broker import Broker
from app.tables import migrate

router = APIRouter(tags=["health"])
_CHECK_SECONDS = 5.0


@router.get("/healthz")
async def healthz() -> Alive:
    """Report liveness; the only endpoint that needs no key."""
    return Alive()


@router.get("/readyz", responses={503: {"description": "Not ready; `errors` lists what is missing."}})
async def readyz(request: Request) -> Ready:
    """Check that the database and the broker are reachable and that the schema is at this version or a later one."""
    state = request.app.state
    database, broker = await asyncio.gather(_check_database(state.engine), _check_broker(state.queue))
    missing = [found for found in (database, broker) if isinstance(found, FieldError)]
    if missing:
        raise ApiError(
            503,
            "not_ready",
            " ".join(item.message for item in missing),
            errors=missing,
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    return Ready(version=version("anneal"), migrations=str(database))


async def _check_database(engine: AsyncEngine) -> FieldError | str:
    """Return the revision of the schema, or an error."""
    try:
        async with asyncio.timeout(_CHECK_SECONDS), engine.connect() as connection:
            revision = await connection.run_sync(migrate.current_revision)
    except Exception as error:
        if as_api_error(error) is None and not isinstance(error, TimeoutError):
            raise
        return FieldError(
            field="database", code="unreachable", message="The database does not answer; start it and try again."
        )
    older = migrate.schema_error(revision)
    return FieldError(field="migrations", code="not_at_head", message=older) if older else revision


async def _check_broker(queue: Broker) -> FieldError | None:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            error = await queue.write_error()
    except TimeoutError:
        error = "Redis does not answer"
    if error is None:
        return None
    return FieldError(
        field="broker",
        code="unreachable",
        message=f"{error}; runs are accepted and start when it is available again.",
    )
