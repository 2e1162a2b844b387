"""Jobs of a Ray cluster for pending runs of backend `ray`: submits, explains and stops them, in a loop of the API.

A job starts a worker for one run (`worker.ray_node`). Ray places it; only the claim in PostgreSQL decides who trains.
The id of a job has the lease epoch of the pending run, which each claim and each loss raises. So a job that may have
been submitted is looked up by its id, and never submitted twice.
"""

import asyncio
import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Executable, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from anneal.contracts.run_status import LIVE
from anneal.contracts.schemas.runs.placement import PendingReason
from app.backends import ray_reasons
from app.backends.ray_api import Job, Node, RayApi, RayError, RayUnreachable
from app.config import Settings
from app.infra import async_tasks
from app.infra.broker import Broker
from app.infra.db import is_away
from app.runs.queue.fit import kept_quota_reason, pause_reason, reason_of_quota
from app.runs.queue.fleet import read_pause
from app.runs.queue.holds_table import read_quota_holds
from app.runs.queue.order import JOIN_ROOM, OWNER, OWNERS_ORDER, QUEUE_ORDER, WITH_ROOM
from app.runs.queue.policy import OrderKey, QuotaHold
from app.runs.state import machine

log = logging.getLogger(__name__)

_LOCK = 0x726179  # "ray": one replica at a time does a round, no matter which
_SECONDS = 2.0
"""Time from one round to the next, unless a run was created or stopped."""
_SECONDS_WITHOUT_CLUSTER = 30.0
_REASONS_A_ROUND = 200
_ROUND_SECONDS = 30.0
"""Most time of a round: its transaction, which has the lock, may be idle for a minute."""
_PLACING = ("ray_placing", "ray_no_node")
_MOST_WAITING = 16
"""Jobs that wait for the cluster at a time: each takes memory of its head, and Ray does not know priorities."""
_MOST_ALIKE = 4
"""Of these, jobs of one owner that need the same devices: if Ray cannot place the first, it cannot place the next."""
_TURN_SECONDS = 300.0
"""Time after which a job that waits gives its place up for as long; an autoscaler can add a node meanwhile."""
_RETRY_SECONDS = 10.0
"""Pause after a first failed job; it doubles with each further one."""
_LATER_SECONDS = 30.0
"""Pause after a job that ended without a failure of its own; it doubles with each further one, up to the next limit."""
_MOST_LATER_SECONDS = 900.0
_MOST_DOUBLINGS = 5
"""Doublings that reach this limit. Without a bound, the power overflows after weeks of tries."""
_LONG_SECONDS = 1800.0
"""Time after which the end of a job is no quick one, so that the pause is the first one again."""
_END_SECONDS = 15.0
"""Time that a worker has to end by itself after its run has left it."""
_LOST_SECONDS = 60.0
"""Time for which a job that Ray does not have is looked for: a submission without a response may come late."""
_EXTRA_SECONDS = 15
"""Time that a job has after the save grace of its trainer: for the worker and for the driver."""

