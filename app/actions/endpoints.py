"""`/v1/runs/{id}/actions`."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Header, Request, Response

from app.actions import service
from app.actions.schemas import ActionCreate, ActionRead
from app.auth import CurrentCaller
from app.dependencies import Session
from app.pagination import Page, PageQuery
from app.runs.service import Idempotency
from app.runs.service import get as get_run

router = APIRouter(prefix="/runs/{run_id}/actions", tags=["actions"])


@router.post(
    "",
    status_code=202,
    responses={409: {"description": "The run has ended or is about to, or too many actions wait."}},
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
            description="The same key with the same request answers the same action, so that a call can be repeated.",
            examples=["6f1c0a52-6d0e-4d5c-8a53-0f8c7a8f1b6e"],
        ),
    ] = None,
) -> ActionRead:
    """Have something done between two steps of a run: save, evaluate, write samples, another learning rate, more steps.

    It is done behind the step that is at work, in the order of the requests; a run that waits does it once it trains.
    """
    call = f"/v1/runs/{run_id}/actions"
    idempotency = Idempotency.of(idempotency_key, call, await request.body())
    action = await service.create(session, run_id, body.root, caller.key_id, idempotency)
    after_commit.add_task(request.app.state.queue.call_worker, run_id)
    response.headers["Location"] = f"{call}/{action.id}"
    return ActionRead.model_validate(action)


@router.get("")
async def list_actions(run_id: str, session: Session, paging: PageQuery) -> Page[ActionRead]:
    """What was asked of a run, newest first."""
    run = await get_run(session, run_id)
    rows, has_more = await service.page(session, run.id, paging)
    return Page(data=[ActionRead.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{action_id}")
async def get_action(run_id: str, action_id: str, session: Session) -> ActionRead:
    """One action, and what came of it."""
    run = await get_run(session, run_id)
    return ActionRead.model_validate(await service.get(session, run.id, action_id))
