"""Rows of webhooks and ended runs, without the API."""

from typing import Any

from sqlalchemy import Engine, Row, insert, select, text, update

from app.infra.ids import new_id
from app.runs.state import machine
from app.tables.webhooks import Webhook, WebhookDelivery
from tests.rows import add_run


def add_webhook(engine: Engine, **values: Any) -> str:
    """Insert a webhook without a secret and return its id."""
    webhook_id = new_id("whk")
    row = {"name": "a webhook", "url": "https://hooks.example.com", "format": "standard", "types": ["end"], **values}
    with engine.begin() as connection:
        connection.execute(insert(Webhook).values(id=webhook_id, **{"filter": {}, **row}))
    return webhook_id


def end_run(engine: Engine, **values: Any) -> str:
    """Create a run and cancel it while it is pending; return its id."""
    run_id: str = add_run(engine, **values).id
    with engine.begin() as connection:
        connection.execute(machine.request_stop(run_id, "checkpoint"))
    return run_id


def deliveries(engine: Engine, webhook_id: str) -> list[Row[Any]]:
    """Return the deliveries of a webhook, oldest first."""
    query = select(WebhookDelivery.__table__).where(WebhookDelivery.webhook_id == webhook_id)
    with engine.connect() as connection:
        return list(connection.execute(query.order_by(WebhookDelivery.id)))


def enqueue_tests(engine: Engine, webhook_id: str, count: int) -> None:
    """Insert due deliveries of the type `test`."""
    statement = text(
        "INSERT INTO webhook_deliveries (id, webhook_id, type, ts, event)"
        " SELECT 'whd_' || right(w.id, 6) || lpad(n::text, 20, '0'), w.id, 'test', now(), '{}'"
        " FROM webhooks AS w, generate_series(1, :count) AS n WHERE w.id = :id"
    )
    with engine.begin() as connection:
        connection.execute(statement, {"id": webhook_id, "count": count})


def make_due(engine: Engine, webhook_id: str, **values: Any) -> None:
    """Let the pause of the deliveries of a webhook be over."""
    statement = update(WebhookDelivery).where(WebhookDelivery.webhook_id == webhook_id)
    with engine.begin() as connection:
        connection.execute(statement.values(next_attempt_at=text("clock_timestamp()"), **values))
