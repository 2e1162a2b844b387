"""SQL of the order in which pending runs are claimed, and of quotas.

Runs of higher priority come first, then those of the owner that has used fewer devices lately, then older ones.
A quota may be kept for one of them (`app.runs.queue.policy`): later runs leave it as many devices as it needs.
"""

from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Double,
    Integer,
    Text,
    TextualSelect,
    and_,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    text,
)

from app.contracts.backends import WORKER_BACKENDS
from app.tables.base import sql_list
from app.tables.runs import Run
from app.tables.scheduling import RESERVATION_SECONDS

HALF_LIFE_SECONDS = 7 * 86_400
"""Seconds after which the usage of devices counts half."""
PENDING = literal_column("'pending'", Text)
"""The status, in the statement itself: with a parameter, a plan for every value would not use the partial indexes."""
OWNER = "coalesce(runs.created_by, '')"
"""SQL expression: the owner of a run, as in the index of pending runs."""
# As of the start of the transaction: two runs of an owner have the same value, and so the order of their ids.
_DECAYED = (
    "coalesce(device_seconds * "
    f"power(0.5, greatest(cast(extract(epoch FROM now() - updated_at) AS float), 0) / {HALF_LIFE_SECONDS}), 0)"
)
# Devices in use are counted once for all quotas, and only if there is one. As JSON objects: with a join, Postgres may
# compare each owner with each other one, since it cannot know how many there are.
_HELD = """
    SELECT jsonb_object_agg(coalesce(id, ''), devices) AS devices FROM (
        SELECT {column} AS id, count(*) AS devices FROM devices JOIN runs AS holders ON holders.id = devices.run_id
        GROUP BY 1
    ) AS holders
"""
_EACH = f"""
    (SELECT {OWNER}, priority FROM runs WHERE status = 'pending' ORDER BY {OWNER}, priority DESC, id LIMIT 1)
    UNION ALL
    SELECT later.* FROM known CROSS JOIN LATERAL (
        SELECT {OWNER}, priority FROM runs WHERE status = 'pending' AND {OWNER} > known.owner
        ORDER BY {OWNER}, priority DESC, id LIMIT 1
    ) AS later
"""
_OF_RESERVED = f"""
    SELECT {OWNER}, runs.priority FROM reservations JOIN runs ON runs.id = reservations.run_id
    WHERE reservations.worker_id = :worker_id AND runs.status = 'pending'
"""
_OWNERS = f"""
    WITH RECURSIVE known(owner, priority) AS ({{known}}),
        held AS MATERIALIZED ({_HELD.format(column="holders.created_by")})
    SELECT known.owner, known.priority, {_DECAYED} AS used, api_keys.max_devices,
        CASE WHEN api_keys.max_devices IS NOT NULL THEN api_keys.max_devices
            - coalesce(cast((SELECT devices FROM held) ->> known.owner AS integer), 0) END AS room
    FROM known LEFT JOIN device_usage ON device_usage.owner = known.owner
        LEFT JOIN api_keys ON api_keys.id = known.owner
"""
OWNERS = _OWNERS.format(known=_EACH)
"""Owners of pending runs: the highest `priority` of these, `used` device-seconds, and `room` devices that the quota of
the key leaves, or null."""
LIMITED = f"""
    WITH held AS MATERIALIZED ({_HELD.format(column="holders.experiment_id")})
    SELECT id, name, max_devices,
        max_devices - coalesce(cast((SELECT devices FROM held) ->> id AS integer), 0) AS room
    FROM experiments WHERE max_devices IS NOT NULL
"""
"""Experiments with a quota, and the `room` that it leaves."""
WITH_ROOM = f"WITH owners AS MATERIALIZED ({OWNERS}), limited AS MATERIALIZED ({LIMITED})"
"""Start of a query that joins `JOIN_ROOM` to pending `runs`."""
JOIN_ROOM = f"JOIN owners ON owners.owner = {OWNER} LEFT JOIN limited ON limited.id = runs.experiment_id"
HAS_ROOM = "runs.devices_needed <= coalesce(least(owners.room, limited.room), runs.devices_needed)"
"""SQL condition: the quotas have room for the run."""


