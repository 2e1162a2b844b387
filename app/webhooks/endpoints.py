"""Endpoints `/v1/webhooks`."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from anneal.contracts.schemas.page import Page
from anneal.contracts.schemas.webhooks import (
    DeliveryStatus,
    DeliveryView,
    WebhookCreate,
    WebhookCreated,
    WebhookEdit,
    WebhookView,
)
from app.api.authorization import Caller, CurrentCaller
from app.api.dependencies import CurrentSettings, Session
from app.api.pagination import PageQuery
from app.tables.webhooks import Webhook, WebhookDelivery
from app.webhooks import service

router = APIRouter(prefix="/webhooks", tags=["webhooks"])


@router.post("", status_code=201, responses={409: {"description": "There are as many webhooks as are possible."}})
async def create_webhook(
    body: WebhookCreate, session: Session, settings: CurrentSettings, caller: CurrentCaller, response: Response
) -> WebhookCreated:
    """Create a webhook: events of runs are sent to its URL, by default the ends of all runs.

    The response has the secret that signs the messages, and is the only one that does.
    """
    webhook, secret = await service.create_webhook(session, settings, body, caller.key_id)
    response.headers["Location"] = f"/v1/webhooks/{webhook.id}"
    return _with_secret(webhook, secret, caller, response)


@router.get("")
async def list_webhooks(session: Session, paging: PageQuery, caller: CurrentCaller) -> Page[WebhookView]:
    """List webhooks, newest first."""
    rows, has_more = await service.list_webhooks(session, paging)
    return Page(data=[_view(row, caller) for row in rows], has_more=has_more)


@router.get("/{webhook_id}")
async def get_webhook(webhook_id: str, session: Session, caller: CurrentCaller) -> WebhookView:
    """Get a webhook, with the reason if its receiver fails."""
    return _view(await service.get_webhook(session, webhook_id), caller)


@router.patch("/{webhook_id}")
async def edit_webhook(
    webhook_id: str, body: WebhookEdit, session: Session, settings: CurrentSettings, caller: CurrentCaller
) -> WebhookView:
    """Change a webhook, or disable it. Deliveries that wait are sent to the new URL."""
    return _view(await service.edit_webhook(session, settings, webhook_id, body), caller)


@router.delete("/{webhook_id}", status_code=204)
async def delete_webhook(webhook_id: str, session: Session) -> None:
    """Delete a webhook with its deliveries; those that wait are not sent."""
    await service.delete_webhook(session, webhook_id)


@router.post("/{webhook_id}/rotate")
async def rotate_secret(
    webhook_id: str, session: Session, settings: CurrentSettings, caller: CurrentCaller, response: Response
) -> WebhookCreated:
    """Replace the secret; for 24 hours messages are signed with the previous one too."""
    webhook, secret = await service.rotate_secret(session, settings, webhook_id, caller.key_id)
    return _with_secret(webhook, secret, caller, response)


@router.post("/{webhook_id}/test", status_code=202, responses={409: {"description": "The webhook is disabled."}})
async def send_test(webhook_id: str, session: Session, response: Response) -> DeliveryView:
    """Send a message of the type `test`, once; its delivery shows the result within 20 seconds."""
    return _accepted(await service.send_test(session, webhook_id), response)


@router.get("/{webhook_id}/deliveries")
async def list_deliveries(
    webhook_id: str,
    session: Session,
    paging: PageQuery,
    status: Annotated[DeliveryStatus | None, Query(description="Only deliveries with this status.")] = None,
) -> Page[DeliveryView]:
    """List the deliveries of a webhook, newest first; they are kept for 30 days after their end."""
    rows, has_more = await service.list_deliveries(session, webhook_id, status, paging)
    return Page(data=[DeliveryView.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{webhook_id}/deliveries/{delivery_id}")
async def get_delivery(webhook_id: str, delivery_id: str, session: Session) -> DeliveryView:
    """Get a delivery."""
    return DeliveryView.model_validate(await service.get_delivery(session, webhook_id, delivery_id))


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}/redeliver",
    status_code=202,
    responses={409: {"description": "The webhook is disabled."}},
)
async def redeliver(webhook_id: str, delivery_id: str, session: Session, response: Response) -> DeliveryView:
    """Send a message again under its id, with as many attempts as a new one."""
    return _accepted(await service.redeliver(session, webhook_id, delivery_id), response)


def _view(webhook: Webhook, caller: Caller) -> WebhookView:
    view = WebhookView.model_validate(webhook)
    view.url = service.visible_url(webhook, can_write=caller.has_scope("write"))
    return view


def _with_secret(webhook: Webhook, secret: str, caller: Caller, response: Response) -> WebhookCreated:
    response.headers["Cache-Control"] = "no-store"
    return WebhookCreated(**_view(webhook, caller).model_dump(), secret=secret)


def _accepted(delivery: WebhookDelivery, response: Response) -> DeliveryView:
    response.headers["Location"] = f"/v1/webhooks/{delivery.webhook_id}/deliveries/{delivery.id}"
    return DeliveryView.model_validate(delivery)
