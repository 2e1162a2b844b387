"""Mutants of creating, claiming, stopping and reaping runs."""

from tests.mutants.mutant import Change, Mutant

_LIFECYCLE = "app/runs/state/machine.py"
_CLAIM = "app/runs/queue/claim.py"
_POLICY = "app/runs/queue/policy.py"
_STATES = "tests/app/runs/state/test_machine.py"
_QUOTAS = "tests/app/runs/queue/test_quota_holds.py::TestAQuota"
_COMMIT_ORDER = "tests/app/api/test_dependencies.py"

# The database rejects a pending run with a stop request; a mutant of the statements must also disable that check.
_NOTHING_REFUSED = Change(
    "migrations/versions/0100_first_schema.py",
    "\"status <> 'pending' OR stop_requested_at IS NULL\"",
    '"true"',
)

MUTANTS = (
    Mutant(
        name="answer-before-commit",
        promises=(1,),
        about="The API responds with 202 before it commits.",
        changes=(
            Change("app/api/dependencies.py", '(get_session, scope="function")', '(get_session, scope="request")'),
        ),
        test=f"{_COMMIT_ORDER}::TestAnAnswer::test_acceptance_of_a_run_is_sent_after_its_commit",
    ),
    Mutant(
        name="hint-before-commit",
        promises=(2, 6),
        about="The hint is sent before its run is committed, so the worker that receives it finds nothing.",
        changes=(
            Change(
                "app/backends/celery.py",
                "self._announce_run(transaction)\n        if",
                "await self._queue.wake_workers()\n        if",
            ),
        ),
        test=f"{_COMMIT_ORDER}::TestAHint::test_workers_are_woken_after_the_run_can_be_claimed",
    ),
    Mutant(
        name="stop-sent-before-commit",
        promises=(8, 9),
        about="The worker is notified of a stop before it is committed, so its lease renewal does not return it.",
        changes=(
            Change(
                "app/backends/celery.py",
                "transaction.after_commit.add_task(self._queue.call_worker, run_id)",
                "await self._queue.call_worker(run_id)",
            ),
        ),
        test=f"{_COMMIT_ORDER}::TestARequestToStop::test_stop_request_is_sent_to_the_worker_after_it_is_visible",
    ),
    Mutant(
        name="late-acks",
        promises=(3, 6),
        about="A hint is acknowledged after its run, so the broker redelivers it during a long run.",
        changes=(Change("app/infra/broker.py", "task_acks_late=False", "task_acks_late=True"),),
        test="tests/app/infra/test_notifications.py::test_a_hint_is_acknowledged_before_its_run_trains_so_it_never_comes_again",
    ),
    Mutant(
        name="claim-only-what-was-hinted",
        promises=(2, 6),
        about="Workers rely on hints: a run without a hint is never claimed.",
        changes=(
            Change(
                "app/runs/queue/candidates.py",
                "runs.stop_requested_at IS NULL AND runs.not_before",
                "runs.notified_at IS NOT NULL AND runs.not_before",
            ),
        ),
        test=f"{_STATES}::TestClaim::test_needs_no_hint",
    ),
    Mutant(
        name="hint-only-once",
        promises=(2, 6),
        about="A lost hint is never sent again.",
        changes=(
            Change(
                _LIFECYCLE,
                "                silence > text(\"interval '30 s'\"),\n",
                "",
            ),
        ),
        test=f"{_STATES}::TestHints::test_are_due_once_and_again_after_a_while",
    ),
    Mutant(
        name="claim-without-row-lock",
        promises=(3,),
        about="A claim does not skip a run that another transaction is changing, so all claims wait for it.",
        changes=(
            Change(
                _LIFECYCLE,
                '        .with_for_update(key_share=True, skip_locked=True)\n        .cte("picked")\n    )\n'
                "    moved, parts = claimed(",
                '        .cte("picked")\n    )\n    moved, parts = claimed(',
            ),
        ),
        test=f"{_STATES}::TestClaim::test_a_run_that_another_transaction_is_just_changing_is_skipped",
    ),
    Mutant(
        name="claims-take-no-turns",
        promises=(2, 3),
        about="Claims choose at the same time, so none sees the devices and quotas that another is just taking.",
        changes=(Change(_CLAIM, "    take_turn(connection)\n", ""),),
        test=f"{_STATES}::TestClaim::test_a_run_that_another_is_just_claiming_is_not_claimed_again",
    ),
    Mutant(
        name="claim-places-a-run-by-half",
        promises=(3,),
        about="A run on several hosts is claimed although a worker lacks devices.",
        changes=(
            Change(
                _POLICY,
                "for group in groups.values() if len(group) >= run.needs.hosts]",
                "for group in groups.values()]",
            ),
        ),
        test="tests/app/runs/queue/test_policy.py"
        "::test_a_plan_gives_each_free_device_once_and_whole_runs_within_their_quotas",
    ),
    Mutant(
        name="part-renewal-without-epoch",
        promises=(3,),
        about="The lease of a part is renewed although the run has another attempt.",
        changes=(
            Change("app/runs/state/parts.py", "            _runs.c.lease_epoch == _parts.c.lease_epoch,\n", ""),
            Change("app/runs/state/parts.py", "            _runs.c.lease_owner.is_not(None),\n", ""),
        ),
        test="tests/app/runs/state/test_parts.py::TestPart::test_it_is_renewed_only_while_the_run_has_its_lease_epoch",
    ),
    Mutant(
        name="claim-while-a-part-runs",
        promises=(3,),
        about="An attempt starts although the lease on a part of the one before runs.",
        changes=(
            Change(
                "app/runs/queue/order.py",
                "run_parts.run_id = runs.id AND run_parts.ended_at IS NULL",
                "run_parts.run_id = runs.id AND false",
            ),
        ),
        test="tests/app/runs/state/test_parts.py::TestPart::test_no_attempt_starts_while_the_lease_of_a_part_runs",
    ),
    Mutant(
        name="claim-leads-with-devices-of-others",
        promises=(3,),
        about="A worker leads a run on several hosts whose devices are all of others.",
        changes=(Change(_POLICY, " and self._claim.worker_id in hold.devices", ""),),
        test="tests/app/runs/queue/test_holds.py"
        "::test_a_run_on_several_hosts_starts_only_on_workers_that_it_holds_and_one_of_them_leads_it",
    ),
    Mutant(
        name="member-removes-what-the-lead-writes",
        promises=(3,),
        about="A worker of a part cleans up the folder of an attempt whose lead still writes to it.",
        changes=(Change("worker/attempts/part.py", "            if is_live is False:\n", "            if True:\n"),),
        test="tests/worker/attempts/test_part.py::TestFiles"
        "::test_after_a_lost_connection_it_waits_for_the_end_of_the_attempt",
    ),
    Mutant(
        name="waiting-for-a-host-is-hung",
        promises=(15,),
        about="A run whose rank 0 waits for another host, which works, counts as hung.",
        changes=(
            Change(
                "worker/attempts/monitor.py",
                "[silent, *(part.activity.silent_seconds for part in self._lease.active_parts)]",
                "[silent]",
            ),
        ),
        test="tests/worker/attempts/test_monitor.py::TestHangOnSeveralHosts"
        "::test_a_host_that_still_loads_keeps_the_run_alive",
    ),
    Mutant(
        name="claim-ignores-holds",
        promises=(2,),
        about="A run on one device takes what a run on several devices waits for.",
        changes=(Change(_POLICY, "                self._hold_again(run, self._claim)\n", "                pass\n"),),
        test="tests/app/runs/queue/test_stored_holds.py::TestOfTheQueue"
        "::test_a_later_run_does_not_take_the_device_that_a_wide_one_waits_for",
    ),
    Mutant(
        name="hold-for-ever",
        promises=(2,),
        about="What a run holds by a plan that no API process renews keeps devices idle.",
        changes=(
            Change(
                "app/runs/queue/holds_table.py",
                "made_at BETWEEN clock_timestamp() - interval '{HOLD_SECONDS} s' AND clock_timestamp()",
                "made_at <= clock_timestamp()",
            ),
        ),
        test="tests/app/runs/queue/test_stored_holds.py::TestOfTheQueue::test_a_hold_that_nobody_renews_binds_no_one",
    ),
    Mutant(
        name="claim-ignores-kept-quotas",
        promises=(2,),
        about="Later runs of a key take the quota that a run on several devices waits for.",
        changes=(Change(_POLICY, "if quota_hold.run.run_id == run.run_id:", "if False:"),),
        test=f"{_QUOTAS}::test_is_kept_for_the_first_run_that_waits_for_it_and_says_so",
    ),
    Mutant(
        name="round-forgets-claims",
        promises=(2,),
        about="A plan offers devices of a quota that were claimed while it was computed.",
        changes=(Change("app/runs/queue/holds.py", "max(stored.spare - taken, 0)", "stored.spare"),),
        test=f"{_QUOTAS}::test_that_a_claim_uses_while_a_round_computes_is_not_given_again",
    ),
    Mutant(
        name="claim-reads-no-further",
        promises=(2,),
        about="A worker claims the best of the first runs that it reads, whoever precedes it.",
        changes=(
            Change(_CLAIM, "            return order_key(assignment.run, used) <= end\n", "            return True\n"),
        ),
        test="tests/app/runs/queue/test_claim.py"
        "::test_claim_takes_what_the_policy_chooses_of_the_whole_queue_however_few_runs_it_reads_first[6]",
    ),
    Mutant(
        name="preempted-counts-as-lost",
        promises=(10,),
        about="A preempted run does not return to the queue: its stop counts as one from outside.",
        changes=(
            Change(
                "worker/attempts/outcome.py",
                "    is_requested = lease.stop or lease.preempted_for or lease.leaving\n",
                "    is_requested = lease.stop or lease.leaving\n",
            ),
        ),
        test="tests/e2e/test_preemption.py::test_a_preempted_run_continues_exactly_after_the_one_above_it",
    ),
    Mutant(
        name="preempted-for-a-run-that-is-gone",
        promises=(10,),
        about="A run leaves its devices although the run that it was to make room for has been cancelled.",
        changes=(
            Change(
                _LIFECYCLE,
                "lease_expires_at=func.clock_timestamp() + interval_seconds(lease_seconds), preempted_for=still_waits)",
                "lease_expires_at=func.clock_timestamp() + interval_seconds(lease_seconds))",
            ),
        ),
        test="tests/app/runs/queue/test_preemption.py::TestOfTheQueue"
        "::test_a_request_is_withdrawn_once_its_run_waits_no_more[cancelled]",
    ),
    Mutant(
        name="finish-without-epoch",
        promises=(4,),
        about="A worker that has lost its run can still end it.",
        changes=(
            Change(
                _LIFECYCLE,
                "runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.status.in_(sources)",
                "runs.c.id == run_id, runs.c.status.in_(sources)",
            ),
        ),
        test=f"{_STATES}::TestTheWholeLife::test_a_stale_worker_moves_nothing[complete]",
    ),
    Mutant(
        name="renewal-without-epoch",
        promises=(3, 4),
        about="A worker that has lost its run keeps renewing the lease of its new owner.",
        changes=(
            Change(
                _LIFECYCLE,
                "runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.lease_owner",
                "runs.c.id == run_id, runs.c.lease_owner",
            ),
        ),
        test=f"{_STATES}::TestTheWholeLife::test_a_stale_worker_renews_nothing_and_hears_no_stop",
    ),
    Mutant(
        name="reap-without-new-epoch",
        promises=(3, 4),
        about="A reaped run keeps its lease epoch, so the worker that lost it can still write.",
        changes=(
            Change(
                _LIFECYCLE,
                "outcome=outcome,\n        lease_epoch=runs.c.lease_epoch + 1,",
                "outcome=outcome,\n        lease_epoch=runs.c.lease_epoch,",
            ),
        ),
        test=f"{_STATES}::TestLoss::test_an_expired_lease_gives_the_run_back_with_a_new_fence",
    ),
    Mutant(
        name="stop-leaves-it-waiting",
        promises=(8,),
        about="A stop request for a pending run is recorded, but the run stays pending.",
        changes=(
            Change(
                _LIFECYCLE,
                'case((runs.c.status == "pending", "cancelled"), else_=runs.c.status),\n        "stopped',
                'runs.c.status,\n        "stopped',
            ),
            _NOTHING_REFUSED,
        ),
        test=f"{_STATES}::TestStop::test_ends_a_waiting_run_at_once",
    ),
    Mutant(
        name="epoch-end-stops-at-once",
        promises=(8,),
        about="A run that stops at the end of its epoch counts as stopped, so the loss of its worker ends it.",
        changes=(
            Change(
                _LIFECYCLE,
                "stop_requested_at=case((never_claimed, func.now()), else_=runs.c.stop_requested_at),",
                "stop_requested_at=func.coalesce(runs.c.stop_requested_at, func.now()),",
            ),
        ),
        test="tests/app/runs/reading/test_stop_outlook.py::TestAtTheEndOfTheEpoch::"
        "test_epoch_end_stop_leaves_a_requeued_run_pending_and_a_plain_stop_cancels_it",
    ),
    Mutant(
        name="requeue-forgets-stop",
        promises=(8,),
        about="A lost run with a stop request becomes pending instead of ending.",
        changes=(
            Change(
                _LIFECYCLE,
                'case((runs.c.stop_requested_at.is_not(None), "cancelled"), (exhausted, "failed"),',
                'case((exhausted, "failed"),',
            ),
            _NOTHING_REFUSED,
        ),
        test=f"{_STATES}::TestStop::test_is_never_followed_by_another_attempt[reap_dead]",
    ),
    Mutant(
        name="losses-not-counted",
        promises=(16,),
        about="Losses are not counted, so a run that always kills its worker is retried forever.",
        changes=(Change(_LIFECYCLE, "lost_count=runs.c.lost_count + int(counted)", "lost_count=runs.c.lost_count"),),
        test=f"{_STATES}::TestLoss::test_a_run_that_is_lost_too_often_fails_and_says_so",
    ),
    Mutant(
        name="no-pause-between-losses",
        promises=(14,),
        about="A run that is lost repeatedly is retried each time without delay.",
        changes=(
            Change(
                _LIFECYCLE,
                "delay * func.power(2, func.least(runs.c.lost_count, _MOST_DOUBLINGS))",
                "delay * 0",
            ),
        ),
        test=f"{_STATES}::TestLoss::test_each_further_loss_doubles_the_pause",
    ),
    Mutant(
        name="no-grace-after-an-outage",
        promises=(19,),
        about="After an outage of PostgreSQL, every run whose lease could not be renewed counts as lost.",
        changes=(
            Change(
                _LIFECYCLE,
                "runs.c.lease_expires_at < func.now(), up_long_enough)",
                "runs.c.lease_expires_at < func.now())",
            ),
        ),
        test=f"{_STATES}::TestLoss::test_postgres_that_has_only_just_come_up_gives_a_lease_of_grace",
    ),
    Mutant(
        name="leases-compared-after-a-freeze",
        promises=(19,),
        about="A reaper whose server freezes in the middle of a round takes leases that nobody could renew meanwhile.",
        changes=(
            Change(
                _LIFECYCLE,
                "runs.c.lease_expires_at < func.now(), up_long_enough)",
                "runs.c.lease_expires_at < func.clock_timestamp(), up_long_enough)",
            ),
        ),
        test="tests/app/runs/queue/test_dispatcher.py"
        "::test_a_server_that_freezes_in_the_middle_of_a_round_gives_leases_one_of_grace_as_well",
    ),
    Mutant(
        name="clock-change-unnoticed",
        promises=(20,),
        about="A step of the database host's clock ends the leases of all runs at once.",
        changes=(
            Change("app/runs/queue/dispatcher.py", "        if change == 0.0:\n", "        if change is not None:\n"),
        ),
        test="tests/app/runs/state/test_clock_changes.py"
        "::TestALease::test_does_not_run_out_but_counts_again_from_the_jump[120 s]",
    ),
    Mutant(
        name="any-save-is-progress",
        promises=(16,),
        about="A run that saves the same step again before each loss is restarted without end.",
        changes=(Change("worker/ingest/recorders/checkpoints.py", "case((~other, 0), else_=Run.lost_count)", "0"),),
        test="tests/worker/ingest/test_progress.py"
        "::test_a_step_that_an_earlier_attempt_has_saved_is_none_until_training_is_beyond_it",
    ),
)