def _used_by_owner_of(run: str) -> str:
    of_owner = f"SELECT {_DECAYED} FROM device_usage WHERE device_usage.owner = coalesce({run}.created_by, '')"
    return f"coalesce(({of_owner}), 0)"


_KEPT = f"""
    FROM quota_reservations AS kept JOIN runs AS waiting ON waiting.id = kept.run_id
    WHERE kept.quota_id IN (runs.created_by, runs.experiment_id)
        AND kept.made_at > clock_timestamp() - interval '{RESERVATION_SECONDS} s'
        AND waiting.status = 'pending'
        AND (-runs.priority, owners.used, runs.id)
            > (-waiting.priority, {_used_by_owner_of("waiting")}, waiting.id)
        AND coalesce(
            clock_timestamp() + cast(kept.durations ->> runs.id AS float) * interval '1 s' > kept.starts_at, true)
"""
# Of a backend that starts a worker for each run, quotas are checked before that: the worker can claim no other run.
KEPT_FOR = f"""(
    SELECT kept.run_id {_KEPT} AND runs.devices_needed > kept.spare AND runs.backend IN {sql_list(WORKER_BACKENDS)}
    LIMIT 1
)"""
"""SQL expression: the run for which a quota is kept, if it would wait longer because of a run; else null."""
KEPT_QUOTAS = f"(SELECT jsonb_object_agg(kept.quota_id, jsonb_build_array(kept.run_id, kept.spare)) {_KEPT})"
"""SQL expression: the quotas that are kept for runs before a run, each with that run and the devices left to others."""
QUOTA_LOCK = 0x71756F74  # "quot"
"""Key of the advisory lock under which quotas are checked, and reservations of them changed."""

_runs: Any = Run.__table__


def owner_of_reserved(worker_id: str) -> CTE:
    """Return the owner of the pending run for which a worker is reserved: `owner`, `used` and `room` as in `OWNERS`."""
    return _owners(_OF_RESERVED, worker_id=worker_id).cte("owners").prefix_with("MATERIALIZED")


def ranked_owners() -> CTE:
    """Return the owners of pending runs that have room, with their `place`: none has a run before one of lower place.

    That is, by their highest priority, then by what they have used. A run of less priority, because those before it do
    not fit, may still come after runs of later owners.
    """
    waiting = _owners(_EACH).subquery("waiting")
    place = func.row_number().over(order_by=(waiting.c.priority.desc(), waiting.c.used)).label("place")
    ranked = select(waiting, place).where(func.coalesce(waiting.c.room, 1) > 0)
    return ranked.cte("owners").prefix_with("MATERIALIZED")


def _owners(known: str, **parameters: str) -> TextualSelect:
    query = text(_OWNERS.format(known=known)).bindparams(**parameters)
    return query.columns(owner=Text(), priority=Integer(), used=Double(), room=Integer())


def is_owned_by(owner: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a run has this owner."""
    return literal_column(OWNER, Text) == owner


def used_by_owner_of(run: Any) -> ColumnElement[float]:
    """Return the device-seconds that the owner of a run has used, as in `OWNERS`."""
    return literal_column(_used_by_owner_of(run.name), Double)


def has_room(owners: CTE) -> ColumnElement[bool]:
    """Return the condition that no quota keeps a run waiting: those of its key and of its experiment have room for it.

    Nor is one of them kept for a run before it. The enclosing query has the tables `runs` and `owners`.
    """
    limited = text(LIMITED).columns(id=Text(), room=Integer()).cte("limited").prefix_with("MATERIALIZED")
    is_full = exists(
        select(literal(1))
        .select_from(limited)
        .where(limited.c.id == _runs.c.experiment_id, _runs.c.devices_needed > limited.c.room)
    )
    is_kept = literal_column(KEPT_FOR, Text).is_not(None)
    return and_(or_(owners.c.room.is_(None), _runs.c.devices_needed <= owners.c.room), ~is_full, ~is_kept)
