"""Endpoints `/v1/runs/{id}/actions`."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Header, Request, Response

from anneal.contracts.schemas.actions import ActionCreate, ActionRead
from anneal.contracts.schemas.page import Page
from app.api.authorization import CurrentCaller
from app.api.dependencies import Session
from app.api.idempotency import Idempotency
from app.api.pagination import PageQuery
from app.runs.state.actions import service
from app.runs.state.service import get_run as get_run

router = APIRouter(prefix="/runs/{run_id}/actions", tags=["actions"])


@router.post(
    "",
    status_code=202,
    responses={409: {"description": "The run has ended or is stopping, or too many actions are waiting."}},
)
async def create_action(
    run_id: str,
    body: ActionCreate,
    request: Request,
    response: Response,
    session: Session,
    caller: CurrentCaller,
    after_commit: BackgroundTasks,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Repeating a request with the same key returns the same action, so that a call can be retried.",
            examples=["6f1c0a52-6d0e-4d5c-8a53-0f8c7a8f1b6e"],
        ),
    ] = None,
) -> ActionRead:
    """Request an action between two steps of a run: save, evaluate, sample, change the learning rate, or extend.

    Actions run after the current step, in request order; those after an evaluation or a checkpoint run one step later.
    A pending run executes them once it trains.
    """
    call = f"/v1/runs/{run_id}/actions"
    idempotency = Idempotency.from_header(idempotency_key, call, await request.body())
    action = await service.create_action(session, run_id, body.root, caller.key_id, idempotency)
    after_commit.add_task(request.app.state.queue.call_worker, run_id)
    response.headers["Location"] = f"{call}/{action.id}"
    return ActionRead.model_validate(action)


@router.get("")
async def list_actions(run_id: str, session: Session, paging: PageQuery) -> Page[ActionRead]:
    """List the actions of a run, newest first."""
    run = await get_run(session, run_id)
    rows, has_more = await service.list_actions(session, run.id, paging)
    return Page(data=[ActionRead.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{action_id}")
async def get_action(run_id: str, action_id: str, session: Session) -> ActionRead:
    """Get an action and its result."""
    run = await get_run(session, run_id)
    return ActionRead.model_validate(await service.get_action(session, run.id, action_id))
