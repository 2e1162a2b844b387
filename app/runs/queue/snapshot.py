"""Reads the queue with the runs that train, and estimates when devices become free and how long runs take."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, text

from anneal.contracts.run_status import LIVE
from anneal.contracts.run_task import RunTask
from anneal.contracts.training_config.field_traits import DURATION
from app.config import Settings
from app.runs.queue import durations
from app.runs.queue.durations import Estimate, PastAttempt, Timings, Workload
from app.runs.queue.fit import Fleet, WorkerOffer
from app.runs.queue.fleet import read_fleet
from app.runs.queue.order import (
    JOIN_ROOM,
    LIMITING_EXPERIMENT,
    OWNER,
    OWNERS_ORDER,
    QUEUE_ORDER,
    WAITING_COLUMNS,
    WITH_ROOM,
    quota_rooms,
    waiting_run,
)
from app.runs.queue.policy import MOST_HOLDS, Snapshot, TrainingRun, WaitingRun
from app.tables.base import sql_list
from app.tables.runs import EXTRA_EVAL_DATASETS
from app.tables.scheduling import HOLD_SECONDS

_MOST_RUNS = 1000
_MOST_WIDE = 100
_MOST_LIKE = 20
_FIELDS = ", ".join(f"'{name}', runs.config->'{name}'" for name in DURATION)
_WORKLOAD = f"""
    runs.task, runs.dataset_id, runs.eval_dataset_id, runs.total_steps, runs.started_at,
    coalesce(cast(runs.requirements->>'sequence_parallel' AS int), 1) AS sequence_parallel,
    runs.stop_mode, runs.preempted_for, runs.current_step, runs.current_epoch,
    {EXTRA_EVAL_DATASETS} AS extra_eval_datasets,
    jsonb_build_object({_FIELDS}) AS config, datasets.rows, checkpoints.step AS resumed_at,
    coalesce(runs.checkpoint_step, 0) AS saved_at
"""
_WITH = """
    LEFT JOIN datasets ON datasets.id = runs.dataset_id
    LEFT JOIN checkpoints ON checkpoints.id = runs.resume_checkpoint_id
"""
_LIVE = text(f"""
    SELECT {_WORKLOAD}, runs.id, runs.backend, {OWNER} AS owner, {LIMITING_EXPERIMENT} AS experiment_id,
        runs.devices_needed, runs.hosts_needed, runs.priority, run_timings.timings, run_timings.device,
        attempts.start_step,
        cast(extract(epoch FROM clock_timestamp() - runs.stop_requested_at) AS float) AS stop_requested_ago,
        cast(extract(epoch FROM clock_timestamp() - coalesce(run_timings.measured_at, attempts.started_at)) AS float)
            AS ago,
        cast(extract(epoch FROM clock_timestamp() - attempts.started_at) AS float) AS seconds
    FROM runs {_WITH}
    LEFT JOIN run_timings ON run_timings.run_id = runs.id AND run_timings.attempt = runs.attempt
    JOIN run_attempts AS attempts ON attempts.run_id = runs.id AND attempts.attempt = runs.attempt
    WHERE runs.status IN {sql_list(LIVE)} ORDER BY runs.id LIMIT {_MOST_RUNS}
""")
# One branch per owner: each reads an index in the order of claims. Beside the first runs of the queue, the first of
# each kind that may hold workers: those that fit nowhere must not hide them.
_PENDING = text(f"""
    {WITH_ROOM}, first AS MATERIALIZED (
        SELECT runs.id FROM owners CROSS JOIN LATERAL (
            SELECT id, priority FROM runs
            WHERE {OWNER} = owners.owner AND runs.status = 'pending' AND runs.backend = ANY(:backends)
            ORDER BY {OWNERS_ORDER} LIMIT 1 + {_MOST_RUNS} / (SELECT count(*) FROM owners)
        ) AS runs ORDER BY {QUEUE_ORDER} LIMIT {_MOST_RUNS}
    ), wide AS (
        SELECT id, priority, row_number() OVER (
            PARTITION BY {OWNER}, backend, devices_needed, hosts_needed, requirements ORDER BY priority DESC, id
        ) AS place
        FROM runs WHERE status = 'pending' AND devices_needed > 1 AND backend = ANY(:backends)
    ), chosen AS (
        SELECT id FROM first UNION
        (SELECT id FROM runs WHERE status = 'pending' AND backend = ANY(:backends)
            ORDER BY priority DESC, id LIMIT :most_in_any_case) UNION
        (SELECT id FROM wide WHERE place <= {MOST_HOLDS} ORDER BY priority DESC, id LIMIT {_MOST_WIDE})
    )
    SELECT {_WORKLOAD}, {WAITING_COLUMNS}, runs.id IN (SELECT id FROM first) AS is_first, runs.pending_reason,
        cast(extract(epoch FROM clock_timestamp() - greatest(runs.created_at, runs.not_before)) AS float) AS waited
    FROM chosen JOIN runs ON runs.id = chosen.id {JOIN_ROOM} {_WITH}
    ORDER BY {QUEUE_ORDER}
""")
# One attempt per run, the longest: a run that was lost or repaired many times must not dominate the history.
_PAST = text(f"""
    SELECT wanted.similarity_key, past.run_id, past.device, past.timings FROM unnest(cast(:likenesses AS text[]))
        AS wanted(similarity_key)
    CROSS JOIN LATERAL (
        SELECT DISTINCT ON (run_id) * FROM run_timings WHERE run_timings.similarity_key = wanted.similarity_key
        ORDER BY run_id DESC, cast(timings->'step' AS int) - cast(timings->'start_step' AS int) DESC LIMIT {_MOST_LIKE}
    ) AS past
