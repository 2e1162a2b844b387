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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.config import Settings
from app.contracts.run_status import LIVE, TERMINAL
from app.contracts.schemas.runs import Prediction
from app.contracts.training_config.field_traits import DURATION
from app.runs.scheduler import durations
from app.runs.scheduler.durations import Estimate, PastAttempt, Timings, TypicalDurations, Workload
from app.runs.scheduler.simulation import PendingRun, PredictedStart, WorkerSlots, simulate_queue
from app.tables.base import sql_list
from app.workers.queries import IS_FRESH, silence_seconds

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
    runs.id, runs.backend, runs.given, runs.dataset_id, runs.eval_dataset_id, runs.total_steps, runs.attempt,
    runs.started_at, runs.stop_mode, runs.stop_save_checkpoint, runs.current_step, runs.current_epoch,
    jsonb_build_object({_FIELDS}) AS config, datasets.rows, checkpoints.step AS resumed_at,
    coalesce(runs.checkpoint_step, 0) AS saved_at
"""
_WITH = """
    LEFT JOIN datasets ON datasets.id = runs.dataset_id
    LEFT JOIN checkpoints ON checkpoints.id = runs.resume_checkpoint_id
"""
_LIVE = text(f"""
    SELECT {_RUN}, paces.timings, paces.device,
        cast(extract(epoch FROM clock_timestamp() - runs.stop_requested_at) AS float) AS told_to_stop_ago,
        cast(extract(epoch FROM clock_timestamp() - paces.measured_at) AS float) AS ago,
        cast(extract(epoch FROM clock_timestamp() - run_attempts.started_at) AS float) AS claimed_ago
    FROM runs {_WITH}
    LEFT JOIN run_paces AS paces ON paces.run_id = runs.id AND paces.attempt = runs.attempt
    LEFT JOIN run_attempts ON run_attempts.run_id = runs.id AND run_attempts.attempt = runs.attempt
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
_WORKERS = text(f"""
    SELECT workers.id, workers.backends, min(devices.kind) AS kind, min(devices.name) AS device,
        coalesce(max(devices.memory_mb), 0) AS memory_mb, array_agg(devices.run_id ORDER BY devices.index) AS runs
    FROM workers JOIN devices ON devices.worker_id = workers.id
    WHERE workers.state = 'online' AND {IS_FRESH}
    GROUP BY workers.id ORDER BY workers.id
""")
# One attempt per run, the longest: a run that was lost or repaired many times must not dominate the history.
_PAST = text(f"""
    SELECT wanted.likeness, past.run_id, past.device, past.timings FROM unnest(cast(:likenesses AS text[]))
        AS wanted(likeness)
    CROSS JOIN LATERAL (
        SELECT DISTINCT ON (run_id) * FROM run_paces WHERE run_paces.likeness = wanted.likeness
        ORDER BY run_id DESC, cast(timings->'step' AS int) - cast(timings->'start_step' AS int) DESC LIMIT {_MOST_LIKE}
    ) AS past
""").bindparams(bindparam("likenesses"))
_NOW = text("SELECT clock_timestamp()")
_TIMINGS = {field.name for field in fields(Timings)}


class EtaService:
    """Newest predictions of this process."""

    def __init__(self, settings: Settings, backends: Sequence[str], sessions: async_sessionmaker[AsyncSession]) -> None:
        self._settings = settings
        self._backends = list(backends)
        self._sessions = sessions
        self._made_at = -math.inf
        self._took = 0.0
        self._found: Mapping[str, tuple[bool, Prediction | None]] = {}
        self._is_making = False
        self._has_failed = False
        self._logged: set[str] = set()
        """Runs whose failed prediction has been logged."""

    async def of(self, runs: Mapping[str, str]) -> dict[str, Prediction | None]:
        """Return the predictions of runs by id, given their statuses; runs that have ended have none."""
        if any(status not in TERMINAL for status in runs.values()):
            await self.renew()
        return self.newest(runs)

    def newest(self, runs: Mapping[str, str]) -> dict[str, Prediction | None]:
        """Return the same as `of`, without making new predictions."""
        waits = {id: status == "pending" for id, status in runs.items() if status not in TERMINAL}
        known = {id: self._found.get(id, (not is_pending, None)) for id, is_pending in waits.items()}
        return {id: found for id, (was_pending, found) in known.items() if was_pending == waits[id]}

    async def renew(self) -> None:
        """Make new predictions if it is time for that; after an error there are none until it works again."""
        age = time.monotonic() - self._made_at
        # Requests that arrive meanwhile use the last predictions: waiting, each would hold a connection.
        if self._is_making or age <= max(_SECONDS, self._took * _PAUSES):
            return
        self._is_making = True
        began = time.monotonic()
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                self._found, unreadable = await _forecast(self._sessions, self._settings, self._backends)
        except Exception:
            self._found = {}  # the last predictions are soon outdated
            if not self._has_failed:
                log.exception("cannot predict any run")
            self._has_failed = True
        else:
            self._has_failed = False
            for id in unreadable.keys() - self._logged:
                log.error("cannot predict %s", id, exc_info=unreadable[id])
            self._logged = set(unreadable)
        finally:
            self._made_at = time.monotonic()
            self._took = self._made_at - began
            self._is_making = False


