"""Outbox of webhooks: the rows of `webhook_deliveries`, made from the queue of the event feed.

The transaction that stores an event also queues it for the feed (a trigger of `run_events`), whether or not there are
webhooks, so writers of events do nothing for webhooks. The statement that takes an event from that queue to number it
also inserts its deliveries: either both are committed or neither is, and an event that is still queued gets them in the
next round. So a process that is killed between the commit of an event and its sending loses nothing.
"""


def _utc(column: str) -> str:
    return f"""to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


NEW_DELIVERY_ID = (
    "('whd_' || lpad(to_hex(CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)), 14, '0')"
    " || substr(replace(CAST(gen_random_uuid() AS text), '-', ''), 1, 12))"
)
"""SQL expression for an id that sorts by time of creation: microseconds and 48 random bits."""

_RUN = f"""json_build_object(
    'id', r.id, 'name', r.name, 'experiment_id', r.experiment_id, 'tags', r.tags, 'task', r.task,
    'method', r.method, 'base_model', r.base_model, 'status', r.status, 'attempt', r.attempt,
    'current_step', r.current_step, 'total_steps', r.total_steps, 'best_loss', r.best_loss,
    'end_reason', r.end_reason, 'error_code', r.error_code, 'error_message', r.error_message,
    'started_at', {_utc("r.started_at")}, 'finished_at', {_utc("r.finished_at")}
)"""

# A stop that saves pauses a job, which is no end of it. Probes are no jobs.
_TYPE = """CASE
        WHEN w.format <> 'openai' THEN e.type
        WHEN e.type = 'end' AND r.task = 'train' AND r.config #>> '{extra,probe}' IS DISTINCT FROM 'true' THEN
            CASE e.data ->> 'status'
                WHEN 'completed' THEN 'fine_tuning.job.succeeded'
                WHEN 'failed' THEN 'fine_tuning.job.failed'
                WHEN 'cancelled' THEN CASE WHEN r.stop_mode = 'discard' THEN 'fine_tuning.job.cancelled' END
            END
    END"""
_JOB = "json_build_object('id', 'ftjob-' || substr(coalesce(r.job_run_id, r.id), length('run_') + 1))"
_MATCHES = """coalesce(r.experiment_id = w.filter ->> 'experiment_id', true)
        AND coalesce(r.base_model = w.filter ->> 'base_model', true)
        AND coalesce(r.task = w.filter ->> 'task', true)
        AND coalesce(jsonb_exists(r.tags, w.filter ->> 'tag'), true)"""

# Without enabled webhooks, the first condition ends the statement before it joins anything. The second one leaves out
# the history of imported runs; the clocks of workers may be behind.
ENQUEUE_TAKEN = f"""
    INSERT INTO webhook_deliveries (id, webhook_id, type, run_id, seq, ts, event, run)
    SELECT {NEW_DELIVERY_ID}, w.id, {_TYPE}, e.run_id, e.seq, e.ts,
        CASE w.format WHEN 'openai' THEN {_JOB} ELSE e.data END, {_RUN}
    FROM (SELECT * FROM taken ORDER BY position) AS taken
    JOIN run_events AS e USING (run_id, seq) JOIN runs AS r ON r.id = e.run_id
    JOIN webhooks AS w ON w.enabled AND {_TYPE} = ANY (w.types)
    WHERE EXISTS (SELECT FROM webhooks WHERE enabled)
        AND e.ts > w.created_at - interval '1 hour'
        AND {_MATCHES}
        AND coalesce(jsonb_exists(w.filter -> 'status',
            CASE e.type WHEN 'end' THEN e.data ->> 'status' WHEN 'status' THEN e.data ->> 'to' ELSE r.status END), true)
"""
"""SQL that inserts the deliveries of the events in `taken` (position, run_id, seq), a common table expression."""

ENQUEUE_CANCELLED_JOB = f"""
    INSERT INTO webhook_deliveries (id, webhook_id, type, run_id, ts, event, run)
    SELECT {NEW_DELIVERY_ID}, w.id, 'fine_tuning.job.cancelled', r.id, clock_timestamp(), {_JOB}, {_RUN}
    FROM runs AS r
    JOIN webhooks AS w ON w.enabled AND w.format = 'openai' AND 'fine_tuning.job.cancelled' = ANY (w.types)
    WHERE r.id = :run_id AND {_MATCHES} AND coalesce(jsonb_exists(w.filter -> 'status', r.status), true)
"""
"""SQL that inserts the deliveries of a paused job that is cancelled, whose run has ended before."""

ENQUEUE_DELETED = f"""
    WITH waiting AS (
        SELECT position FROM event_feed_queue WHERE run_id IN (SELECT run_id FROM run_deletions)
        FOR UPDATE SKIP LOCKED
    ), taken AS (
        DELETE FROM event_feed_queue WHERE position IN (SELECT position FROM waiting)
        RETURNING position, run_id, seq
    )
    {ENQUEUE_TAKEN}
"""
"""SQL that inserts the deliveries of runs that are about to be deleted, of events which the feed has not numbered.

It leaves out those that a round is just numbering, with their deliveries: to wait for them could be a deadlock.
"""