""").bindparams(bindparam("likenesses"))
_NOW = text("SELECT clock_timestamp()")
_HELD = text(f"""
    SELECT hold ->> 'run_id' AS run_id, array(SELECT jsonb_object_keys(hold -> 'devices')) AS workers
    FROM queue_plan CROSS JOIN jsonb_array_elements(holds -> 'holds') AS hold
    WHERE made_at > clock_timestamp() - interval '{HOLD_SECONDS} s'
""")


class Forecast:
    """The queue at one moment, with what is known of the durations of its runs and of those that train."""

    def __init__(
        self,
        now: datetime,
        live: Sequence[Any],
        pending: Sequence[Any],
        fleet: Fleet,
        past: Sequence[Any],
        held: dict[str, list[str]],
        grace: float,
    ) -> None:
        """`grace` is the most seconds that a run takes to stop, `held` the workers that each run holds."""
        self.now = now
        self.live = live
        self.pending = {run.id: run for run in pending}
        self.fleet = fleet
        self._held = held
        self._grace = grace
        self._past: dict[str, list[PastAttempt]] = defaultdict(list)
        for attempt in past:
            self._past[attempt.similarity_key].append(
                PastAttempt(attempt.run_id, attempt.device, Timings.stored(attempt.timings))
            )
        self.estimates: dict[str, Estimate] = {}
        """Remaining durations of the runs that train, as far as they are known."""
        self.ends: dict[str | None, float] = {None: 0.0}
        """Seconds until a run, or none, frees its devices, as far as they are known."""
        self._seconds: dict[tuple[str, str], float] = {}
        for run in live:
            if run.stop_requested_ago is not None:
                self.ends[run.id] = max(grace - run.stop_requested_ago, 0.0)
            elif run.preempted_for is not None:
                self.ends[run.id] = grace
            elif estimate := self.estimate(run, run.device, run.timings and Timings.stored(run.timings)):
                self.ends[run.id] = max(estimate.seconds - run.ago, 0.0)
                self.estimates[run.id] = estimate
        self.rooms = {quota: room for run in pending for quota, room in quota_rooms(run).items()}
        """Devices that the quotas of pending runs leave."""

    def estimate(self, run: Any, device: str | None, so_far: Timings | None = None) -> Estimate | None:
        """Estimate the duration of a run on a kind of device, from `so_far` or from its claim; None: no basis."""
        if run.task != RunTask.train:
            return None  # it has no steps, which all predictions are made of
        if run.stop_mode == "epoch_end" and not run.current_epoch:
            return None  # until a metric gives the length of an epoch
        workload = Workload.of(run)
        # Its own steps are not history.
        past = [one for one in self._past[durations.similarity_key(run.backend, run.config)] if one.run_id != run.id]
        return durations.estimate(workload, so_far, durations.typical_durations(past, workload, device))

    def seconds(self, run: WaitingRun, worker: WorkerOffer) -> float:
        """Return the duration of a pending run on a worker; infinite if unknown."""
        if (key := (run.run_id, worker.device)) not in self._seconds:
            estimate = self.estimate(self.pending[run.run_id], worker.device)
            self._seconds[key] = estimate.seconds if estimate else math.inf
        return self._seconds[key]

    def snapshot(self) -> Snapshot:
        """Return the state of the queue, as its policy takes it."""
        training = [
            TrainingRun(
                run.id,
                run.devices_needed,
                run.owner,
                tuple(quota for quota in (run.owner, run.experiment_id) if quota in self.rooms),
                self.ends.get(run.id, math.inf),
            )
            for run in self.live
        ]
        limits = Counter(self.rooms)
        for run in training:
            limits.update(dict.fromkeys(run.quotas, run.devices))
        waiting = [waiting_run(run) for run in self.pending.values()]
        used = {run.owner: run.used for run in self.pending.values()}
        return Snapshot(self.fleet, waiting, self.seconds, training, used, limits, self._held)

    def expect_room(self, run_id: str, worker_ids: list[str], leaving: Iterable[str]) -> None:
        """Expect that runs leave workers soon, for a run that holds these."""
        self._held = {**self._held, run_id: worker_ids}
        self.ends.update(dict.fromkeys(leaving, self._grace))


async def read_forecast(
    connection: Any, settings: Settings, backends: Sequence[str], *, is_round: bool = False
) -> Forecast | None:
    """Read the queue and estimate all runs; None if no run waits or trains. Takes an async session or connection.

    For a round, durations are estimated only if a run waits that may hold devices, and the first runs are read whatever
    their owners have used: their reasons to wait are stored, and runs may have to make room for them.
    """
    now: datetime = (await connection.execute(_NOW)).scalar_one()
    live = (await connection.execute(_LIVE)).all()
    pending = (
        await connection.execute(
            _PENDING, {"backends": list(backends), "most_in_any_case": _MOST_RUNS if is_round else 0}
        )
    ).all()
    if not live and not pending:
        return None
    fleet = await read_fleet(connection, settings.lease_seconds)
    past: Sequence[Any] = []
    if not is_round or any(run.devices_needed > 1 for run in pending):
        keys = {durations.similarity_key(run.backend, run.config) for run in (*live, *pending)}
        past = (await connection.execute(_PAST, {"likenesses": sorted(keys)})).all()
    held = {row.run_id: row.workers for row in (await connection.execute(_HELD)).all()}
    # In a thread: a thousand runs take some tenths of a second, which must not block requests.
    return await asyncio.to_thread(Forecast, now, live, pending, fleet, past, held, settings.save_grace_seconds)