_MAY_DO_A_ROUND = text("""
    SELECT (EXISTS (SELECT FROM ray_jobs) OR EXISTS (SELECT FROM runs WHERE status = 'pending' AND backend = 'ray'))
        AND pg_try_advisory_xact_lock(:key)
""")
# First those that could get a job: of an owner that need the same, thousands would hide the runs behind them.
_PENDING = text(f"""
    {WITH_ROOM}, due AS (
        SELECT runs.id, runs.priority, owners.used, jobs.added_at,
            row_number() OVER (
                PARTITION BY owners.owner, devices_needed, requirements -> 'kind', requirements -> 'labels'
                ORDER BY {OWNERS_ORDER}
            ) AS place
        FROM runs JOIN owners ON owners.owner = {OWNER}
            LEFT JOIN ray_jobs AS jobs ON jobs.run_id = runs.id AND jobs.lease_epoch = runs.lease_epoch
        WHERE runs.status = 'pending' AND runs.backend = 'ray' AND runs.not_before <= clock_timestamp()
    ), chosen AS (
        SELECT id, added_at FROM due
        ORDER BY added_at IS NULL, place > {_MOST_ALIKE}, priority DESC, used, id LIMIT 1000
    )
    SELECT runs.id AS run_id, runs.lease_epoch, owners.owner, runs.experiment_id,
        runs.priority, runs.devices_needed, runs.requirements, runs.pending_reason,
        chosen.added_at IS NOT NULL AS has_job,
        extract(epoch FROM clock_timestamp() - chosen.added_at) AS waits,
        owners.room AS key_room, owners.max_devices AS key_devices, owners.spent_budget AS key_spent_budget,
        limited.room AS experiment_room, limited.max_devices AS experiment_devices, limited.name AS experiment_name,
        owners.used
    FROM chosen JOIN runs ON runs.id = chosen.id {JOIN_ROOM}
    ORDER BY has_job DESC, {QUEUE_ORDER}
""")
_ADD = text("""
    INSERT INTO ray_jobs (run_id, lease_epoch) VALUES (:run_id, :lease_epoch)
    ON CONFLICT (run_id, lease_epoch) DO UPDATE SET added_at = coalesce(ray_jobs.added_at, clock_timestamp())
""")
_PAUSE = text("INSERT INTO ray_jobs (run_id, lease_epoch, added_at, tries) VALUES (:run_id, :epoch, NULL, :tries)")
_FORGET = text("""
    DELETE FROM ray_jobs AS jobs WHERE jobs.added_at IS NULL AND NOT EXISTS (
        SELECT FROM runs
        WHERE runs.id = jobs.run_id AND runs.lease_epoch = jobs.lease_epoch AND runs.status = 'pending'
    )
""")
_JOBS = text("""
    SELECT jobs.run_id, jobs.lease_epoch, runs.status, runs.lease_epoch AS current_epoch, runs.devices_needed,
        runs.requirements, runs.pending_reason, jobs.tries,
        extract(epoch FROM clock_timestamp() - jobs.added_at) AS age,
        extract(epoch FROM clock_timestamp() - jobs.left_at) AS left_ago
    FROM ray_jobs AS jobs LEFT JOIN runs ON runs.id = jobs.run_id
    WHERE jobs.added_at IS NOT NULL
    ORDER BY jobs.left_at NULLS FIRST, jobs.run_id
""")
_LEAVE = text(
    "UPDATE ray_jobs SET left_at = coalesce(left_at, clock_timestamp()) WHERE run_id = :run_id AND lease_epoch = :epoch"
)
_DELETE = text("DELETE FROM ray_jobs WHERE run_id = :run_id AND lease_epoch = :epoch")


