"""Reads and writes the stored holds of the queue, and the lock under which claims take turns."""

import json
from collections.abc import Mapping

from sqlalchemy import Connection, text

from app.runs.queue.holds import QuotaUse, StoredHolds
from app.runs.queue.order import JOIN_ROOM, LIMITING_EXPERIMENT, WAITING_COLUMNS, WITH_ROOM, waiting_run
from app.runs.queue.policy import OrderKey, QuotaHold, order_key
from app.tables.scheduling import HOLD_SECONDS

_LOCK = 0x71756575  # "queu"
# The turn of a process that is frozen ends after some seconds, so that the others go on. The statements of a claim are
# planned once for a connection: PostgreSQL would plan about every second time, which takes as long as their execution.
_TAKE_TURN = text(
    "SELECT set_config('idle_in_transaction_session_timeout', '5s', true), set_config('lock_timeout', '10s', true), "
    f"set_config('plan_cache_mode', 'force_generic_plan', true), pg_advisory_xact_lock({_LOCK})"
)
CURRENT_PLAN = f"""
    SELECT holds, seconds FROM queue_plan
    WHERE made_at BETWEEN clock_timestamp() - interval '{HOLD_SECONDS} s' AND clock_timestamp()
"""
"""SQL query of the stored holds that count, and of durations: fields of `StoredHolds`."""
_HOLDS = text(f"""
    SELECT cast(extract(epoch FROM clock_timestamp()) AS float) AS now, plan.holds, plan.seconds
    FROM (SELECT) AS always LEFT JOIN ({CURRENT_PLAN}) AS plan ON true
""")
_QUOTA_USES = text(f"""
    SELECT quota.id, runs.id, count(*), min(devices.name)
    FROM devices JOIN runs ON runs.id = devices.run_id
        JOIN unnest(cast(:quotas AS text[])) AS quota(id) ON quota.id IN (runs.created_by, {LIMITING_EXPERIMENT})
    GROUP BY quota.id, runs.id
""")
_SECONDS = text(f"""
    SELECT started.device, started.run_id, cast(plan.seconds -> started.device ->> started.run_id AS float) AS seconds
    FROM ({CURRENT_PLAN}) AS plan
        CROSS JOIN unnest(cast(:devices AS text[]), cast(:run_ids AS text[])) AS started(device, run_id)
    WHERE plan.seconds -> started.device ? started.run_id
""")
_HOLDERS = text(f"""
    {WITH_ROOM} SELECT {WAITING_COLUMNS} FROM runs {JOIN_ROOM}
    WHERE runs.id = ANY(:run_ids) AND runs.status = 'pending'
""")
_STORE = text("""
    INSERT INTO queue_plan (holds, seconds, made_at)
    VALUES (cast(:holds AS jsonb), cast(:seconds AS jsonb), clock_timestamp())
    ON CONFLICT (id) DO UPDATE SET holds = excluded.holds, seconds = excluded.seconds, made_at = excluded.made_at
""")
_DELETE = text("DELETE FROM queue_plan")


def take_turn(connection: Connection) -> None:
    """Wait for the claims before this transaction; those after it wait for its end."""
    connection.execute(_TAKE_TURN)


def read_holds(connection: Connection) -> tuple[StoredHolds, float]:
    """Return the holds that count, and the Unix time of the database."""
    now, holds, seconds = connection.execute(_HOLDS).one()
    return StoredHolds.model_validate({**(holds or {}), "seconds": seconds or {}}), now


def read_quota_uses(connection: Connection, holds: StoredHolds) -> list[QuotaUse]:
    """Return the devices of held quotas that runs use; add durations on their devices to the holds that lack these."""
    quotas = [hold.quota_id for hold in holds.quota_holds]
    uses = [QuotaUse(*row) for row in connection.execute(_QUOTA_USES, {"quotas": quotas})] if quotas else []
    unknown = {
        (use.device, use.run_id) for use in uses if use.device not in holds.seconds and use.run_id not in holds.training
    }
    if unknown:
        started = {"devices": [device for device, _ in unknown], "run_ids": [run_id for _, run_id in unknown]}
        for device, run_id, seconds in connection.execute(_SECONDS, started):
            holds.seconds.setdefault(device, {})[run_id] = seconds
    return uses


def read_quota_holds(connection: Connection) -> Mapping[str, tuple[OrderKey, QuotaHold]]:
    """Return the holds of quotas, each with the place of its run in the queue, by id of the quota."""
    holds, now = read_holds(connection)
    if not holds.quota_holds:
        return {}
    rows = connection.execute(_HOLDERS, {"run_ids": [hold.run_id for hold in holds.quota_holds]}).all()
    holders = {row.id: waiting_run(row) for row in rows}
    used = {row.owner: row.used for row in rows}
    quota_holds = holds.quota_holds_of(holders, read_quota_uses(connection, holds), now)
    return {quota_id: (order_key(hold.run, used), hold) for quota_id, hold in quota_holds.items()}


def store_holds(connection: Connection, holds: StoredHolds) -> None:
    """Replace the stored holds."""
    if holds.run_ids():
        stored = {"holds": holds.model_dump_json(exclude={"seconds"}), "seconds": json.dumps(holds.seconds)}
        connection.execute(_STORE, stored)
    else:
        connection.execute(_DELETE)
