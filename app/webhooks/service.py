"""Operations on webhooks and their deliveries, for the API."""

import base64
import secrets
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.schemas.webhooks import JOB_EVENTS, DeliveryStatus, WebhookCreate, WebhookEdit, WebhookFilter
from app.api.errors import ApiError, conflict, invalid, not_found, to_printable
from app.api.pagination import Paging, fetch_page
from app.config import Settings
from app.infra.ids import new_id
from app.secrets import store
from app.secrets.service import find_secret, put_own_secret
from app.tables.experiments import Experiment
from app.tables.webhooks import Webhook, WebhookDelivery
from app.webhooks.address import find_problem
from app.webhooks.outbox import NEW_DELIVERY_ID

MOST_WEBHOOKS = 100
"""Each may have several messages under way at a time, so their number bounds the work of a process."""
_OVERLAP = timedelta(hours=24)
"""Time after a rotation in which the previous secret signs too."""
_INSERT_TEST = text(
    f"""
    INSERT INTO webhook_deliveries (id, webhook_id, type, ts, event)
    VALUES ({NEW_DELIVERY_ID}, :webhook_id, 'test', clock_timestamp(), '{{"message": "A test of this webhook."}}')
    RETURNING id
    """
)
_REDELIVER = text(
    """
    UPDATE webhook_deliveries SET status = 'pending', attempts = 0, next_attempt_at = clock_timestamp(),
        finished_at = NULL
    WHERE id = :id AND webhook_id = :webhook_id
    """
)


def secret_name(webhook_id: str) -> str:
    """Return the name of the secret that has the keys of a webhook: the present one, then the previous one."""
    return f"webhook:{webhook_id}"


async def create_webhook(
    session: AsyncSession, settings: Settings, body: WebhookCreate, created_by: str
) -> tuple[Webhook, str]:
    """Create a webhook; return it with its secret."""
    problem = await find_problem(body.url, settings.private_webhook_hosts)
    values = {**body.model_dump(exclude={"filter"}), "filter": _filter_values(body.filter)}
    await _check(session, values, problem)
    if (await session.scalar(select(func.count()).select_from(Webhook)) or 0) >= MOST_WEBHOOKS:
        raise conflict(
            "too_many_webhooks", f"There are {MOST_WEBHOOKS} webhooks, which is the limit; delete one that is not used."
        )
    if values["name"] is None:
        values["name"] = body.url.partition("://")[2].partition("/")[0][:200]
    webhook = Webhook(id=new_id("whk"), created_by=created_by, **values)
    session.add(webhook)
    await session.flush()
    await session.refresh(webhook)
    secret = _new_secret()
    await put_own_secret(session, settings, secret_name(webhook.id), secret, created_by)
    return webhook, secret


async def get_webhook(session: AsyncSession, webhook_id: str, *, locked: bool = False) -> Webhook:
    """Return a webhook; raise 404 `webhook_not_found` if it does not exist."""
    webhook = await session.get(Webhook, webhook_id, with_for_update=locked or None)
    if webhook is None:
        raise not_found("webhook", webhook_id)
    return webhook


def visible_url(webhook: Webhook, *, can_write: bool) -> str:
    """Return the address of a webhook, for keys that cannot write without its path.

    The path of a Slack address is a secret: who knows it can post to the channel.
    """
    scheme, _, rest = webhook.url.partition("://")
    return webhook.url if can_write else f"{scheme}://{rest.partition('/')[0].partition('?')[0]}/…"


async def list_webhooks(session: AsyncSession, paging: Paging) -> tuple[list[Webhook], bool]:
    """Return a page of webhooks, newest first."""
    return await fetch_page(session, select(Webhook), Webhook.id, paging)


async def edit_webhook(session: AsyncSession, settings: Settings, webhook_id: str, body: WebhookEdit) -> Webhook:
    """Change the fields of a webhook that the request has."""
    # Before the first query, so that no connection waits for the lookup of a name.
    problem = None if body.url is None else await find_problem(body.url, settings.private_webhook_hosts)
    changes: dict[str, Any] = body.model_dump(exclude_none=True, exclude={"filter"})
    if body.filter is not None:
        changes["filter"] = _filter_values(body.filter)
    webhook = await get_webhook(session, webhook_id)
    # Only the fields of the request: the experiment of a stored filter may be deleted by now.
    stored = {"format": webhook.format, "types": webhook.types, "filter": {"status": webhook.filter.get("status")}}
    values = {**stored, **changes}
    await _check(session, values, problem)
    for name, value in changes.items():
        setattr(webhook, name, value)
    await session.flush()
    return webhook


async def delete_webhook(session: AsyncSession, webhook_id: str) -> None:
    """Delete a webhook; the sender deletes its deliveries, of which there may be millions, step by step."""
    await get_webhook(session, webhook_id)
    await session.execute(delete(Webhook).where(Webhook.id == webhook_id))
    await session.execute(store.remove_own_secret(secret_name(webhook_id)))


