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
from app.runs.queue.fit import Fleet, WorkerOffer
from app.runs.queue.order import JOIN_ROOM, LIMITED, OWNER, OWNERS, WAITING_COLUMNS, quota_rooms, waiting_run
from app.runs.queue.policy import OrderKey, WaitingRun, order_key

_FIRST_OWNERS = 32
"""Owners whose runs are searched before those of all others."""
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
    AND (runs.requirements ->> 'gpu' IS NULL OR EXISTS (
        SELECT FROM unnest(cast(:names AS text[])) AS name
        WHERE strpos(name, ' ' || (runs.requirements ->> 'gpu') || ' ') > 0
    ))
    AND {_NEEDED_MB} <= :largest_mb
    AND {_NEEDED_MB} * runs.devices_needed <= coalesce(cast(:machine_mb AS bigint), 9223372036854775807)
    AND NOT EXISTS (
        SELECT FROM limited WHERE limited.id = runs.experiment_id AND limited.room < runs.devices_needed
    )
    AND (cast(:only_run AS text) IS NULL OR (runs.id = :only_run AND runs.lease_epoch = :only_epoch))
"""
_BEST = f"""
    SELECT runs.id, runs.priority FROM runs
    WHERE {OWNER} = owners.owner AND runs.status = 'pending' AND CASE WHEN {_MAY_FIT}
        AND runs.devices_needed <= coalesce(owners.room, runs.devices_needed)
        AND NOT EXISTS (
            SELECT FROM unnest(cast(:full_quotas AS text[]), cast(:full_owners AS text[]),
                cast(:full_priorities AS integer[]), cast(:full_holders AS text[])) AS held(quota, owner, priority, run)
            WHERE held.quota IN (owners.owner, runs.experiment_id) AND (runs.priority < held.priority
                OR (held.owner = owners.owner AND runs.priority = held.priority AND runs.id > held.run))
        )
        THEN true ELSE false END
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
    most AS MATERIALIZED (
        SELECT coalesce(cast(:of_owner AS integer), 1 + :most / greatest(count(*), 1)) AS of_owner FROM owners
    ),
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
        WHERE runs.id = ANY(:short_runs) AND runs.status = 'pending' AND {_MAY_FIT}
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
    of_owner: int | None = None,
    *,
    short_runs: Sequence[str] = (),
    holders: Sequence[str] = (),
    full_quotas: Mapping[str, WaitingRun] = MappingProxyType({}),
    only_run: tuple[str, int] | None = None,
) -> Candidates:
    """Read up to `most` runs that may start on a worker, those of `short_runs` that may, and all of `holders`.

    Of one owner it reads `of_owner` runs at most; None: an equal share. `full_quotas` have the runs that hold them
    without leaving a device: of the others, none that is certainly behind the holder is read.
    """
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
        "machine_mb": _free_machine_mb(worker, fleet),
        "most": most,
        "of_owner": of_owner,
        "short_runs": list(short_runs),
        "full_quotas": list(full_quotas),
        "full_owners": [run.owner for run in full_quotas.values()],
        "full_priorities": [run.priority for run in full_quotas.values()],
        "full_holders": [run.run_id for run in full_quotas.values()],
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


def _free_machine_mb(worker: WorkerOffer, fleet: Fleet) -> int | None:
    """Return the memory that the runs of a machine leave; None if no other worker of it trains one that needs some."""
    if worker.machine is None:
        return None
    used_mb = {
        mate.worker_id: sum(device.held_mb for device in mate.devices)
        for mate in fleet.workers
        if mate.machine == worker.machine
    }
    if not any(mb for worker_id, mb in used_mb.items() if worker_id != worker.worker_id):
        return None
    return sum(device.memory_mb for device in worker.devices) - sum(used_mb.values())
