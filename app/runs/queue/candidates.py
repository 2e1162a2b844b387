"""Reads the first pending runs that one worker could take, in the order of the queue.

`app.runs.queue.fit` decides which of them fit. The conditions here only keep others from being read: they hold for
every run that fits, and for few that do not.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from app.contracts.schemas.runs.placement import name_words
from app.runs.queue.fit import Fleet, WorkerOffer
from app.runs.queue.order import JOIN_ROOM, LIMITED, OWNER, OWNERS, WAITING_COLUMNS, quota_rooms, waiting_run
from app.runs.queue.policy import OrderKey, WaitingRun, order_key

_FIRST_OWNERS = 32
"""Owners whose runs are searched before those of all others."""
_MAY_FIT = """
    runs.devices_needed <= :free_devices AND runs.hosts_needed = 1
    AND runs.stop_requested_at IS NULL AND runs.not_before <= clock_timestamp()
    AND runs.backend = ANY(:backends)
    AND coalesce(runs.requirements ->> 'kind', :kind) = :kind
    AND (runs.requirements ->> 'kind' IS NOT NULL OR runs.requirements ->> 'prefers_gpu' IS DISTINCT FROM 'true'
        OR NOT runs.backend = ANY(:gpu_backends))
    AND coalesce(runs.requirements -> 'labels' <@ cast(:labels AS jsonb), true)
    AND (:gguf OR runs.requirements -> 'gguf' IS NULL)
    AND (runs.requirements ->> 'gpu' IS NULL OR EXISTS (
        SELECT FROM unnest(cast(:names AS text[])) AS name
        WHERE strpos(name, ' ' || (runs.requirements ->> 'gpu') || ' ') > 0
    ))
    AND coalesce(cast(runs.requirements ->> 'memory_mb' AS integer),
        cast(runs.requirements -> 'estimated_mb' ->> :kind AS integer), 0) <= :largest_mb
    AND NOT EXISTS (SELECT FROM limited WHERE limited.id = runs.experiment_id AND limited.room <= 0)
    AND (cast(:only_run AS text) IS NULL OR (runs.id = :only_run AND runs.lease_epoch = :only_epoch))
"""
_BEST = f"""
    SELECT runs.id, runs.priority FROM runs
    WHERE {OWNER} = owners.owner AND runs.status = 'pending' AND CASE WHEN {_MAY_FIT} THEN true ELSE false END
    ORDER BY runs.priority DESC, runs.id LIMIT (SELECT of_owner FROM most)
"""
# The CASE: Postgres takes it to be true for half of the runs, and so reads those of an owner in their order until
# enough fit. It would take the bare conditions to be true for none, and read and sort all runs of the owner.
#
# Most owners need no search: what precedes the best run that the owner after the first ones could have precedes all
# runs of that owner and of those after it.
_CANDIDATES = text(f"""
    WITH all_owners AS MATERIALIZED ({OWNERS}), limited AS MATERIALIZED ({LIMITED}),
    owners AS MATERIALIZED (
        SELECT *, row_number() OVER (ORDER BY priority DESC, used) AS place FROM all_owners WHERE coalesce(room, 1) > 0
    ),
    most AS MATERIALIZED (SELECT 1 + :most / greatest(count(*), 1) AS of_owner FROM owners),
    near AS MATERIALIZED (
        SELECT best.id, best.priority, owners.used FROM owners CROSS JOIN LATERAL ({_BEST}) AS best
        WHERE owners.place <= {_FIRST_OWNERS}
    ),
    far AS (
        SELECT best.id, best.priority, owners.used FROM owners CROSS JOIN LATERAL ({_BEST}) AS best
        WHERE owners.place > {_FIRST_OWNERS} AND :most > (
            SELECT count(*) FROM near WHERE (-near.priority, near.used)
                < (SELECT -priority, used FROM owners WHERE place = {_FIRST_OWNERS} + 1)
        )
    ),
    first AS (
        SELECT id FROM (SELECT * FROM near UNION ALL SELECT * FROM far) AS best
        ORDER BY priority DESC, used, id LIMIT :most
    ),
    chosen AS (
        SELECT id, true AS is_first FROM first
        UNION ALL SELECT runs.id, false FROM runs
        WHERE runs.id = ANY(:listed) AND runs.status = 'pending' AND {_MAY_FIT}
        UNION ALL SELECT runs.id, false FROM runs WHERE runs.id = ANY(:holders) AND runs.status = 'pending'
    )
    SELECT {WAITING_COLUMNS}, runs.lease_epoch, chosen.is_first, (SELECT of_owner FROM most) AS most_of_owner
    FROM chosen JOIN runs ON runs.id = chosen.id
        {JOIN_ROOM.replace("JOIN owners ON", "JOIN all_owners AS owners ON", 1)}
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
    worker: WorkerOffer,
    fleet: Fleet,
    most: int,
    *,
    listed: Sequence[str] = (),
    holders: Sequence[str] = (),
    only_run: tuple[str, int] | None = None,
) -> Candidates:
    """Read up to about `most` runs that may fit a worker, those of `listed` that may, and those of `holders`."""
    free = [device for device in worker.devices if device.run_id is None and not device.paused]
    only_id, only_epoch = only_run or (None, None)
    parameters = {
        "free_devices": len(free),
        "largest_mb": max((device.memory_mb for device in free), default=0),
        "backends": list(worker.backends),
        "kind": worker.kind,
        "names": list({name_words(device.name) for device in free}),
        "labels": json.dumps(sorted(worker.labels)),
        "gguf": worker.gguf,
        "gpu_backends": list(fleet.gpu_backends) if worker.kind != "cuda" else [],
        "most": most,
        "listed": list(listed),
        "holders": list(holders),
        "only_run": only_id,
        "only_epoch": only_epoch,
    }
    rows = connection.execute(_CANDIDATES, parameters).all()
    runs = {row.id: waiting_run(row) for row in rows}
    used = {row.owner: row.used for row in rows}
    first = sorted((runs[row.id] for row in rows if row.is_first), key=lambda run: order_key(run, used))
    last = {run.owner: order_key(run, used) for run in first}
    counts = Counter(run.owner for run in first)
    ends = [last[owner] for owner, count in counts.items() if count >= rows[0].most_of_owner]
    if len(first) >= most:
        ends.append(order_key(first[-1], used))
    return Candidates(
        runs,
        {quota: room for row in rows for quota, room in quota_rooms(row).items()},
        used,
        {row.id: row.lease_epoch for row in rows},
        min(ends, default=None),
    )
