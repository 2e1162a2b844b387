"""Predictions for all pending and running runs, made together with a few short queries, at most once a second.

The order in the queue makes each depend on all before it, so predicting one run costs as much as predicting all.
Predictions are optional: no request waits for those that another one is making, and an error fails no response,
because they use a separate session.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.run_status import TERMINAL
from anneal.contracts.schemas.runs.reads import Confidence, Prediction
from app.config import Settings
from app.runs.queue.durations import Estimate
from app.runs.queue.fit import pause_reason, pending_reason
from app.runs.queue.forecast import PredictedStart, predict_starts
from app.runs.queue.policy import quota_holder, schedule
from app.runs.queue.snapshot import Forecast, read_forecast

log = logging.getLogger(__name__)

_SECONDS = 1.0
"""Minimum time from one forecast to the next."""
_MOST_SECONDS = 10.0
"""Timeout of a forecast, after which the request that makes it does without."""
_PAUSES = 5
"""Minimum pause before the next forecast, as a multiple of the last one's duration."""
_QUOTA = "it waits until the quota of its key or experiment has room, or the budget of its key is renewed"


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
            forecast = await read_forecast(session, self._settings, self._backends)
        # In a thread: a thousand pending runs take some tenths of a second, which must not block other requests.
        return await asyncio.to_thread(_Predictions(forecast).all) if forecast else {}


class _Predictions:
    """Predictions of all runs of a forecast, in the words of the API."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._now = forecast.now

    def all(self) -> dict[str, Prediction]:
        """Return the predictions by run."""
        forecast = self._forecast
        predictions = {
            run.id: self._prediction(run.started_at, forecast.ends[run.id], estimate.confidence, estimate.basis)
            for run in forecast.live
            if (estimate := forecast.estimates.get(run.id))
        }
        queue = forecast.snapshot()
        starts, plan = predict_starts(queue), schedule(queue)
        for run in queue.waiting:
            start, row = starts[run.run_id], forecast.pending[run.run_id]
            if not row.is_first:
                continue  # those before it are not all known
            if queue.fleet.pause is not None:
                basis = pause_reason(queue.fleet.pause).message.rstrip(".")
                predictions[run.run_id] = self._prediction(None, None, "low", basis)
                continue
            has_room = all(run.needs.devices <= forecast.rooms.get(quota, math.inf) for quota in run.quotas)
            has_room = has_room and quota_holder(run, queue, plan) is None
            if not has_room and math.isinf(start.start):
                predictions[run.run_id] = self._prediction(None, None, "low", _QUOTA)
                continue
            reason = pending_reason(run.needs, forecast.fleet)
            if reason is not None:
                predictions[run.run_id] = self._prediction(None, None, "low", reason.message.rstrip("."))
                continue
            estimate = forecast.estimate(row, start.worker.device) if start.worker and start.start < math.inf else None
            predictions[run.run_id] = self._pending(start, estimate, has_room)
        return predictions

    def _pending(self, start: PredictedStart, estimate: Estimate | None, has_room: bool) -> Prediction:
        runs = f"{start.runs_before} {'run is' if start.runs_before == 1 else 'runs are'} before it"
        ahead = _QUOTA if not has_room else runs if start.runs_before and start.start else "it is next"
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
