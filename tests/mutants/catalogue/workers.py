"""Mutants of supervisors, leases and training processes."""

from tests.mutants.mutant import Change, Mutant

_LEASE = "worker/lease.py"
_MONITOR = "worker/attempts/monitor.py"
_END = "tests/worker/attempts/test_outcome.py"

MUTANTS = (
    Mutant(
        name="ray-believes-the-job",
        promises=(3,),
        about="A run that a worker trains is treated as one that needs its Ray job no more.",
        changes=(
            Change(
                "app/backends/ray_jobs.py",
                "    return job.status in LIVE and job.current_epoch == job.lease_epoch + 1\n",
                "    return False\n",
            ),
        ),
        test="tests/app/backends/ray_jobs/test_ended_jobs.py::TestAJob::test_end_of_a_job_whose_run_trains_is_ignored",
    ),
    Mutant(
        name="lease-from-the-answer",
        promises=(3, 19),
        about="A renewal counts from its response, so after a slow response the trainer outlives its lease.",
        changes=(
            Change(
                _LEASE,
                "        self._sent = sent\n        self._apply_row(row)\n",
                "        self._sent = since_boot()\n        self._apply_row(row)\n",
            ),
        ),
        test="tests/worker/test_lease.py::test_a_renewal_counts_from_when_it_was_sent_however_late_its_answer",
    ),
    Mutant(
        name="lease-by-the-wall-clock",
        promises=(20,),
        about="A worker measures its lease by the wall clock, so a clock change of an hour ends it.",
        changes=(
            Change(_LEASE, "        sent = since_boot()\n", "        sent = time.time()\n"),
            Change(_LEASE, "since_boot() >= self.kill_at", "time.time() >= self.kill_at"),
        ),
        test="tests/worker/test_lease.py::test_a_wall_clock_that_jumps_an_hour_changes_nothing[3600.0]",
    ),
    Mutant(
        name="no-timer-in-the-trainer",
        promises=(3,),
        about="The trainer has no deadline of its own, so it outlives the lease of a frozen supervisor.",
        changes=(
            Change(
                "worker/wire/deadline.py",
                "    signal.setitimer(signal.ITIMER_REAL, max(until - since_boot(), 0.001))\n",
                "    return\n",
            ),
        ),
        test="tests/reliability/test_deaths.py::TestAFrozenSupervisor::test_the_trainer_dies_by_its_own_timer",
    ),
    Mutant(
        name="end-before-the-log-tail",
        promises=(9,),
        about="The final status is written before the last log lines are stored.",
        changes=(
            Change("worker/attempts/attempt.py", "            self._writer.drain()\n        except", "        except"),
        ),
        test=f"{_END}::test_the_last_status_waits_for_the_last_line_of_the_log",
    ),
    Mutant(
        name="wake-before-commit",
        promises=(5,),
        about="Readers are notified before the new events are committed, find nothing and wait again.",
        changes=(
            Change(
                "worker/ingest/event_writer.py",
                "            first = batch[0]\n",
                "            first = batch[0]\n            self._context.publisher.wake_streams(self._run.id)\n",
            ),
            Change(
                "worker/ingest/event_writer.py",
                "            self._changed.notify_all()\n        self._context.publisher.wake_streams(self._run.id)\n",
                "            self._changed.notify_all()\n",
            ),
        ),
        test=f"{_END}::test_readers_are_woken_when_there_is_something_to_read",
    ),
    Mutant(
        name="stop-waits-for-ever",
        promises=(9,),
        about="A trainer that ignores a stop request is never killed.",
        changes=(
            Change(_MONITOR, "if now - self._stop_requested_at <= grace:", "if now - self._stop_requested_at >= 0:"),
        ),
        test="tests/reliability/test_stop.py::TestStopIsBounded"
        "::test_a_trainer_that_does_not_listen_is_killed_after_the_grace",
    ),
    Mutant(
        name="hang-not-noticed",
        promises=(15,),
        about="A trainer that reports nothing is never killed.",
        changes=(Change(_MONITOR, "if silent > self._context.settings.hang_seconds:", "if silent < 0:"),),
        test="tests/reliability/test_hang.py::test_a_trainer_that_falls_silent_is_killed_and_its_run_goes_on",
    ),
    Mutant(
        name="slow-is-hung",
        promises=(15,),
        about="There is no heartbeat between two metrics, so a trainer with long steps is killed in each attempt.",
        changes=(
            Change(
                "worker/training/loop/callbacks.py",
                "    def on_substep_end(self, *_: Any, **__: Any) -> None:\n        self.run.report.alive()\n",
                "    def on_substep_end(self, *_: Any, **__: Any) -> None:\n        pass\n",
            ),
        ),
        test="tests/worker/training/loop/test_heartbeat.py"
        "::test_a_slow_trainer_is_left_alone_however_long_it_has_nothing_to_report[one-large-step]",
    ),
    Mutant(
        name="alive-by-the-clock",
        promises=(15,),
        about="Heartbeats during model loading do not depend on progress, so a stalled download is never detected.",
        changes=(
            Change("worker/wire/heartbeat.py", "            if now > before:\n", "            if now >= before:\n"),
        ),
        test="tests/worker/training/loop/test_heartbeat.py::test_a_download_that_stalls_is_not",
    ),
    Mutant(
        name="drain-without-saving",
        promises=(18,),
        about="A worker that receives SIGTERM does not let its trainers save, so steps are recomputed.",
        changes=(Change(_MONITOR, 'StopRequest("checkpoint", "drain")', 'StopRequest("discard", "drain")'),),
        test="tests/reliability/test_stop.py::TestDrain::test_sigterm_saves_releases_and_loses_nothing",
    ),
    Mutant(
        name="sick-worker-takes-runs",
        promises=(13,),
        about="A worker without access to the storage still claims runs, and each of them fails.",
        changes=(
            Change(
                "worker/health.py",
                'return f"the storage {self._storage} holds no datasets',
                'return None and f"the storage {self._storage} holds no datasets',
            ),
        ),
        test="tests/reliability/test_failures.py::test_a_worker_that_does_not_see_the_storage_costs_a_run_nothing",
    ),
    Mutant(
        name="spool-overtakes",
        promises=(5, 19),
        about="New events are stored before older events that are still spooled on the worker's disk.",
        changes=(
            Change("worker/ingest/spool.py", "if not self._rest and self._head_has_room:", "if self._head_has_room:"),
        ),
        test="tests/worker/ingest/test_spool.py::test_order_and_content_do_not_depend_on_where_events_wait",
    ),
)
