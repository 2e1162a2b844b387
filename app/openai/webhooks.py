"""`/openai/v1/webhook_endpoints`: webhooks of the format `openai`, as OpenAI's clients create and change them."""

import time
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.lists import ListPage
from anneal.contracts.schemas.openai.webhooks import (
    EndpointCreate,
    EndpointDeleted,
    EndpointObject,
    EndpointTest,
    EndpointTestResult,
    EndpointUpdate,
    EndpointWithSecret,
    EventTypes,
    SecretRotation,
)
from anneal.contracts.schemas.webhooks import JOB_EVENTS, WebhookCreate, WebhookEdit
from app.api.authorization import Caller, CurrentCaller
from app.api.dependencies import CurrentSettings, Reading, Session, release_connection
from app.api.errors import ApiError, invalid, to_printable
from app.infra.ids import is_id, new_id
from app.openai.ids import to_openai_id
from app.openai.retries import RETRIES_END, is_retry
from app.tables.webhooks import Webhook
from app.webhooks import message, service

router = APIRouter()

_FORMAT: Final = "openai"


@router.get("/webhook_event_types")
async def list_event_types() -> EventTypes:
    """List the types of events that webhooks can be sent."""
    return EventTypes(data=[*JOB_EVENTS])


@router.post("/webhook_endpoints", responses={409: {"description": "There are as many webhooks as are possible."}})
async def create_endpoint(
    body: EndpointCreate,
    request: Request,
    response: Response,
    session: Session,
    settings: CurrentSettings,
    caller: CurrentCaller,
) -> EndpointWithSecret:
    """Create a webhook: ends of fine-tuning jobs are sent to its URL. Only this response has its secret."""
    earlier_id = await _find_created(session, caller, body) if is_retry(request) else None
    if earlier_id is not None:
        # Its secret was in the response that the client has not got; or a receiver has it, if the retry repeats another
        # request than the one that created it.
        webhook, secret = await service.rotate_secret(session, settings, earlier_id, caller.key_id)
    else:
        native = WebhookCreate(name=body.name, url=body.url, types=[*body.event_types], format=_FORMAT)
        webhook, secret = await service.create_webhook(session, settings, native, caller.key_id)
    response.headers["Location"] = f"/openai/v1/webhook_endpoints/{webhook.id}"
    return _with_secret(webhook, secret, caller, response)


@router.get("/webhook_endpoints")
async def list_endpoints(
    session: Reading,
    caller: CurrentCaller,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of webhooks.")] = 20,
    after: Annotated[str | None, Query(description="ID of the last webhook of the previous page.")] = None,
) -> ListPage[EndpointObject]:
    """List the webhooks of the format `openai`, newest first."""
    query = select(Webhook).where(Webhook.format == _FORMAT).order_by(Webhook.id.desc()).limit(limit + 1)
    if after is not None:
        if not is_id(after, "whk"):
            raise invalid([FieldError(field="after", code="not_an_id", message="must be the ID of a webhook")])
        query = query.where(Webhook.id < after)
    rows = (await session.scalars(query)).all()
    return ListPage[EndpointObject].from_items([_view(row, caller) for row in rows[:limit]], has_more=len(rows) > limit)


@router.get("/webhook_endpoints/{webhook_id}")
async def get_endpoint(webhook_id: str, session: Session, caller: CurrentCaller) -> EndpointObject:
    """Get a webhook."""
    return _view(await _find_endpoint(session, webhook_id), caller)


@router.post("/webhook_endpoints/{webhook_id}")
async def update_endpoint(
    webhook_id: str, body: EndpointUpdate, session: Session, settings: CurrentSettings, caller: CurrentCaller
) -> EndpointObject:
    """Change a webhook."""
    await _find_endpoint(session, webhook_id)
    edit = WebhookEdit(name=body.name, url=body.url, types=[*body.event_types] if body.event_types else None)
    return _view(await service.edit_webhook(session, settings, webhook_id, edit), caller)


