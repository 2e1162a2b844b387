"""SQL of the order in which pending runs are considered (`app.runs.queue.policy.order_key`), and of room in quotas."""

from typing import Any

from app.runs.queue.fit import Needs
from app.runs.queue.policy import WaitingRun

HALF_LIFE_SECONDS = 7 * 86_400
"""Seconds after which the usage of devices counts half."""
OWNER = "coalesce(runs.created_by, '')"
"""SQL expression: the owner of a run, as in the index of pending runs."""
LIMITING_EXPERIMENT = "CASE WHEN runs.task <> 'serve' THEN runs.experiment_id END"
"""SQL expression: the experiment whose quota a run counts towards. A serving run belongs to all who ask its model."""
OWNERS_ORDER = "runs.priority DESC, runs.id"
"""`policy.order_key` in SQL, among the runs of one owner."""
QUEUE_ORDER = "runs.priority DESC, owners.used, runs.id"
"""`policy.order_key` in SQL, in a query with `OWNERS`."""
# As of the start of the transaction: two runs of an owner have the same value, and so the order of their ids.
_DECAYED = (
    "coalesce(device_seconds * "
    f"power(0.5, greatest(cast(extract(epoch FROM now() - updated_at) AS float), 0) / {HALF_LIFE_SECONDS}), 0)"
)
# Devices in use are counted once for all quotas, and only if there is one. As JSON objects: with a join, Postgres may
# compare each owner with each other one, since it cannot know how many there are.
_HELD = """
    SELECT jsonb_object_agg(coalesce(id, ''), devices) AS devices FROM (
        SELECT {column} AS id, count(*) AS devices FROM devices JOIN runs ON runs.id = devices.run_id
        GROUP BY 1
    ) AS holders
"""
_MONTH = "date_trunc('month', now() AT TIME ZONE 'UTC')"
# The device-hours of the month, those used, and the day on which the next one begins; null while some are left. Without
# any, the quota of devices is 0: with that, no run starts, and those that train go on.
_SPENT_BUDGET = f"""
    CASE WHEN max_device_hours * 3600 <= CASE WHEN budget_month = cast({_MONTH} AS date) THEN budget_seconds ELSE 0 END
    THEN json_build_array(max_device_hours, CASE WHEN budget_month = cast({_MONTH} AS date) THEN budget_seconds / 3600
        ELSE 0 END, cast({_MONTH} + interval '1 month' AS date)) END
"""
OWNERS = f"""
    WITH RECURSIVE known(owner, priority) AS (
        (SELECT {OWNER}, priority FROM runs WHERE status = 'pending' ORDER BY {OWNER}, priority DESC, id LIMIT 1)
        UNION ALL
        SELECT later.* FROM known CROSS JOIN LATERAL (
            SELECT {OWNER}, priority FROM runs WHERE status = 'pending' AND {OWNER} > known.owner
            ORDER BY {OWNER}, priority DESC, id LIMIT 1
        ) AS later
    ),
    held AS MATERIALIZED ({_HELD.format(column="runs.created_by")})
    SELECT known.owner, known.priority, {_DECAYED} AS used, keys.max_devices, keys.spent_budget,
        CASE WHEN keys.max_devices IS NOT NULL THEN keys.max_devices
            - coalesce(cast((SELECT devices FROM held) ->> known.owner AS integer), 0) END AS room
    FROM known LEFT JOIN device_usage ON device_usage.owner = known.owner
        LEFT JOIN (
            SELECT id, {_SPENT_BUDGET} AS spent_budget,
                CASE WHEN {_SPENT_BUDGET} IS NULL THEN max_devices ELSE 0 END AS max_devices
            FROM api_keys
        ) AS keys ON keys.id = known.owner
"""
"""Owners of pending runs: the highest `priority` of these, `used` device-seconds, and `room` devices that the quota of
the key leaves, or null; `spent_budget` if its budget is used up."""
LIMITED = f"""
    WITH held AS MATERIALIZED ({_HELD.format(column=LIMITING_EXPERIMENT)})
    SELECT id, name, max_devices,
        max_devices - coalesce(cast((SELECT devices FROM held) ->> id AS integer), 0) AS room
    FROM experiments WHERE max_devices IS NOT NULL
"""
"""Experiments with a quota, and the `room` that it leaves."""
WITH_ROOM = f"WITH owners AS MATERIALIZED ({OWNERS}), limited AS MATERIALIZED ({LIMITED})"
"""Start of a query that joins `JOIN_ROOM` to pending `runs`."""
JOIN_ROOM = f"JOIN owners ON owners.owner = {OWNER} LEFT JOIN limited ON limited.id = {LIMITING_EXPERIMENT}"
WAITING_COLUMNS = f"""
    runs.id, runs.priority, {OWNER} AS owner, {LIMITING_EXPERIMENT} AS experiment_id, runs.backend, runs.devices_needed,
    runs.hosts_needed, runs.requirements,
    cast(extract(epoch FROM runs.not_before - clock_timestamp()) AS float) AS wait,
    runs.hosts_needed = 1 OR NOT EXISTS (
        SELECT FROM run_parts WHERE run_parts.run_id = runs.id AND run_parts.ended_at IS NULL
    ) AS is_ready,
    owners.used, owners.room AS key_room, owners.max_devices AS key_devices, owners.spent_budget AS key_spent_budget,
    limited.room AS experiment_room, limited.max_devices AS experiment_devices, limited.name AS experiment_name
"""
"""Columns of a query with `JOIN_ROOM`, of which `waiting_run` makes a run of the policy."""


def waiting_run(row: Any) -> WaitingRun:
    """Return the pending run of a row with `WAITING_COLUMNS`."""
    needs = Needs.of(row.backend, row.devices_needed, row.hosts_needed, row.requirements or {})
    return WaitingRun(
        row.id, needs, row.priority, row.owner, tuple(quota_rooms(row)), max(row.wait, 0.0), is_ready=row.is_ready
    )


def quota_rooms(row: Any) -> dict[str, int]:
    """Return the devices that the quotas of a run leave, by id of the key or the experiment."""
    rooms = {row.owner: row.key_room, row.experiment_id: row.experiment_room}
    return {quota: room for quota, room in rooms.items() if room is not None}