async def _forecast(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, backends: Sequence[str]
) -> tuple[dict[str, tuple[bool, Prediction | None]], dict[str, Exception]]:
    """Return for each run whether it is pending and its prediction; and the errors of runs without one."""
    async with sessions() as session:
        now: datetime = (await session.execute(_NOW)).scalar_one()
        live = (await session.execute(_LIVE)).all()
        pending = (await session.execute(_PENDING, {"backends": list(backends)})).all()
        if not live and not pending:
            return {}, {}
        workers = (await session.execute(_WORKERS, {"silence": silence_seconds(settings.lease_seconds)})).all()
        wanted = {durations.similarity_key(run.backend, run.config) for run in (*live, *pending)}
        past = (await session.execute(_PAST, {"likenesses": sorted(wanted)})).all()
    # In a thread: a thousand pending runs take some tenths of a second, which must not block other requests.
    forecast = _Forecast(now, past, settings.save_grace_seconds)
    return await asyncio.to_thread(forecast.of, live, pending, workers), forecast.unreadable


@dataclass(frozen=True)
class _Task:
    likeness: str
    task: Workload

    @classmethod
    def of(cls, run: Any, at: int | None = None) -> "_Task":
        """Build the task of a run; `at` is the step that it has reached, if it is training."""
        datasets, first = (run.dataset_id, run.eval_dataset_id), run.resumed_at or 0
        wanted = durations.task(
            run.backend, run.config, run.given, run.rows, datasets,
            first_step=first, next_step=run.saved_at, told_steps=run.total_steps,
        )  # fmt: skip
        if run.stop_mode == "epoch_end":
            reached = wanted.next_step if at is None else at
            end = durations.epoch_end(reached, run.current_step, run.current_epoch)
            known = [step for step in (end, wanted.total_steps) if step is not None]
            wanted = replace(wanted, total_steps=min(known) if end is not None else None, ends_with_epoch=True)
        return cls(durations.similarity_key(run.backend, run.config), wanted)


