"""Background loop of the API that sends the due deliveries of webhooks; every API process runs one.

To claim a delivery is to set its next attempt behind the end of this one, so a sender that dies needs no clean-up: the
delivery becomes due again, for any process. A receiver may therefore get a message twice, always under one id.
"""

import asyncio
import json
import logging
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import prometheus_client
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra import async_tasks
from app.infra.db import is_away
from app.secrets.keyring import Keyring, KeyringError
from app.webhooks import message

log = logging.getLogger(__name__)

PAUSES = (5, 300, 1800, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600)
"""Seconds between attempts, those that Standard Webhooks recommend: 31 hours in all. A random tenth is added."""
MOST_AT_A_TIME = 4
"""Messages to one webhook that a process sends at a time, so that a slow receiver delays no other."""
_ATTEMPT_SECONDS = 60
"""Time after which an attempt counts as lost: four times the limit for a response."""
_KEPT_DAYS = 30
_PRUNE_EVERY = 3600.0
_PRUNED_AT_ONCE = 20_000

_CLAIM = text(
    f"""
    WITH due AS (
        SELECT next.id FROM webhooks AS w CROSS JOIN LATERAL (
            SELECT id FROM webhook_deliveries
            WHERE webhook_id = w.id AND status = 'pending' AND next_attempt_at <= clock_timestamp()
            ORDER BY next_attempt_at
            LIMIT greatest({MOST_AT_A_TIME} - coalesce(CAST(CAST(:in_flight AS jsonb) ->> w.id AS int), 0), 0)
            FOR UPDATE SKIP LOCKED
        ) AS next
        WHERE w.enabled
    )
    UPDATE webhook_deliveries AS d
    SET attempts = attempts + 1, next_attempt_at = clock_timestamp() + interval '{_ATTEMPT_SECONDS} s'
    FROM due, webhooks AS w LEFT JOIN secrets AS s ON s.name = 'webhook:' || w.id
    WHERE d.id = due.id AND w.id = d.webhook_id
    RETURNING d.id, d.webhook_id, d.type, d.run_id, d.seq, d.ts, d.event, d.run, d.attempts, w.url, w.format,
        coalesce(w.previous_secret_until > clock_timestamp(), false) AS signs_twice,
        s.name AS secret, s.key_id, s.sealed
    """
)
_RECORD_SUCCESS = text(
    """
    WITH delivered AS (
        UPDATE webhook_deliveries SET status = 'delivered', response_status = :response_status, error = NULL,
            finished_at = clock_timestamp(), next_attempt_at = NULL
        WHERE id = :id
        RETURNING webhook_id
    )
    UPDATE webhooks SET failing_since = NULL, last_error = NULL
    WHERE id IN (SELECT webhook_id FROM delivered) AND failing_since IS NOT NULL
    """
)
# Without effect on a delivery of which a later attempt is under way.
_RECORD_FAILURE = text(
    """
    WITH attempted AS (
        UPDATE webhook_deliveries SET response_status = :response_status, error = :error,
            status = CASE WHEN CAST(:pause AS float) IS NULL THEN 'failed' ELSE 'pending' END,
            finished_at = CASE WHEN CAST(:pause AS float) IS NULL THEN clock_timestamp() END,
            next_attempt_at = clock_timestamp() + CAST(:pause AS float) * interval '1 s'
        WHERE id = :id AND attempts = :attempts AND status = 'pending'
        RETURNING webhook_id
    )
    UPDATE webhooks SET failing_since = coalesce(failing_since, clock_timestamp()), last_error = :error
    WHERE id IN (SELECT webhook_id FROM attempted)
    """
)
# The ids of webhooks in deliveries are read one by one from the index: there are few, and maybe millions of deliveries.
_PRUNE = text(
    f"""
    WITH RECURSIVE named(id) AS (
        SELECT min(webhook_id) FROM webhook_deliveries
        UNION ALL
        SELECT (SELECT min(webhook_id) FROM webhook_deliveries WHERE webhook_id > named.id) FROM named
        WHERE named.id IS NOT NULL
    ), old AS (
        SELECT id FROM webhook_deliveries WHERE finished_at < now() - interval '{_KEPT_DAYS} days'
        LIMIT :limit FOR UPDATE SKIP LOCKED
    ), orphaned AS (
        SELECT id FROM webhook_deliveries
        WHERE webhook_id IN (SELECT id FROM named EXCEPT SELECT id FROM webhooks)
        LIMIT :limit FOR UPDATE SKIP LOCKED
    )
    DELETE FROM webhook_deliveries WHERE id IN (SELECT id FROM old UNION ALL SELECT id FROM orphaned)
    """
)


