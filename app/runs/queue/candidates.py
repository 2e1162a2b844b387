"""Reads the first pending runs that one worker could take, in the order of the queue.

`app.runs.queue.policy` decides which of them start. The conditions here only keep others from being read: they hold
for every run that may start, and for few that may not.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sqlalchemy import Connection, text

from anneal.contracts.schemas.runs.placement import name_words
from app.runs.queue.fleet import NearFleet
from app.runs.queue.order import (
    JOIN_ROOM,
    LIMITED,
    LIMITING_EXPERIMENT,
    OWNER,
    OWNERS,
    OWNERS_ORDER,
    QUEUE_ORDER,
    WAITING_COLUMNS,
    quota_rooms,
    waiting_run,
)
from app.runs.queue.policy import OrderKey, WaitingRun, order_key

_EVERY_OWNER = 1_000_000_000
_NEEDED_MB = """coalesce(cast(runs.requirements ->> 'memory_mb' AS bigint),
        cast(runs.requirements -> 'estimated_mb' ->> :kind AS bigint), 0)"""
_MAY_FIT = f"""
    runs.devices_needed <= :free_devices AND runs.hosts_needed = 1
    AND runs.stop_requested_at IS NULL AND runs.not_before <= clock_timestamp()
    AND runs.backend = ANY(:backends)
    AND coalesce(runs.requirements ->> 'kind', :kind) = :kind
    AND (runs.requirements ->> 'kind' IS NOT NULL OR runs.requirements ->> 'prefers_gpu' IS DISTINCT FROM 'true'
        OR NOT runs.backend = ANY(:gpu_backends))
    AND coalesce(runs.requirements -> 'labels' <@ cast(:labels AS jsonb), true)
    AND (:gguf OR runs.requirements -> 'gguf' IS NULL)
    AND (:gguf_quantizer OR runs.requirements -> 'gguf_quantizer' IS NULL)
    AND (runs.requirements ->> 'gpu' IS NULL OR EXISTS (
        SELECT FROM unnest(cast(:names AS text[])) AS name
        WHERE strpos(name, ' ' || (runs.requirements ->> 'gpu') || ' ') > 0
    ))
    AND {_NEEDED_MB} <= :largest_mb
    AND {_NEEDED_MB} * runs.devices_needed <= coalesce(cast(:machine_mb AS bigint), 9223372036854775807)
    AND NOT EXISTS (
        SELECT FROM limited WHERE limited.id = {LIMITING_EXPERIMENT} AND limited.room < runs.devices_needed
    )
    AND runs.devices_needed <= coalesce(owners.room, runs.devices_needed)
    AND NOT EXISTS (
        SELECT FROM unnest(cast(:full_quotas AS text[]), cast(:full_owners AS text[]),
            cast(:full_priorities AS integer[]), cast(:full_holders AS text[])) AS held(quota, owner, priority, run)
        WHERE held.quota IN (owners.owner, {LIMITING_EXPERIMENT}) AND (runs.priority < held.priority
            OR (held.owner = owners.owner AND runs.priority = held.priority AND runs.id > held.run))
    )
"""
# The CASE: Postgres takes it to be true for half of the runs, and so reads those of an owner in their order until
# enough fit. It would take the bare conditions to be true for none, and read and sort all runs of the owner.
#
# Most owners need no search: what precedes the best run that the next owner could have precedes all runs of that owner
# and of those after it.
_CANDIDATES = text(f"""
    WITH owners AS MATERIALIZED (
        SELECT *, CASE WHEN coalesce(room, 1) > 0
            THEN row_number() OVER (ORDER BY coalesce(room, 1) <= 0, priority DESC, used) END AS place
        FROM ({OWNERS}) AS owners
    ),
    limited AS MATERIALIZED ({LIMITED}),
    page AS MATERIALIZED (
        SELECT coalesce(cast(:of_owner AS integer), 1 + :most / greatest(count(place), 1)) AS of_owner,
            min(priority) FILTER (WHERE place = :owners + 1) AS next_priority,
            min(used) FILTER (WHERE place = :owners + 1) AS next_used
        FROM owners
    ),
    first AS (
        SELECT runs.id FROM owners CROSS JOIN LATERAL (
            SELECT runs.id, runs.priority FROM runs
            WHERE {OWNER} = owners.owner AND runs.status = 'pending' AND CASE WHEN {_MAY_FIT} THEN true ELSE false END
            ORDER BY {OWNERS_ORDER} LIMIT (SELECT of_owner FROM page)
        ) AS runs
        WHERE owners.place <= :owners ORDER BY {QUEUE_ORDER} LIMIT :most
    ),
    chosen AS (
        SELECT id, true AS is_first FROM first UNION ALL SELECT unnest(cast(:run_ids AS text[])), false
    )
    SELECT {WAITING_COLUMNS}, runs.lease_epoch, chosen.is_first, page.*
    FROM page LEFT JOIN (
        chosen JOIN runs ON runs.id = chosen.id AND runs.status = 'pending' {JOIN_ROOM}
    ) ON true
