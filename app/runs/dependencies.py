"""Dependencies shared by the endpoints of runs: backends, and the context of requests that create a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import BackgroundTasks, Depends, Request, Response
from sqlalchemy import select

from anneal.contracts.backends import TrainingBackend
from anneal.contracts.schemas.runs.reads import RunRead
from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentStorage, IdempotencyKey, Session
from app.api.idempotency import Idempotency
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction
from app.runs.reading import serializers
from app.tables.runs import Run

Backend = TrainingBackend[RunTransaction, Run]

_DEFAULT = "celery"


def backend_or_default(request: Request, name: str | None) -> Backend:
    """Return a backend by name; the default one for an unknown name, which it refuses with all other errors."""
    backends: Mapping[str, Backend] = request.app.state.backends
    return backends.get(name or _DEFAULT, backends[_DEFAULT])


async def _backend_of_run(request: Request, session: Session, run_id: str) -> Backend:
    """Return the backend of an existing run."""
    return backend_or_default(request, await session.scalar(select(Run.backend).where(Run.id == run_id)))


BackendOfRun = Annotated[Backend, Depends(_backend_of_run, scope="function")]


@dataclass(frozen=True)
class NewRunRequest:
    """A request that creates a run."""

    request: Request
    response: Response
    storage: Storage
    _transaction: RunTransaction
    _key: str | None

    async def build_transaction(self, call: str) -> RunTransaction:
        """Return the transaction of the call at this path; raise 422 for an invalid idempotency key."""
        idempotency = Idempotency.from_header(self._key, call, await self.request.body())
        return replace(self._transaction, idempotency=idempotency)

    async def respond_accepted(self, run: Run) -> RunRead:
        """Respond with 202 and the run, with its location."""
        self.response.status_code = 202
        self.response.headers["Location"] = f"/v1/runs/{run.id}"
        return await serializers.run_read(self._transaction.session, self.storage, run)


async def _new_run(
    request: Request,
    response: Response,
    session: Session,
    storage: CurrentStorage,
    caller: CurrentCaller,
    after_commit: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
) -> NewRunRequest:
    transaction = RunTransaction(session, after_commit, caller.key_id)
    return NewRunRequest(request, response, storage, transaction, idempotency_key)


NewRun = Annotated[NewRunRequest, Depends(_new_run, scope="function")]
