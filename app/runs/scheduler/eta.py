"""Predictions for all pending and running runs, made together with a few short queries, at most once a second.

The order in the queue makes each depend on all before it, so predicting one run costs as much as predicting all.
Predictions are optional: no request waits for those that another one is making, and an error fails no response,
because they use a separate session.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.config import Settings
from app.contracts.run_status import LIVE, TERMINAL
from app.contracts.run_task import RunTask
from app.contracts.schemas.runs.reads import Confidence, Prediction
from app.contracts.training_config.field_traits import DURATION
from app.runs.scheduler import durations
from app.runs.scheduler.durations import Estimate, PastAttempt, Timings, Workload
from app.runs.scheduler.fleet import read_fleet
from app.runs.scheduler.placement import Fleet, Needs, pending_reason
from app.runs.scheduler.simulation import PendingRun, PredictedStart, WorkerSlots, simulate_queue
from app.tables.base import sql_list
from app.tables.runs import EXTRA_EVAL_DATASETS

log = logging.getLogger(__name__)

_SECONDS = 1.0
"""Minimum time from one forecast to the next."""
_MOST_SECONDS = 10.0
"""Timeout of a forecast, after which the request that makes it does without."""
_PAUSES = 5
"""Minimum pause before the next forecast, as a multiple of the last one's duration."""
_MOST_RUNS = 1000
_MOST_LIKE = 20
_FIELDS = ", ".join(f"'{name}', runs.config->'{name}'" for name in DURATION)
_RUN = f"""
    runs.id, runs.task, runs.backend, runs.dataset_id, runs.eval_dataset_id, runs.total_steps, runs.started_at,
    runs.stop_mode, runs.current_step, runs.current_epoch,
    {EXTRA_EVAL_DATASETS} AS extra_eval_datasets,
    jsonb_build_object({_FIELDS}) AS config, datasets.rows, checkpoints.step AS resumed_at,
    coalesce(runs.checkpoint_step, 0) AS saved_at
"""
_WITH = """
    LEFT JOIN datasets ON datasets.id = runs.dataset_id
    LEFT JOIN checkpoints ON checkpoints.id = runs.resume_checkpoint_id
"""
_LIVE = text(f"""
    SELECT {_RUN}, run_timings.timings, run_timings.device,
        cast(extract(epoch FROM clock_timestamp() - runs.stop_requested_at) AS float) AS stop_requested_ago,
        cast(extract(epoch FROM clock_timestamp() - coalesce(run_timings.measured_at, attempts.started_at)) AS float)
            AS ago
    FROM runs {_WITH}
    LEFT JOIN run_timings ON run_timings.run_id = runs.id AND run_timings.attempt = runs.attempt
    JOIN run_attempts AS attempts ON attempts.run_id = runs.id AND attempts.attempt = runs.attempt
    WHERE runs.status IN {sql_list(LIVE)} ORDER BY runs.id LIMIT {_MOST_RUNS}
""")
# One branch per backend: each reads an index in the order of claims.
_PENDING = text(f"""
    SELECT {_RUN}, runs.priority, runs.devices_needed, runs.requirements,
        cast(extract(epoch FROM runs.not_before - clock_timestamp()) AS float) AS wait
    FROM unnest(cast(:backends AS text[])) AS known(backend)
    CROSS JOIN LATERAL (
        SELECT * FROM runs WHERE runs.backend = known.backend AND runs.status = 'pending'
        ORDER BY runs.priority DESC, runs.id LIMIT {_MOST_RUNS}
    ) AS runs {_WITH}
    ORDER BY runs.priority DESC, runs.id LIMIT {_MOST_RUNS}
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


class EtaService:
    """Newest predictions of this process."""

    def __init__(self, settings: Settings, backends: Sequence[str], sessions: async_sessionmaker[AsyncSession]) -> None:
        self._settings = settings
        self._backends = list(backends)
        self._sessions = sessions
        self._made_at = -math.inf
        self._took = 0.0
        self._found: dict[str, Prediction] = {}
        self._is_computing = False
        self._has_failed = False

    async def of(self, runs: Mapping[str, str]) -> dict[str, Prediction]:
        """Return the predictions of runs by id, given their statuses; runs that have ended have none."""
        if any(status not in TERMINAL for status in runs.values()):
            await self.renew()
        return self.newest(runs)

    def newest(self, runs: Mapping[str, str]) -> dict[str, Prediction]:
        """Return the same as `of`, without making new predictions."""
        return {id: self._found[id] for id, status in runs.items() if status not in TERMINAL and id in self._found}

    async def renew(self) -> None:
        """Make new predictions if it is time for that; after an error there are none until it works again."""
        age = time.monotonic() - self._made_at
        # Requests that arrive meanwhile use the last predictions: waiting, each would hold a connection.
        if self._is_computing or age <= max(_SECONDS, self._took * _PAUSES):
            return
        self._is_computing = True
        began = time.monotonic()
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                self._found = await self._forecast()
            self._has_failed = False
        except Exception:
            self._found = {}  # the last predictions are soon outdated
            if not self._has_failed:
                log.exception("cannot predict any run")
            self._has_failed = True
        finally:
            self._made_at = time.monotonic()
            self._took = self._made_at - began
            self._is_computing = False

    async def _forecast(self) -> dict[str, Prediction]:
        async with self._sessions() as session:
            now: datetime = (await session.execute(_NOW)).scalar_one()
            live = (await session.execute(_LIVE)).all()
            pending = (await session.execute(_PENDING, {"backends": self._backends})).all()
            if not live and not pending:
                return {}
            fleet = await read_fleet(session, self._settings.lease_seconds)
            wanted = {durations.similarity_key(run.backend, run.config) for run in (*live, *pending)}
            past = (await session.execute(_PAST, {"likenesses": sorted(wanted)})).all()
        # In a thread: a thousand pending runs take some tenths of a second, which must not block other requests.
        forecast = _Forecast(now, past)
        return await asyncio.to_thread(forecast.of, live, pending, fleet, self._settings.save_grace_seconds)


class _Forecast:
    def __init__(self, now: datetime, past: Sequence[Any]) -> None:
        self._now = now
        self._past: dict[str, list[PastAttempt]] = defaultdict(list)
        for one in past:
            self._past[one.similarity_key].append(PastAttempt(one.run_id, one.device, Timings.stored(one.timings)))

    def of(self, live: Sequence[Any], pending: Sequence[Any], fleet: Fleet, grace: float) -> dict[str, Prediction]:
        """Return the predictions by run; `grace` is the most seconds that a run takes to stop."""
        found: dict[str, Prediction] = {}
        ends: dict[str | None, float] = {None: 0.0}
        """Seconds until a run, or none, frees its devices."""
        for run in live:
            if run.stop_requested_ago is not None:
                ends[run.id] = max(grace - run.stop_requested_ago, 0.0)
            elif estimate := self._estimate(run, run.device, run.timings and Timings.stored(run.timings)):
                ends[run.id] = max(estimate.seconds - run.ago, 0.0)
                found[run.id] = self._prediction(run.started_at, ends[run.id], estimate.confidence, estimate.basis)
        slots = [
            WorkerSlots(
                worker,
                tuple(math.inf if one.paused else ends.get(one.run_id, math.inf) for one in worker.devices),
            )
            for worker in fleet.workers
        ]
        rows = {run.id: run for run in pending}
        estimates: dict[str, Estimate | None] = {}

        def seconds(run: PendingRun, worker: WorkerSlots) -> float:
            estimate = estimates[run.run_id] = self._estimate(rows[run.run_id], worker.offer.device)
            return estimate.seconds if estimate else math.inf

        queue = [
            PendingRun(run.id, Needs.of(run.backend, run.devices_needed, run.requirements or {}), max(run.wait, 0.0))
            for run in pending
        ]
        starts = simulate_queue(slots, queue, seconds, fleet.gpu_backends)
        for run in queue:
            reason = pending_reason(run.needs, fleet)
            if reason is not None:
                found[run.run_id] = self._prediction(None, None, "low", reason.message.rstrip("."))
            else:
                found[run.run_id] = self._pending(starts[run.run_id], estimates.get(run.run_id))
        return found

    def _estimate(self, run: Any, device: str | None, so_far: Timings | None = None) -> Estimate | None:
        if run.task != RunTask.train:
            return None  # it has no steps, which all predictions are made of
        if run.stop_mode == "epoch_end" and not run.current_epoch:
            return None  # until a metric gives the length of an epoch
        wanted = Workload.of(run)
        # Its own steps are not history.
        past = [one for one in self._past[durations.similarity_key(run.backend, run.config)] if one.run_id != run.id]
        return durations.estimate(wanted, so_far, durations.typical_durations(past, wanted, device))

    def _pending(self, start: PredictedStart, estimate: Estimate | None) -> Prediction:
        runs = f"{start.before} {'run is' if start.before == 1 else 'runs are'} before it"
        ahead = runs if start.before and start.start else "it is next"
        if math.isinf(start.start):
            why = "it is unknown when a device is free, because the duration of a run before it is unknown"
            return self._prediction(None, None, "low", f"{ahead}, and {why}")
        start_at = self._at(start.start)
        if estimate is None:
            why = "no similar run has trained yet, so its duration is unknown"
            return self._prediction(start_at, None, "low", f"{ahead}; {why}")
        # The durations of the runs before it are less certain than its own.
        confidence = "low" if start.start else estimate.confidence
        return self._prediction(start_at, start.start + estimate.seconds, confidence, f"{ahead}; {estimate.basis}")

    def _prediction(
        self, start_at: datetime | None, ends_in: float | None, confidence: Confidence, basis: str
    ) -> Prediction:
        finish_at = None if ends_in is None else self._at(ends_in)
        sentence = f"{basis[:1].upper()}{basis[1:]}."
        return Prediction(start_at=start_at, finish_at=finish_at, confidence=confidence, basis=sentence)

    def _at(self, seconds: float) -> datetime:
        # A `datetime` cannot be some thousand years ahead.
        return self._now + timedelta(seconds=min(seconds, 1e10))