""")


@dataclass(frozen=True)
class Candidates:
    """First runs that a worker could take, and the runs that hold workers or quotas."""

    runs: dict[str, WaitingRun]
    """By id."""
    rooms: dict[str, int]
    """Devices that the quotas of these runs leave."""
    used: dict[str, float]
    """Device-seconds that the owners of these runs have used lately."""
    lease_epochs: dict[str, int]
    end: OrderKey | None
    """Place in the queue before which none is missing; None: these are all."""


def read_candidates(
    connection: Connection,
    near: NearFleet,
    most: int,
    of_owner: int | None = None,
    *,
    run_ids: Sequence[str] = (),
    full_quotas: Mapping[str, WaitingRun] = MappingProxyType({}),
) -> Candidates:
    """Read up to `most` runs that may start on a worker, and those of `run_ids` that still wait.

    Of one owner it reads `of_owner` runs at most; None: an equal share, and only of the first owners. `full_quotas`
    have the runs that hold them without leaving a device: of the others, none that is certainly behind the holder is
    read.
    """
    worker = near.worker
    free = [device for device in worker.devices if device.run_id is None and not device.paused]
    parameters = {
        "free_devices": len(free),
        "largest_mb": max((device.memory_mb for device in free), default=0),
        "backends": list(worker.backends),
        "kind": worker.kind,
        "names": list({name_words(device.name) for device in free}),
        "labels": json.dumps(sorted(worker.labels)),
        "gguf": worker.gguf,
        "gguf_quantizer": worker.gguf_quantizer,
        "gpu_backends": list(near.fleet.gpu_backends),
        "machine_mb": _free_machine_mb(near),
        "most": most,
        "of_owner": of_owner,
        "owners": _EVERY_OWNER if of_owner else 2 * most,
        "full_quotas": list(full_quotas),
        "full_owners": [run.owner for run in full_quotas.values()],
        "full_priorities": [run.priority for run in full_quotas.values()],
        "full_holders": [run.run_id for run in full_quotas.values()],
        "run_ids": list(run_ids),
    }
    page, *others = connection.execute(_CANDIDATES, parameters).all()
    rows = [row for row in (page, *others) if row.id is not None]
    runs = {row.id: waiting_run(row) for row in rows}
    used = {row.owner: row.used for row in rows}
    first = sorted((runs[row.id] for row in rows if row.is_first), key=lambda run: order_key(run, used))
    last = {run.owner: order_key(run, used) for run in first}
    counts = Counter(run.owner for run in first)
    ends = [last[owner] for owner, count in counts.items() if count >= page.of_owner]
    if first and len(first) >= most:
        ends.append(order_key(first[-1], used))
    if page.next_used is not None:
        ends.append((-page.next_priority, page.next_used, ""))
    return Candidates(
        runs,
        {quota: room for row in rows for quota, room in quota_rooms(row).items()},
        used,
        {row.id: row.lease_epoch for row in rows},
        min(ends, default=None),
    )


def _free_machine_mb(near: NearFleet) -> int | None:
    """Return the memory that the runs of a machine leave; None if no other worker of it trains one that needs some."""
    worker = near.worker
    if worker.machine is None:
        return None
    used_mb = {
        mate.worker_id: sum(device.held_mb for device in mate.devices)
        for mate in near.fleet.workers
        if mate.machine == worker.machine
    }
    if not any(mb for worker_id, mb in used_mb.items() if worker_id != worker.worker_id):
        return None
    return sum(device.memory_mb for device in worker.devices) - sum(used_mb.values())