class WebhookSender:
    """Sends due deliveries, each in a task of its own."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        """Create the sender; `engine` should not be shared with requests, for whose connections it would wait."""
        self._engine = engine
        self._settings = settings
        self._interval = min(1.0, settings.lease_seconds / 6)
        self._loop_task: asyncio.Task[None] | None = None
        self._attempts: dict[asyncio.Task[None], str] = {}
        """Attempts that are under way, with the webhook of each."""
        self._attempt_ended = asyncio.Event()
        self._turn = asyncio.Semaphore(1)
        """Turn to use the database: hundreds of attempts that end at once would run into the time limit of the pool."""
        self._prune_at = 0.0
        self.outcomes = prometheus_client.Counter(
            "anneal_webhook_attempts",
            "Attempts of this process to deliver a message of a webhook: delivered, retried (another one follows), or "
            "failed (none does).",
            ["outcome"],
            registry=None,
        )
        for outcome in ("delivered", "retried", "failed"):
            self.outcomes.labels(outcome)

    async def start(self) -> None:
        """Start the loop."""
        self._loop_task = asyncio.create_task(self._loop(), name="webhook sender")

    async def stop(self) -> None:
        """Stop the loop and the attempts, which other processes repeat."""
        for task in filter(None, (self._loop_task, *self._attempts)):
            await async_tasks.cancel_and_wait(task)

    async def _loop(self) -> None:
        while True:
            try:
                self._attempt_ended.clear()
                await self._start_attempts()
                if time.monotonic() >= self._prune_at and not await self._prune():
                    self._prune_at = time.monotonic() + _PRUNE_EVERY
            except Exception as error:  # without this loop nothing would be sent again
                _log_failure("looking for deliveries", error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._attempt_ended.wait(), self._interval)

    async def _prune(self) -> bool:
        """Delete some old deliveries and some of deleted webhooks; return True if there may be more."""
        async with self._engine.begin() as connection:
            deleted = (await connection.execute(_PRUNE, {"limit": _PRUNED_AT_ONCE})).rowcount
        return deleted >= _PRUNED_AT_ONCE

    async def _start_attempts(self) -> None:
        in_flight = Counter(self._attempts.values())
        async with self._engine.begin() as connection:
            claimed = (await connection.execute(_CLAIM, {"in_flight": json.dumps(in_flight)})).all()
        for delivery in claimed:
            task = asyncio.create_task(self._attempt(delivery), name=f"delivery {delivery.id}")
            self._attempts[task] = delivery.webhook_id
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del self._attempts[task]
        self._attempt_ended.set()

    async def _attempt(self, delivery: Any) -> None:
        """Send a message and record the result; if that fails, the delivery becomes due again by itself."""
        from app.webhooks.http_post import AttemptFailed, post_message  # httpx is slow to import

        result: dict[str, Any] = {"id": delivery.id, "webhook_id": delivery.webhook_id, "response_status": None}
        error: str | None = None
        try:
            body = message.message_body(delivery)
            headers = message.signed_headers(delivery.id, int(time.time()), body, self._secrets_of(delivery))
            private_hosts = self._settings.private_webhook_hosts
            result["response_status"] = await post_message(delivery.url, headers, body, private_hosts)
        except AttemptFailed as failure:
            error, result["response_status"] = str(failure), failure.response_status
        except KeyringError as failure:
            error = str(failure)
        except Exception:
            log.exception("webhooks: delivery %s cannot be sent", delivery.id)
            error = "Anneal could not send the message, and the log of its API says why."
        if error is None:
            outcome = "delivered"
        else:
            pause = _pause_after(delivery.type, delivery.attempts)
            result |= {"error": error, "attempts": delivery.attempts, "pause": pause}
            outcome = "failed" if pause is None else "retried"
        self.outcomes.labels(outcome).inc()
        try:
            await self._execute(_RECORD_SUCCESS if error is None else _RECORD_FAILURE, result)
        except Exception as failure:
            _log_failure(f"recording the result of {delivery.id}", failure)

    def _secrets_of(self, delivery: Any) -> list[str]:
        if delivery.sealed is None:
            raise KeyringError("The webhook has no secret: rotate it, and give the new one to the receiver.")
        opened = Keyring.from_settings(self._settings).open_sealed(delivery.secret, delivery.key_id, delivery.sealed)
        secrets = opened.split()
        return secrets if delivery.signs_twice else secrets[:1]

    async def _execute(self, statement: Any, parameters: dict[str, Any] | None = None) -> None:
        async with self._turn, self._engine.begin() as connection:
            await connection.execute(statement, parameters or {})


def _pause_after(type: str, attempts: int) -> float | None:
    """Return the seconds until the next attempt; None if that was the last one. A test is tried once."""
    if type == "test" or attempts > len(PAUSES):
        return None
    return PAUSES[attempts - 1] * random.uniform(1.0, 1.1)


def _log_failure(what: str, error: Exception) -> None:
    if is_away(error) or isinstance(error, OSError):
        log.warning("webhooks: %s failed, trying again: %s", what, error)
    else:
        log.exception("webhooks: %s failed, trying again", what)