@router.delete("/webhook_endpoints/{webhook_id}")
async def delete_endpoint(webhook_id: str, session: Session) -> EndpointDeleted:
    """Delete a webhook; messages that wait are not sent."""
    await _find_endpoint(session, webhook_id)
    await service.delete_webhook(session, webhook_id)
    return EndpointDeleted(id=webhook_id)


@router.post("/webhook_endpoints/{webhook_id}/rotate_secret")
async def rotate_secret(
    webhook_id: str,
    response: Response,
    session: Session,
    settings: CurrentSettings,
    caller: CurrentCaller,
    body: SecretRotation = SecretRotation(),
) -> EndpointWithSecret:
    """Replace the secret of a webhook; the previous one is invalid at once, or after 24 hours."""
    await _find_endpoint(session, webhook_id)
    keeps_previous = body.keep_old_secret_active_for_24_hours
    webhook, secret = await service.rotate_secret(
        session, settings, webhook_id, caller.key_id, keeps_previous=keeps_previous
    )
    return _with_secret(webhook, secret, caller, response)


@router.post("/webhook_endpoints/{webhook_id}/test")
async def send_test(
    webhook_id: str, body: EndpointTest, session: Session, settings: CurrentSettings
) -> EndpointTestResult:
    """Send the event of a job that does not exist, and return the status that the receiver answers with."""
    from app.webhooks.http_post import AttemptFailed, post_message  # httpx is slow to import

    webhook = await _find_endpoint(session, webhook_id)
    url, secrets = webhook.url, await service.find_signing_secrets(session, settings, webhook)
    await release_connection(session)
    event_id, moment = new_id("whd"), datetime.now(UTC)
    content = message.openai_body(event_id, body.event_type, moment, {"id": to_openai_id(new_id("run"))})
    headers = message.signed_headers(event_id, int(time.time()), content, secrets[:1])
    try:
        status = await post_message(url, headers, content, settings.private_webhook_hosts)
    except AttemptFailed as failure:
        if failure.response_status is None:
            raise ApiError(422, "receiver_unreachable", str(failure)) from None
        status = failure.response_status
    return EndpointTestResult(webhook_endpoint_id=webhook_id, event_type=body.event_type, status_code=status)


async def _find_created(session: AsyncSession, caller: Caller, body: EndpointCreate) -> str | None:
    """Return the id of the webhook that the attempt before this one has created; None if it has created none."""
    same = (
        Webhook.format == _FORMAT,
        Webhook.created_by == caller.key_id,
        Webhook.name == body.name,
        Webhook.url == body.url,
        Webhook.types == [*body.event_types],
        Webhook.created_at > func.now() - RETRIES_END,
    )
    newest: str | None = await session.scalar(select(Webhook.id).where(*same).order_by(Webhook.id.desc()).limit(1))
    return newest


async def _find_endpoint(session: AsyncSession, webhook_id: str) -> Webhook:
    """Return a webhook of the format `openai`; raise `webhook_not_found` if there is none."""
    webhook = await session.get(Webhook, webhook_id)
    if webhook is None or webhook.format != _FORMAT:
        there_is_none = (
            f"There is no webhook endpoint {to_printable(webhook_id, 60)}; `GET /openai/v1/webhook_endpoints`"
        )
        raise ApiError(404, "webhook_not_found", f"{there_is_none} lists the existing ones.")
    return webhook


def _view(webhook: Webhook, caller: Caller) -> EndpointObject:
    return EndpointObject(
        id=webhook.id,
        created_at=int(webhook.created_at.timestamp()),
        name=webhook.name,
        url=service.visible_url(webhook, can_write=caller.has_scope("write")),
        event_types=webhook.types,
    )


def _with_secret(webhook: Webhook, secret: str, caller: Caller, response: Response) -> EndpointWithSecret:
    response.headers["Cache-Control"] = "no-store"
    return EndpointWithSecret(**_view(webhook, caller).model_dump(), signing_secret=secret)