async def rotate_secret(
    session: AsyncSession, settings: Settings, webhook_id: str, key_id: str, *, keeps_previous: bool = True
) -> tuple[Webhook, str]:
    """Give a webhook a new secret; with `keeps_previous`, let the previous one sign too for a day."""
    webhook = await get_webhook(session, webhook_id, locked=True)
    name, secret = secret_name(webhook_id), _new_secret()
    now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
    try:
        previous = await find_signing_secrets(session, settings, webhook) if keeps_previous else []
    except ApiError:  # a key of the key file is lost, and with it what it encrypted
        previous = []
    # A rotation whose answer was lost is repeated: of its secret no receiver knows, but of the one before.
    is_repeated = webhook.previous_secret_until is not None and webhook.previous_secret_until > now
    signing = [previous[0], previous[-1]] if previous and is_repeated else previous[:1]
    await put_own_secret(session, settings, name, " ".join(dict.fromkeys([secret, *signing])), key_id)
    webhook.previous_secret_until = now + _OVERLAP if keeps_previous else None
    await session.flush()
    return webhook, secret


async def find_signing_secrets(session: AsyncSession, settings: Settings, webhook: Webhook) -> list[str]:
    """Return the secrets of a webhook, the present one first; raise `ApiError` if they cannot be decrypted."""
    return ((await find_secret(session, settings, secret_name(webhook.id))) or "").split()


async def send_test(session: AsyncSession, webhook_id: str) -> WebhookDelivery:
    """Enqueue a message of the type `test`, which is tried once."""
    await _require_enabled(session, webhook_id)
    return await get_delivery(session, webhook_id, await session.scalar(_INSERT_TEST, {"webhook_id": webhook_id}))


async def redeliver(session: AsyncSession, webhook_id: str, delivery_id: str) -> WebhookDelivery:
    """Send a message again under its id, with all attempts."""
    await _require_enabled(session, webhook_id)
    await session.execute(_REDELIVER, {"webhook_id": webhook_id, "id": delivery_id})
    return await get_delivery(session, webhook_id, delivery_id)


async def list_deliveries(
    session: AsyncSession, webhook_id: str, status: DeliveryStatus | None, paging: Paging
) -> tuple[list[WebhookDelivery], bool]:
    """Return a page of the deliveries of a webhook, newest first."""
    await get_webhook(session, webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    if status is not None:
        query = query.where(WebhookDelivery.status == status)
    return await fetch_page(session, query, WebhookDelivery.id, paging)


async def get_delivery(session: AsyncSession, webhook_id: str, delivery_id: str) -> WebhookDelivery:
    """Return a delivery of a webhook; raise 404 if either does not exist."""
    await get_webhook(session, webhook_id)
    query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.id == delivery_id)
    delivery = await session.scalar(query)
    if delivery is None:
        raise ApiError(
            404,
            "delivery_not_found",
            f"Webhook {webhook_id} has no delivery {to_printable(delivery_id, 60)}; list those that it has with "
            "GET /v1/webhooks/{id}/deliveries.",
        )
    return delivery


async def _require_enabled(session: AsyncSession, webhook_id: str) -> None:
    if not (await get_webhook(session, webhook_id)).enabled:
        raise conflict(
            "webhook_disabled",
            f'Webhook {webhook_id} is disabled, so nothing is sent to it; PATCH it with {{"enabled": true}} first.',
        )


async def _check(session: AsyncSession, values: dict[str, Any], problem: FieldError | None) -> None:
    """Raise 422 for a problem of the URL, and for a filter that no event can match."""
    errors = [] if problem is None else [problem]
    conditions = values["filter"]
    statuses = conditions.get("status")
    if any((name in JOB_EVENTS) is not (values["format"] == "openai") for name in values["types"]):
        message = (
            f"are of another format than `{values['format']}`: `openai` sends {', '.join(JOB_EVENTS)}, and the others "
            "send status, progress and end"
        )
        errors.append(FieldError(field="types", code="conflict", message=message))
    if set(values["types"]) == {"end"} and statuses and not set(TERMINAL) & set(statuses):
        message = "an event `end` reports completed, failed or cancelled; name one of them, or send `status` events"
        errors.append(FieldError(field="filter.status", code="never_reported", message=message))
    experiment_id = conditions.get("experiment_id")
    if experiment_id is not None and await session.get(Experiment, experiment_id) is None:
        message = "there is no such experiment; list the existing ones with GET /v1/experiments"
        errors.append(FieldError(field="filter.experiment_id", code="experiment_not_found", message=message))
    if errors:
        raise invalid(errors)


def _filter_values(conditions: WebhookFilter) -> dict[str, Any]:
    return conditions.model_dump(mode="json", exclude_none=True)


def _new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
