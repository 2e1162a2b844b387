"""Mutants of storing events and delivering them to readers."""

from tests.mutants.mutant import Change, Mutant

_LOG = "app/runs/events/log.py"
_STREAM = "app/runs/events/stream.py"
_APPENDS = "tests/app/runs/events/test_log.py"
_ORDER = "tests/app/runs/events/test_log_order.py"

MUTANTS = (
    Mutant(
        name="append-without-epoch",
        promises=(4,),
        about="Any writer with the next sequence number may append, even a worker that has lost the run.",
        changes=(
            Change(
                _LOG,
                "        WHERE id = :id AND lease_epoch = :lease_epoch AND status IN (",
                "        WHERE id = :id AND status IN (",
            ),
        ),
        test=f"{_ORDER}::test_a_stale_worker_writes_nothing_into_the_attempt_that_followed",
    ),
    Mutant(
        name="numbers-outside-the-lock",
        promises=(5,),
        about="Sequence numbers are allocated without the row lock, so a later number can commit first.",
        changes=(
            Change(
                _LOG,
                "    ), stored AS (\n",
                '    ) SELECT seq_before FROM reserved\n    """\n)\n_INSERT = text(\n    """\n    WITH reserved AS (\n'
                "        SELECT event_seq - :n AS seq_before, attempt FROM runs WHERE id = :id\n    ), stored AS (\n",
            ),
            Change(
                _LOG,
                "    seq_before: int | None = connection.scalar(_STORE, values)\n",
                "    seq_before = connection.scalar(_STORE, values)\n"
                "    connection.connection.driver_connection.commit()\n"
                "    seq_before = connection.scalar(_INSERT, values)\n",
            ),
        ),
        test=f"{_ORDER}::test_numbers_are_committed_in_their_order_so_a_reader_never_finds_a_smaller_one_later",
    ),
    Mutant(
        name="resend-counts-as-stored",
        promises=(5, 7),
        about="A resent batch counts as already stored, including the events added to it.",
        changes=(Change(_LOG, "new = new[stored - first + 1 :]", "new = []"),),
        test=f"{_APPENDS}::TestAppend::test_sent_again_with_more_behind_it_stores_the_rest",
    ),
    Mutant(
        name="stored-before-commit",
        promises=(7,),
        about="The worker counts events as stored before the commit, and skips them if the commit fails.",
        changes=(
            Change(
                "worker/ingest/event_writer.py",
                "        self._rollups.note_commit()\n        self._stored += len(batch)",
                "            self._stored += len(batch)\n        self._rollups.note_commit()",
            ),
        ),
        test="tests/worker/ingest/record_handler/test_stored_records.py::test_a_commit_whose_answer_got_lost_is_not_stored_twice[1]",
    ),
    Mutant(
        name="points-counted-again",
        promises=(5, 7),
        about="A metric that is resent after a lost commit response counts twice in the curves.",
        changes=(
            Change(
                "app/runs/reading/metrics/rollups.py",
                "            if number > self._taken:\n",
                "            if True:\n",
            ),
        ),
        test="tests/app/runs/reading/metrics/test_curves.py::TestWriting::"
        "test_what_is_sent_again_counts_once_however_the_commit_before_it_went",
    ),
    Mutant(
        name="order-by-time",
        promises=(5,),
        about="A reader gets events in the order of their timestamps, which differ between machines.",
        changes=(
            Change(_LOG, "            ORDER BY seq LIMIT :limit\n", "            ORDER BY ts LIMIT :limit\n"),
            Change(
                _LOG,
                "WHERE bytes_before < :most_bytes ORDER BY seq\n",
                "WHERE bytes_before < :most_bytes ORDER BY ts\n",
            ),
        ),
        test="tests/app/runs/events/test_stream.py::test_a_reader_continues_behind_its_cursor_without_seam",
    ),
    Mutant(
        name="feed-numbered-by-run",
        promises=(5,),
        about="The feed of all runs numbers the events of a run in reverse.",
        changes=(
            Change("app/runs/events/feed.py", "FROM taken ORDER BY position", "FROM taken ORDER BY position DESC"),
        ),
        test="tests/app/runs/events/test_feed.py::"
        "test_what_is_committed_later_is_numbered_later_however_early_it_was_written",
    ),
    Mutant(
        name="feed-pruned-in-silence",
        promises=(5,),
        about="Retention leaves no mark in the feed of all runs, so that a reader does not learn that events are gone.",
        changes=(Change("app/runs/retention.py", "    await session.execute(marked)\n", ""),),
        test="tests/app/runs/test_retention.py::TestEvents::test_a_stream_says_what_is_gone_and_how_the_run_has_ended",
    ),
    Mutant(
        name="join-without-being-level",
        promises=(5,),
        about="A reader that lags behind the live tail joins it and misses the events in between.",
        changes=(
            Change(_STREAM, "if tail is None or tail.start > reader.position:", "if tail is None:"),
            Change(_STREAM, "if tail is not None and tail.start <= reader.position:", "if tail is not None:"),
        ),
        test="tests/app/runs/events/test_stream.py::test_forty_readers_that_come_at_any_time_see_everything_once",
    ),
    Mutant(
        name="unbounded-buffer",
        promises=(17,),
        about="The buffer of a reader that reads nothing grows without limit in the API's memory.",
        changes=(Change(_STREAM, "while self.buffered_bytes > _KEPT_BYTES and", "while self.buffered_bytes < 0 and"),),
        test="tests/app/runs/events/test_stream.py::test_a_slow_reader_holds_a_bounded_buffer_and_delays_no_other",
    ),
)