class _Forecast:
    def __init__(self, now: datetime, past: Sequence[Any], grace_seconds: float) -> None:
        self._now = now
        self._grace = grace_seconds
        self._past: dict[str, list[tuple[str, PastAttempt]]] = defaultdict(list)
        for one in past:
            self._past[one.likeness].append((one.run_id, PastAttempt(_timings(one.timings), one.device)))
        self._habits: dict[tuple[Any, ...], TypicalDurations | None] = {}
        self.unreadable: dict[str, Exception] = {}
        """Errors, by the id of the run."""

    def of(
        self, live: Sequence[Any], pending: Sequence[Any], workers: Sequence[Any]
    ) -> dict[str, tuple[bool, Prediction | None]]:
        found: dict[str, tuple[bool, Prediction | None]] = {}
        ends: dict[str, float] = {}
        for run in live:
            if run.told_to_stop_ago is not None:
                ends[run.id] = self._stopping(run)
                found[run.id] = (False, None)
                continue
            estimate = self._guarded(run, partial(self._running, run))
            if estimate is not None:
                ends[run.id] = estimate.seconds
            found[run.id] = (False, self._predicted(run.started_at, estimate))
        places = [
            WorkerSlots(
                one.id, frozenset(one.backends), one.kind, one.device, one.memory_mb,
                tuple(0.0 if run is None else ends.get(run, math.inf) for run in one.runs),
            )
            for one in workers
        ]  # fmt: skip
        rows = {run.id: run for run in pending}
        times: dict[str, Estimate | None] = {}

        def seconds(one: PendingRun, worker: WorkerSlots) -> float:
            run = rows[one.run_id]
            estimate = times[run.id] = self._guarded(run, partial(self._whole, run, worker.device))
            return estimate.seconds if estimate else math.inf

        queue = [_waiting(run) for run in pending]
        starts = simulate_queue(places, queue, seconds)
        for one in queue:
            found[one.run_id] = (True, self._waits(one, starts[one.run_id], times.get(one.run_id)))
        return found

    def _guarded(self, run: Any, make: Callable[[], Estimate | None]) -> Estimate | None:
        """Return the estimate of a run; on any error, record it and return None."""
        try:
            return make()
        except Exception as error:
            self.unreadable[run.id] = error
            return None

    def _running(self, run: Any) -> Estimate | None:
        """Estimate the seconds from now to the end of a run."""
        if run.timings is None:  # no step yet
            estimate, ago = self._whole(run, None), run.claimed_ago or 0.0
        else:
            timings = _timings(run.timings)
            wanted = _Task.of(run, timings.step)
            estimate = durations.estimate_remaining(wanted.task, timings, self._habit(wanted, run.device, run.id))
            ago = run.ago
        if estimate is None:
            return None
        return Estimate(max(estimate.seconds - ago, 0.0), estimate.confidence, estimate.basis)

    def _stopping(self, run: Any) -> float:
        """Return the most seconds until the end of a run with a request to stop at once."""
        saves = run.stop_save_checkpoint or run.stop_mode == "best"
        return max(self._grace - run.told_to_stop_ago, 0.0) if saves else 0.0

    def _whole(self, run: Any, device: str | None) -> Estimate | None:
        """Estimate the seconds from the claim to the end of a run."""
        wanted = _Task.of(run)
        return durations.estimate_total(wanted.task, self._habit(wanted, device, run.id))

    def _waits(self, one: PendingRun, turn: PredictedStart, estimate: Estimate | None) -> Prediction | None:
        if turn.seat is None:
            return Prediction(start_at=None, finish_at=None, confidence="low", basis=_no_worker(one))
        if one.run_id in self.unreadable:
            return None
        before = f"{turn.before} {'run is' if turn.before == 1 else 'runs are'} before it"
        ahead = before if turn.before else "it is next"
        if math.isinf(turn.start):
            why = (
                f"{ahead}, and it is unknown when a device is free, because the duration of a run before it is unknown"
            )
            return Prediction(start_at=None, finish_at=None, confidence="low", basis=_sentence(why))
        if estimate is None:
            why = f"{ahead}; no similar run has trained yet, so its duration is unknown"
            return Prediction(start_at=self._at(turn.start), finish_at=None, confidence="low", basis=_sentence(why))
        # The durations of the runs before it are less certain than its own.
        confidence = estimate.confidence if turn.start == 0 else "low"
        return Prediction(
            start_at=self._at(turn.start),
            finish_at=self._at(turn.start + estimate.seconds),
            confidence=confidence,
            basis=_sentence(f"{ahead}; {estimate.basis}"),
        )

    def _habit(self, wanted: _Task, device: str | None, run_id: str) -> TypicalDurations | None:
        past = self._past[wanted.likeness]
        if any(id == run_id for id, _ in past):  # its own steps are not history
            return durations.typical_durations([one for id, one in past if id != run_id], wanted.task, device)
        key = (wanted.likeness, wanted.task.twin, wanted.task.work, device)
        if key not in self._habits:
            self._habits[key] = durations.typical_durations([one for _, one in past], wanted.task, device)
        return self._habits[key]

    def _predicted(self, started_at: datetime, estimate: Estimate | None) -> Prediction | None:
        if estimate is None:
            return None
        return Prediction(
            start_at=started_at,
            finish_at=self._at(estimate.seconds),
            confidence=estimate.confidence,
            basis=_sentence(estimate.basis),
        )

    def _at(self, seconds: float) -> datetime:
        # A `datetime` cannot be some thousand years ahead.
        return self._now + timedelta(seconds=min(seconds, 1e10))


def _timings(stored: Mapping[str, Any]) -> Timings:
    # Another version may have stored more fields.
    return Timings(**{name: value for name, value in stored.items() if name in _TIMINGS})


def _waiting(run: Any) -> PendingRun:
    needs = run.requirements or {}
    return PendingRun(
        run.id, run.backend, needs.get("kind"), needs.get("memory_mb") or 0, run.devices_needed, max(run.wait, 0.0)
    )


def _no_worker(one: PendingRun) -> str:
    wants = f"{one.devices} free device{'s' if one.devices > 1 else ''}"
    kind = f" of kind `{one.kind}`" if one.kind else ""
    memory = f" with {one.memory_mb:,} MB" if one.memory_mb else ""
    return f"No online worker has backend `{one.backend}` and {wants}{kind}{memory}: the run starts once one does."


def _sentence(basis: str) -> str:
    return f"{basis[:1].upper()}{basis[1:]}."
