"""Bugs in supervisors, leases and training processes."""

from tests.mutants.mutant import Change, Mutant

_LEASE = "worker/lease.py"
_FOLLOWING = "worker/following.py"
_END = "tests/worker/test_end_of_attempt.py"

MUTANTS = (
    Mutant(
        name="lease-from-the-answer",
        promises=(3, 19),
        about="A renewal counts from its answer, so after a slow one the trainer outlives its lease.",
        changes=(
            Change(
                _LEASE,
                "        self._sent = sent\n        if row.stop",
                "        self._sent = time.monotonic()\n        if row.stop",
            ),
        ),
        test="tests/worker/test_lease_clock.py::test_a_renewal_counts_from_when_it_was_sent_however_late_its_answer",
    ),
    Mutant(
        name="lease-by-the-wall-clock",
        promises=(20,),
        about="A worker counts its lease by a clock that is set, and takes an hour's jump for its end.",
        changes=(
            Change(_LEASE, "        sent = time.monotonic()\n", "        sent = time.time()\n"),
            Change(_LEASE, "time.monotonic() >= self.kill_at", "time.time() >= self.kill_at"),
        ),
        test="tests/worker/test_lease_clock.py::test_a_wall_clock_that_jumps_an_hour_changes_nothing[3600.0]",
    ),
    Mutant(
        name="no-timer-in-the-trainer",
        promises=(3,),
        about="The trainer sets itself no deadline, so it outlives the lease of a supervisor that stands still.",
        changes=(
            Change(
                "worker/training/control.py",
                "    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 0.001))\n",
                "    del until\n",
            ),
        ),
        test="tests/reliability/test_deaths.py::TestAFrozenSupervisor::test_the_trainer_dies_by_its_own_timer",
    ),
    Mutant(
        name="end-before-the-log-tail",
        promises=(9,),
        about="The last status is written while the last lines of the log still wait to be stored.",
        changes=(Change("worker/supervisor.py", "        writer.drain()\n        return", "        return"),),
        test=f"{_END}::test_the_last_status_waits_for_the_last_line_of_the_log",
    ),
    Mutant(
        name="wake-before-commit",
        promises=(5,),
        about="Readers are woken before the new events can be seen, look, find nothing and sleep on.",
        changes=(
            Change(
                "worker/writer.py",
                "            first = batch[0]\n",
                "            first = batch[0]\n            self._host.wake(self._run.id)\n",
            ),
            Change(
                "worker/writer.py",
                "            self._changed.notify_all()\n        self._host.wake(self._run.id)\n",
                "            self._changed.notify_all()\n",
            ),
        ),
        test=f"{_END}::test_readers_are_woken_when_there_is_something_to_read",
    ),
    Mutant(
        name="stop-waits-for-ever",
        promises=(9,),
        about="A trainer that does not listen to a stop is waited for without end.",
        changes=(Change(_FOLLOWING, "if now - self._asked_at <= grace:", "if now - self._asked_at >= 0:"),),
        test="tests/reliability/test_stop.py::TestStopIsBounded"
        "::test_a_trainer_that_does_not_listen_is_killed_after_the_grace",
    ),
    Mutant(
        name="hang-not-noticed",
        promises=(15,),
        about="A trainer that says nothing any more is waited for as long as its supervisor lives.",
        changes=(Change(_FOLLOWING, "if silent > self._host.settings.hang_seconds:", "if silent < 0:"),),
        test="tests/reliability/test_hang.py::test_a_trainer_that_falls_silent_is_killed_and_its_run_goes_on",
    ),
    Mutant(
        name="slow-is-hung",
        promises=(15,),
        about="What a trainer does between two metrics gives no sign of life: a long step is killed in each attempt.",
        changes=(
            Change(
                "worker/training/callbacks.py",
                "    def on_substep_end(self, *_: Any, **__: Any) -> None:\n        self.run.report.alive()\n",
                "    def on_substep_end(self, *_: Any, **__: Any) -> None:\n        pass\n",
            ),
        ),
        test="tests/worker/training/test_alive.py"
        "::test_a_slow_trainer_is_left_alone_however_long_it_has_nothing_to_tell[one-large-step]",
    ),
    Mutant(
        name="alive-by-the-clock",
        promises=(15,),
        about="Signs of life come by the clock while a model is loaded: a download that stands still is waited for.",
        changes=(
            Change("worker/training/pulse.py", "            if now > before:\n", "            if now >= before:\n"),
        ),
        test="tests/worker/training/test_alive.py::test_a_download_that_stands_still_is_not",
    ),
    Mutant(
        name="drain-without-saving",
        promises=(18,),
        about="A worker that is told to end does not let its trainers save, so steps are trained twice.",
        changes=(Change(_FOLLOWING, "if stop else (True, False)", "if stop else (False, False)"),),
        test="tests/reliability/test_stop.py::TestDrain::test_sigterm_saves_hands_back_and_loses_nothing",
    ),
    Mutant(
        name="sick-worker-takes-runs",
        promises=(13,),
        about="A worker without the storage takes runs all the same, and fails them one by one.",
        changes=(
            Change(
                "worker/fitness.py",
                'return f"the storage {self._storage} holds no datasets',
                'return None and f"the storage {self._storage} holds no datasets',
            ),
        ),
        test="tests/reliability/test_failures.py::test_a_worker_that_does_not_see_the_storage_costs_a_run_nothing",
    ),
    Mutant(
        name="spool-overtakes",
        promises=(5, 19),
        about="What is said while older events wait on the worker's disk is stored before them.",
        changes=(Change("worker/spool.py", "if not self._rest and self._head_has_room:", "if self._head_has_room:"),),
        test="tests/worker/test_spool.py::test_order_and_content_are_kept_whatever_waits_where",
    ),
)
