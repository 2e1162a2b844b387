"""Statements that correct stored times after the clock of the database's host was set.

All of them may be repeated, by several replicas too.
"""

from typing import Any

from sqlalchemy import ColumnElement, Executable, and_, case, func, or_, update

from anneal.contracts.run_status import LIVE
from app.infra.db import interval_seconds
from app.runs.state.transitions import devices, run_parts, runs
from app.tables.webhooks import WebhookDelivery
from app.tables.workers import Worker

_IMPOSSIBLE_LEASES = 10


def follow_clock(lease_seconds: float, change_seconds: float) -> list[Executable]:
    """Return statements that give each lease another period, and each pause what was left of it.

    `change_seconds` is by how much the clock was set. With 0.0, only times that the clock, as it is now, cannot have
    given are corrected: it may have been set while no API process ran.
    """
    now = func.clock_timestamp()
    is_known = change_seconds != 0.0

    def is_to_be_granted(expires_at: ColumnElement[Any]) -> ColumnElement[bool]:
        later = now + interval_seconds(lease_seconds * _IMPOSSIBLE_LEASES)
        return expires_at.is_not(None) if is_known else expires_at > later

    granted = now + interval_seconds(lease_seconds)
    statements: list[Executable] = [
        update(runs)
        .where(runs.c.status.in_(LIVE), is_to_be_granted(runs.c.lease_expires_at))
        .values(lease_expires_at=granted),
        update(run_parts)
        .where(run_parts.c.ended_at.is_(None), is_to_be_granted(run_parts.c.lease_expires_at))
        .values(lease_expires_at=granted),
        update(Worker)
        .where(Worker.state != "offline" if is_known else Worker.heartbeat_at > now)
        .values(heartbeat_at=now),
        _queue_again(now),
    ]
    if change_seconds < 0:
        paused_until = func.greatest(devices.c.paused_until + interval_seconds(change_seconds), now)
        statements.append(update(devices).where(devices.c.paused_until > now).values(paused_until=paused_until))
        next_attempt_at = func.greatest(WebhookDelivery.next_attempt_at + interval_seconds(change_seconds), now)
        is_paused = (WebhookDelivery.status == "pending") & (WebhookDelivery.next_attempt_at > now)
        statements.append(update(WebhookDelivery).where(is_paused).values(next_attempt_at=next_attempt_at))
    return statements


def _queue_again(now: ColumnElement[Any]) -> Executable:
    """Queue the runs again that were queued, or of which workers were notified, at a time that is still to come."""
    is_early = runs.c.queued_at > now
    return (
        update(runs)
        .where(and_(runs.c.status == "pending", or_(is_early, runs.c.notified_at > now)))
        .values(
            not_before=case((is_early, now + (runs.c.not_before - runs.c.queued_at)), else_=runs.c.not_before),
            queued_at=func.least(runs.c.queued_at, now),
            notified_at=None,
        )
    )
