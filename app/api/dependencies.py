"""FastAPI dependencies shared by the endpoints."""

import difflib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol

from fastapi import Depends, Header, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from app.api.errors import invalid
from app.config import Settings
from app.infra.storage import Storage


class ChangeRecorder(Protocol):
    """Records a call that changes something; middleware puts it into the state of the request."""

    is_written: bool

    def record_change(self, request: Request, response: Response, session: AsyncSession) -> None:
        """Add the record to the transaction that is about to be committed."""


async def get_session(request: Request, response: Response) -> AsyncIterator[AsyncSession]:
    """Provide the session of a request, committed before the response is sent and rolled back on any error.

    What follows the last `release_connection` is one transaction, in which the audit entry of a request that
    changes something is written too.
    """
    async with request.app.state.sessions() as session:
        yield session
        recorder: ChangeRecorder | None = request.scope["state"].get("audited")
        if recorder is not None:
            recorder.record_change(request, response, session)
        await session.commit()
    if recorder is not None:
        recorder.is_written = True


async def release_connection(session: AsyncSession) -> None:
    """Return the database connection of a request before it waits for the storage or for a thread.

    There are few connections, and a thread may have much work to do before. Rows that were locked are so no longer.
    """
    await session.commit()


_parameters: dict[Callable[..., Any], frozenset[str]] = {}
"""Names of the query parameters of each endpoint that was called."""


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the call does not have, rather than answer as if they had been applied."""
    if not request.scope["query_string"]:
        return
    known = _parameters_of(request.scope["route"])
    # Of an object, which is documented as `deepObject`, each member is a parameter: `metadata[team]`.
    unknown = [name for name in request.query_params if not {name, name[: name.find("[") + 1]} & known]
    if not unknown:
        return
    supported = f"the parameters are {', '.join(f'`{name}`' for name in sorted(known))}" if known else "it has none"
    errors = []
    for name in sorted(set(unknown)):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        message = f"is not a parameter of this call; {f'perhaps `{near[0]}`' if near else supported}"
        errors.append(FieldError(field=name, code="unknown_parameter", message=message))
    raise invalid(errors)


def _parameters_of(route: Any) -> frozenset[str]:
    if (parameters := _parameters.get(route.endpoint)) is None:
        documented = (getattr(route, "openapi_extra", None) or {}).get("parameters", ())
        objects = {f"{it['name']}[" for it in documented if it.get("style") == "deepObject"}
        parameters = _parameters[route.endpoint] = frozenset(_query_parameters(route.dependant) | objects)
    return parameters


def _query_parameters(dependant: Any) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*map(_query_parameters, dependant.dependencies))


async def get_reading(request: Request) -> AsyncIterator[AsyncSession]:
    """Provide a read-only session without a transaction, which would cost as much as a short query."""
    async with request.app.state.reading_sessions() as session:
        yield session


async def get_snapshot(request: Request) -> AsyncIterator[AsyncSession]:
    """Provide a read-only session that sees the database as of its first statement."""
    async with request.app.state.snapshot_sessions() as session, session.begin():
        yield session


# Async like all dependencies: FastAPI runs a sync function in a thread, which takes as long as a short query.
async def _settings_of_app(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _storage_of_app(request: Request) -> Storage:
    storage: Storage = request.app.state.storage
    return storage


# "function" scope: the transaction ends before the response starts, so that a 2xx never precedes its commit.
Session = Annotated[AsyncSession, Depends(get_session, scope="function")]
Reading = Annotated[AsyncSession, Depends(get_reading, scope="function")]
Snapshot = Annotated[AsyncSession, Depends(get_snapshot, scope="function")]
CurrentSettings = Annotated[Settings, Depends(_settings_of_app)]
CurrentStorage = Annotated[Storage, Depends(_storage_of_app)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Repeating a request with the same key returns the same run, so a request can be retried safely.",
        examples=["6f1c0a52-6d0e-4d5c-8a53-0f8c7a8f1b6e"],
    ),
]