class RayJobs:
    """Loop of an API process; of all replicas, the one that gets the advisory lock does the round."""

    def __init__(self, engine: AsyncEngine, queue: Broker, settings: Settings) -> None:
        """Create the loop; `engine` is its own, because a round waits for the cluster with a connection in use."""
        self._engine = engine
        self._queue = queue
        self._settings = settings
        self._api = RayApi(settings.ray_url, settings.ray_token) if settings.ray_url else None
        self._task: asyncio.Task[None] | None = None
        self._round_requested = asyncio.Event()
        self._trouble: str | None = None
        self._nodes: list[Node] | None = None
        """Nodes of the cluster when they were last known."""
        self._stopped_at: tuple[str, int] | None = None
        """Job at which the last round ran out of time."""

    async def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.create_task(self._run_rounds(), name="ray jobs")

    async def stop(self) -> None:
        """Stop the loop; jobs go on."""
        if self._task:
            await async_tasks.cancel_and_wait(self._task)
        if self._api:
            await self._api.close()

    def start_round(self) -> None:
        """Begin the next round now."""
        self._round_requested.set()

    async def _run_rounds(self) -> None:
        while True:
            self._round_requested.clear()
            try:
                await self.do_round()
            except Exception as error:  # without this loop no run of the cluster would start again
                if not is_away(error) and not isinstance(error, OSError):  # the dispatcher reports those
                    log.exception("ray: a round failed")
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._round_requested.wait(), _SECONDS if self._api else _SECONDS_WITHOUT_CLUSTER
                )

    async def do_round(self) -> None:
        """Do one round, unless nothing is to be done or another replica is doing one."""
        async with self._engine.begin() as lock:
            if await lock.scalar(_MAY_DO_A_ROUND, {"key": _LOCK}):
                await self._choose_runs()
                await self._settle_all()

    async def _choose_runs(self) -> None:
        """Note the next pending runs for which jobs are to be submitted; explain why the others wait."""
        async with self._engine.begin() as connection:
            await connection.execute(_FORGET)
            rows = (await connection.execute(_PENDING)).all()
            quota_holds = await connection.run_sync(read_quota_holds)
            waiting = [SimpleNamespace(**row._mapping, kept=_kept_quotas(row, quota_holds)) for row in rows]
            held = [run for run in waiting if run.has_job]
            reasons: list[tuple[Any, PendingReason]] = []
            if (pause := await read_pause(connection)) is not None:
                for job in held:
                    await self._withdraw_job(connection, job, "is withdrawn, since the queue is paused", 0.0)
                reasons = [(run, pause_reason(pause)) for run in waiting]
                held, waiting = [], []
            for run in waiting[len(held) :]:
                leaving, reason = ([], ray_reasons.not_configured()) if self._api is None else _make_room(held, run)
                if reason is not None:
                    reasons.append((run, reason))
                    continue
                for job in leaving:
                    why = f"gives its place to {run.run_id}, since Ray has not placed it"
                    pause_seconds = 0.0 if job.priority < run.priority else _TURN_SECONDS
                    await self._withdraw_job(connection, job, why, pause_seconds)
                    held.remove(job)
                    reasons.append((job, _queued_reason()))
                await connection.execute(_ADD, {"run_id": run.run_id, "lease_epoch": run.lease_epoch})
                held.append(run)
        await self._store_reasons(reasons)

    async def _withdraw_job(self, connection: AsyncConnection, job: Any, why: str, pause_seconds: float) -> None:
        """Requeue a run whose job is not placed; a later step of the round stops that job."""
        reason = f"Ray job {_job_id(job)} {why}"
        requeue = machine.requeue_unclaimed(job.run_id, job.lease_epoch, reason, pause_seconds, counted=False)
        if (await connection.execute(requeue)).one_or_none() is not None:
            log.info("%s", reason, extra={"run_id": job.run_id})

    async def _settle_all(self) -> None:
        async with self._engine.begin() as connection:
            jobs = (await connection.execute(_JOBS)).all()
        if self._api is None:
            await self._store_reasons([(job, ray_reasons.not_configured()) for job in jobs if _is_waiting(job)])
            return
        jobs = self._from_where_the_last_round_stopped(jobs)
        settled: dict[tuple[str, int], PendingReason | None] = {}
        trouble: RayError | None = None
        current, responds = None, False
        try:
            async with asyncio.timeout(_ROUND_SECONDS):
                for job in jobs:
                    current = _lease_key(job)
                    try:
                        settled[current] = await self._settle_job(self._api, job)
                        responds = True
                    except RayUnreachable:
                        raise
                    except RayError as error:  # the next job may have more luck: only some calls need the head's agent
                        trouble = error
                        settled[current] = ray_reasons.unreachable_reason(error) if _is_waiting(job) else None
                    except Exception as error:
                        if is_away(error):
                            raise
                        log.exception("ray: job %s cannot be settled, trying again", _job_id(job))
                        settled[current] = None
                placing = [job for job in jobs if (why := settled[_lease_key(job)]) and why.code in _PLACING]
                if placing and trouble is None:
                    await self._look_at_nodes(self._api)
                    settled |= {
                        _lease_key(job): ray_reasons.placing_reason(job, _job_id(job), self._nodes) for job in placing
                    }
        except RayUnreachable as error:
            trouble, responds = error, False
        except TimeoutError:
            trouble = trouble or RayError("it takes too long")
            self._stopped_at = current
        if trouble is not None and not responds:  # then the jobs that were not reached wait for the same reason
            reason = ray_reasons.unreachable_reason(trouble)
            settled = {_lease_key(job): settled.get(_lease_key(job), reason) for job in jobs if _is_waiting(job)}
        self._report_trouble(None if trouble is None else f"{self._api.url} does not respond: {trouble}")
        await self._store_reasons([(job, why) for job in jobs if (why := settled.get(_lease_key(job))) is not None])

    async def _look_at_nodes(self, api: RayApi) -> None:
        """Look at what the cluster has, which only explains why a job waits: without it, that is as it was."""
        try:
            self._nodes = await api.list_nodes()
        except RayError as error:
            log.debug("ray: the nodes are not known: %s", error)

    def _from_where_the_last_round_stopped(self, jobs: Sequence[Any]) -> Sequence[Any]:
        """Return the jobs in an order in which those come first that the last round has not reached."""
        keys = [_lease_key(job) for job in jobs]
        first = keys.index(self._stopped_at) + 1 if self._stopped_at in keys else 0
        self._stopped_at = None
        return [*jobs[first:], *jobs[:first]]

    async def _settle_job(self, api: RayApi, job: Any) -> PendingReason | None:
        """Submit the job of a run that waits for it, stop that of one that needs it no more; return why a run waits."""
        if _is_claimed(job):
            return None
        job_id = _job_id(job)
        ray_job = await api.get_job(job_id)
        if not _is_waiting(job):
            await self._stop_job(api, job, job_id, ray_job)
            return None
        if ray_job is None:
            await api.submit_job(job_id, _build_entrypoint(job), self._job_environment())
            log.info("ray: job %s is submitted", job_id, extra={"run_id": job.run_id})
        elif ray_job.has_ended:
            return await self._requeue_run(job, job_id, ray_job)
        return ray_reasons.placing_reason(job, job_id, self._nodes)

    async def _stop_job(self, api: RayApi, job: Any, job_id: str, ray_job: Job | None) -> None:
        """Let a worker that has had the run end by itself, then stop the job; a job without a claim at once."""
        key = {"run_id": job.run_id, "epoch": job.lease_epoch}
        if ray_job is None and (job.left_ago or 0) < _LOST_SECONDS:
            await self._execute_statement(_LEAVE, key)  # Ray may still execute a submission whose response was lost
            return
        if ray_job is None or ray_job.has_ended:
            await self._execute_statement(_DELETE, key)
            return
        was_claimed = job.current_epoch is not None and job.current_epoch > job.lease_epoch
        if job.left_ago is None:
            await self._execute_statement(_LEAVE, key)
        if not was_claimed or (job.left_ago or 0) > _END_SECONDS:
            await api.stop_job(job_id)

    async def _requeue_run(self, job: Any, job_id: str, ray_job: Job) -> PendingReason | None:
        """Requeue a run whose job has ended without a claim, and return why it waits; too many failures fail it."""
        why = ray_job.last_line or f"it is {ray_job.status}, and no worker has claimed the run"
        reason = f"Ray job {job_id} ended before a worker claimed the run: {why}"
        tries = 0 if job.age > _LONG_SECONDS else job.tries
        later = min(_LATER_SECONDS * 2 ** min(tries, _MOST_DOUBLINGS), _MOST_LATER_SECONDS)
        pause = _RETRY_SECONDS if ray_job.has_failed else later
        async with self._engine.begin() as connection:
            requeue = machine.requeue_unclaimed(job.run_id, job.lease_epoch, reason, pause, counted=ray_job.has_failed)
            row = (await connection.execute(requeue)).mappings().one_or_none()
            await connection.execute(_DELETE, {"run_id": job.run_id, "epoch": job.lease_epoch})
            if row is not None and row["status"] == "pending" and not ray_job.has_failed:
                pausing = {"run_id": job.run_id, "epoch": row["lease_epoch"], "tries": tries + 1}
                await connection.execute(_PAUSE, pausing)
        if row is None:
            return None  # claimed or stopped meanwhile
        log.warning("run %s: %s; the run is now %s", job.run_id, reason, row["status"], extra={"run_id": job.run_id})
        await self._queue.wake_streams(job.run_id)
        if row["status"] != "pending":
            return None
        losses = (row["lost_count"], row["max_restarts"]) if ray_job.has_failed else None
        return ray_reasons.failed_reason(job_id, why, row["not_before"].astimezone(UTC), losses)

    async def _store_reasons(self, reasons: Sequence[tuple[Any, PendingReason]]) -> None:
        """Store the reasons that are new, each with an event."""
        changed = [(run, reason) for run, reason in reasons if reason.model_dump() != run.pending_reason]
        for run, reason in changed[:_REASONS_A_ROUND]:
            await self._execute_statement(machine.report_pending_reason(run.run_id, reason))
            await self._queue.wake_streams(run.run_id)

    async def _execute_statement(self, statement: Executable, parameters: dict[str, Any] | None = None) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(statement, parameters)

    def _report_trouble(self, trouble: str | None) -> None:
        """Log that the cluster does not respond, and that it does again."""
        if trouble is not None and self._trouble is None:
            log.warning("ray: %s; runs wait", trouble)
        elif trouble is None and self._trouble is not None:
            log.info("ray: the cluster responds again")
        self._trouble = trouble

    def _job_environment(self) -> dict[str, str]:
        """Return variables of a job: none of them is a secret."""
        # Ray kills a stopped job after 3 seconds by default, in which a trainer cannot save.
        return {"RAY_JOB_STOP_WAIT_TIME_S": str(round(self._settings.save_grace_seconds) + _EXTRA_SECONDS)}


