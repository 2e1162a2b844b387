"""Dependencies and response shared by the endpoints that create a run."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import BackgroundTasks, Depends, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentSettings, CurrentStorage, IdempotencyKey, Session
from app.api.idempotency import Idempotency
from app.contracts.backends import BACKEND_RULES
from app.runs.creation import RunContext
from app.tables.runs import Run


@dataclass(frozen=True)
class NewRunRequest:
    """A request that creates a run."""

    request: Request
    response: Response
    session: AsyncSession
    around: RunContext
    caller_id: str | None
    after_commit: BackgroundTasks
    _key: str | None

    async def idempotency(self, call: str) -> Idempotency | None:
        """Return the caller's idempotency key for the call at this path, if any; raise 422 for an invalid one."""
        return Idempotency.of(self._key, call, await self.request.body())

    def accept(self, run: Run) -> None:
        """Respond with 202 and the run's location; workers are notified after the commit."""
        self.response.status_code = 202
        self.response.headers["Location"] = f"/v1/runs/{run.id}"
        self.after_commit.add_task(self.request.app.state.queue.hint)


async def _making(
    request: Request,
    response: Response,
    session: Session,
    settings: CurrentSettings,
    storage: CurrentStorage,
    caller: CurrentCaller,
    after_commit: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
) -> NewRunRequest:
    around = RunContext(settings, storage, BACKEND_RULES)
    return NewRunRequest(request, response, session, around, caller.key_id, after_commit, idempotency_key)


NewRun = Annotated[NewRunRequest, Depends(_making, scope="function")]


async def curve_read_slot(request: Request) -> AsyncIterator[None]:
    """Limit concurrent reads of curves; requests wait before the session takes a connection, so that they hold none."""
    async with request.app.state.curve_reads:
        yield
