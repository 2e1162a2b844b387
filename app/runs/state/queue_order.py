"""SQL of the order in which pending runs are claimed, and of quotas.

Runs of higher priority come first, then those of the owner that has used fewer devices lately, then older ones.
"""

from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Double,
    Integer,
    Text,
    and_,
    exists,
    literal,
    literal_column,
    or_,
    select,
    text,
)

from app.tables.runs import Run

HALF_LIFE_SECONDS = 7 * 86_400
"""Seconds after which the usage of devices counts half."""
PENDING = literal_column("'pending'", Text)
"""The status, in the statement itself: with a parameter, a plan for every value would not use the partial indexes."""
OWNER = "coalesce(runs.created_by, '')"
"""SQL expression: the owner of a run, as in the index of pending runs."""
# As of the start of the transaction: two runs of an owner have the same value, and so the order of their ids.
_DECAYED = (
    "coalesce(device_seconds * "
    f"power(0.5, cast(extract(epoch FROM now() - updated_at) AS float) / {HALF_LIFE_SECONDS}), 0)"
)
_HELD = "SELECT count(*) FROM devices JOIN runs AS holders ON holders.id = devices.run_id WHERE"
OWNERS = f"""
    WITH RECURSIVE known(owner) AS (
        SELECT min({OWNER}) FROM runs WHERE status = 'pending'
        UNION ALL
        SELECT (SELECT min({OWNER}) FROM runs WHERE status = 'pending' AND {OWNER} > known.owner)
        FROM known WHERE known.owner IS NOT NULL
    )
    SELECT known.owner, {_DECAYED} AS used,
        (SELECT max_devices FROM api_keys WHERE api_keys.id = known.owner) AS max_devices, (
        SELECT max_devices - ({_HELD} coalesce(holders.created_by, '') = known.owner)
        FROM api_keys WHERE api_keys.id = known.owner AND max_devices IS NOT NULL
    ) AS room
    FROM known LEFT JOIN device_usage ON device_usage.owner = known.owner WHERE known.owner IS NOT NULL
"""
"""Owners of pending runs: `used` device-seconds, and `room` devices that the quota of the key leaves, or null."""
LIMITED = f"""
    SELECT id, name, max_devices, max_devices - ({_HELD} holders.experiment_id = experiments.id) AS room
    FROM experiments WHERE max_devices IS NOT NULL
"""
"""Experiments with a quota, and the `room` that it leaves."""
WITH_ROOM = f"WITH owners AS MATERIALIZED ({OWNERS}), limited AS MATERIALIZED ({LIMITED})"
"""Start of a query that joins `JOIN_ROOM` to pending `runs`."""
JOIN_ROOM = f"JOIN owners ON owners.owner = {OWNER} LEFT JOIN limited ON limited.id = runs.experiment_id"
HAS_ROOM = "runs.devices_needed <= coalesce(least(owners.room, limited.room), runs.devices_needed)"
"""SQL condition: no quota keeps the run waiting."""

_runs: Any = Run.__table__


def waiting_owners() -> CTE:
    """Return the owners of pending runs: `owner`, `used` and `room` as in `OWNERS`."""
    columns = text(OWNERS).columns(owner=Text(), used=Double(), room=Integer())
    return columns.cte("owners").prefix_with("MATERIALIZED")


def is_owned_by(owner: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a run has this owner."""
    return literal_column(OWNER, Text) == owner


def used_by_owner_of(run: Any) -> ColumnElement[float]:
    """Return the device-seconds that the owner of a run has used, as in `OWNERS`."""
    of_owner = f"(SELECT {_DECAYED} FROM device_usage WHERE device_usage.owner = coalesce({run.name}.created_by, ''))"
    return literal_column(f"coalesce({of_owner}, 0)", Double)


def has_room(owners: CTE) -> ColumnElement[bool]:
    """Return the condition that neither the quota of the key nor that of the experiment keeps a run waiting."""
    limited = text(LIMITED).columns(id=Text(), room=Integer()).cte("limited").prefix_with("MATERIALIZED")
    is_full = exists(
        select(literal(1))
        .select_from(limited)
        .where(limited.c.id == _runs.c.experiment_id, _runs.c.devices_needed > limited.c.room)
    )
    return and_(or_(owners.c.room.is_(None), _runs.c.devices_needed <= owners.c.room), ~is_full)