def _lease_key(job: Any) -> tuple[str, int]:
    return job.run_id, job.lease_epoch


def _job_id(run: Any) -> str:
    return f"anneal-{run.run_id}-{run.lease_epoch}"


def _ray_shape(run: Any) -> tuple[Any, ...]:
    """Return what matters for Ray, with the owner."""
    return run.owner, run.devices_needed, ray_reasons.kind_of(run), tuple(ray_reasons.labels_of(run))


def _kept_quotas(run: Any, quota_holds: Mapping[str, tuple[OrderKey, QuotaHold]]) -> dict[str, tuple[str, int]]:
    """Return the quotas that earlier runs hold, each with that run and the devices that it leaves."""
    place: OrderKey = (-run.priority, run.used, run.run_id)
    return {
        quota: (hold.run.run_id, hold.spare)
        for quota, (holder_place, hold) in quota_holds.items()
        if quota in (run.owner, run.experiment_id) and holder_place < place
    }


def _quota_reason(held: Sequence[Any], run: Any) -> PendingReason | None:
    """Return why the quotas of a run, of which the jobs that are `held` take their devices too, leave it no room."""
    of_key = sum(one.devices_needed for one in held if one.owner == run.owner)
    of_experiment = sum(one.devices_needed for one in held if one.experiment_id == run.experiment_id)
    if (reason := reason_of_quota(run, of_key, of_experiment)) is not None:
        return reason
    for quota, (first, spare) in run.kept.items():
        taken = sum(one.devices_needed for one in held if quota in one.kept)
        if run.devices_needed > spare - taken:
            return kept_quota_reason(first)
    return None


