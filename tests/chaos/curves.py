"""Query for metric rollups that differ from the event log (promise 5, for curves).

Sound: both are written in one transaction, and the history is collected after everything has ended.
"""

MISMATCHES = """
    WITH told AS (
        SELECT run_id, attempt, type AS kind, count(*) AS points, max(seq) AS last_seq FROM run_events
        WHERE run_id = ANY(:ids) AND type IN ('metric', 'eval') GROUP BY run_id, attempt, type
    ), rolled AS (
        SELECT run_id, attempt, kind, level, sum(points) AS points, max(last_seq) AS last_seq FROM metric_rollups
        WHERE run_id = ANY(:ids) GROUP BY run_id, attempt, kind, level
    )
    SELECT run_id, attempt, kind, level, told.points AS stored, rolled.points AS rolled,
        told.last_seq, rolled.last_seq AS rolled_seq
    FROM (SELECT told.*, level FROM told CROSS JOIN (VALUES (0), (1)) AS every(level)) AS told
    FULL JOIN (SELECT * FROM rolled WHERE level IN (0, 1)) AS rolled USING (run_id, attempt, kind, level)
    WHERE (told.points, told.last_seq) IS DISTINCT FROM (rolled.points, rolled.last_seq)
"""