def _make_room(held: Sequence[Any], run: Any) -> tuple[list[Any], PendingReason | None]:
    """Return the jobs to withdraw for that of `run`, or the reason why it waits all the same."""
    reason = _quota_reason(held, run)
    if reason is None:
        last = _without_place(held, run)
        if last is None:
            return [], None
        return ([last], None) if _gives_way(last, run) else ([], _queued_reason())
    leaving: list[Any] = []
    for job in sorted((one for one in held if _gives_way(one, run)), key=_withdrawal_order):
        leaving.append(job)
        if _has_quota(held, leaving, run):
            break
    else:
        return [], reason
    for job in list(leaving):  # those of other quotas, and those that later ones have made superfluous
        if _has_quota(held, others := _without_leaving(leaving, [job]), run):
            leaving = others
    return leaving, None if _without_place(_without_leaving(held, leaving), run) is None else _queued_reason()


def _has_quota(held: Sequence[Any], leaving: Sequence[Any], run: Any) -> bool:
    return _quota_reason(_without_leaving(held, leaving), run) is None


def _without_leaving(held: Sequence[Any], leaving: Sequence[Any]) -> list[Any]:
    return [one for one in held if all(one is not other for other in leaving)]


def _without_place(held: Sequence[Any], run: Any) -> Any | None:
    """Return the job that would have to be withdrawn for that of `run`; None if there is a free place."""
    alike = [one for one in held if _ray_shape(one) == _ray_shape(run)]
    rivals = alike if len(alike) >= _MOST_ALIKE else held if len(held) >= _MOST_WAITING else []
    # Those of this round have no time yet.
    old = [one for one in rivals if one.waits is not None and one.waits > _TURN_SECONDS]
    return min(old if old and rivals is held else rivals, key=_withdrawal_order, default=None)


def _withdrawal_order(job: Any) -> tuple[int, float]:
    """Return the place of a job that waits: the first is withdrawn first."""
    return job.priority, -(job.waits or 0)


def _gives_way(last: Any, run: Any) -> bool:
    """Return True if a job that waits is to be withdrawn for another: the lowest, or one that has had its turn."""
    if last.waits is None:
        return False
    return last.priority < run.priority or (last.waits > _TURN_SECONDS and _ray_shape(last) != _ray_shape(run))


def _is_waiting(job: Any) -> bool:
    return bool(job.status == "pending" and job.current_epoch == job.lease_epoch)


def _is_claimed(job: Any) -> bool:
    """Return True if the worker of this job trains the run, whatever Ray believes about the job."""
    return job.status in LIVE and job.current_epoch == job.lease_epoch + 1


def _build_entrypoint(job: Any) -> str:
    options = {"--devices": str(job.devices_needed), "--kind": ray_reasons.kind_of(job)}
    words = [word for option in options.items() for word in option]
    words += [word for label in ray_reasons.labels_of(job) for word in ("--label", label)]
    return shlex.join(["python", "-m", "worker.ray_node", job.run_id, str(job.lease_epoch), *words])


def _queued_reason() -> PendingReason:
    return ray_reasons.queued_reason(_MOST_WAITING, _MOST_ALIKE, _TURN_SECONDS)
