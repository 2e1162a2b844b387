"""Mutants of saving, resuming and pruning checkpoints."""

from tests.mutants.mutant import Change, Mutant

_MANIFEST = "worker/checkpoint_files/manifest.py"
_RETENTION = "app/runs/state/checkpoints/retention.py"
_DURABLE = "tests/worker/training/checkpointing/test_durability.py"
_KEPT = "tests/app/runs/state/checkpoints/test_retention.py"

_SYNC_FILES = """    for path in _list_files(staging):
        # safetensors writes 0600, which neither the API's user nor an operator's group could read.
        path.chmod(0o644)
        _sync_to_disk(path)
        alive()
    for folder in {staging, *(path.parent for path in _list_files(staging))}:
        _sync_to_disk(folder)
"""
_RENAME = """    aside = aside or final.with_name(f".{final.name}.old")
    remove_tree(aside, ignore_errors=True)
    if os.path.lexists(final):
        final.rename(aside)
    staging.rename(final)
    remove_tree(aside, ignore_errors=True)
"""

MUTANTS = (
    Mutant(
        name="action-done-twice",
        promises=(10,),
        about="An attempt repeats actions of its checkpoint's step, which the checkpoint already contains.",
        changes=(Change("app/runs/state/actions/replay.py", "RunAction.step > step", "RunAction.step >= step"),),
        test="tests/app/runs/state/actions/test_service.py::test_an_attempt_does_again_what_lies_behind_its_checkpoint",
    ),
    Mutant(
        name="extra-set-draws-numbers",
        promises=(10,),
        about="The evaluation of an extra set moves the random state that the training goes on with.",
        changes=(
            Change(
                "worker/training/loop/evaluation.py",
                "            with sampling.preserve_rng():\n",
                "            with nullcontext():\n",
            ),
        ),
        test="tests/worker/training/checkpointing/test_resume.py::TestChanges::"
        "test_extra_evaluation_sets_leave_no_trace_in_the_training_even_if_a_stop_interrupts_one",
    ),
    Mutant(
        name="measuring-draws-numbers",
        promises=(10,),
        about="The passes that a step is planned by move the random state that the training begins with.",
        changes=(
            Change(
                "worker/training/planning/step_planning.py",
                "        with sampling.preserve_rng():\n            yield\n",
                "        yield\n",
            ),
        ),
        test="tests/worker/training/planning/test_step_planning.py::"
        "test_measured_run_takes_the_same_steps_as_one_that_is_not[lora]",
    ),
    Mutant(
        name="micro-batch-not-of-the-checkpoint",
        promises=(10,),
        about="A resumed run chooses its micro-batches again.",
        changes=(
            Change(
                "worker/training/planning/step_planning.py",
                "    if len(sizes) > 1 and rows in sizes:\n",
                "    if False:\n",
            ),
        ),
        test="tests/worker/training/planning/test_step_planning.py::"
        "test_resumed_run_has_the_micro_batches_of_its_checkpoint",
    ),
    Mutant(
        name="checkpoint-without-a-part",
        promises=(11,),
        about="A checkpoint of a divided model is committed although one device could not write its part.",
        changes=(
            Change(
                "worker/training/model/parallel/sharding.py",
                "        except CheckpointException as error:\n",
                "        except CheckpointException as error:\n            return\n",
            ),
        ),
        test="tests/worker/training/test_sharding.py::test_a_part_that_a_device_cannot_write_fails_the_checkpoint"
        "[in_the_background]",
    ),
    Mutant(
        name="a-bad-step-is-taken-again",
        promises=(14,),
        about="The next attempt does not know which rows failed on their own, and trains on them in a later epoch.",
        changes=(
            Change(
                "worker/training/loop/anomalies.py",
                "        self._rows = {row for one in earlier for row in one.singled_out}\n",
                "        self._rows: set[int] = set()\n",
            ),
        ),
        test="tests/worker/training/loop/test_anomalies.py::TestRewind::test_goes_past_a_step_without_numbers_and_names_its_row[full]",
    ),
    Mutant(
        name="pruning-forgets-who-resumed",
        promises=(12,),
        about="Retention deletes a checkpoint that a later run resumed from.",
        changes=(Change("app/runs/state/checkpoints/retention.py", "~used,", ""),),
        test="tests/app/runs/test_retention.py::TestCheckpoints::"
        "test_the_furthest_the_best_the_pinned_and_those_resumed_from_stay",
    ),
    Mutant(
        name="delete-forgets-who-builds-on-it",
        promises=(12,),
        about="A run can be deleted although another run uses its output as base model.",
        changes=(
            Change(
                "app/runs/state/deletion.py",
                "other.parent_run_id.in_(runs) | other.base_run_id.in_(runs) | other.id.in_(judged),",
                "other.parent_run_id.in_(runs) | other.id.in_(judged),",
            ),
        ),
        test="tests/app/runs/state/test_deletion.py::TestDeleteRun::test_run_that_others_build_on_is_not_deleted_before_them",
    ),
    Mutant(
        name="delete-forgets-pinned-checkpoints",
        promises=(12,),
        about="A run can be deleted although one of its checkpoints is pinned.",
        changes=(
            Change(
                "app/runs/state/deletion.py",
                "if pinned := await first_few(session, pinned_checkpoints(select(Run.id).where(Run.id == run.id))):",
                "if pinned := None:",
            ),
        ),
        test="tests/app/runs/state/test_deletion.py::TestDeleteRun::"
        "test_run_with_pinned_checkpoint_is_not_deleted_until_unpinned",
    ),
    Mutant(
        name="delete-takes-a-part-of-a-job",
        promises=(12,),
        about="The newest run of a fine-tuning job can be deleted, after which the job is in an earlier state.",
        changes=(Change("app/runs/state/deletion.py", "if len(job_runs) > len(runs):", "if False:"),),
        test="tests/openai/test_job_deletion.py::test_run_of_a_job_is_not_deleted_without_the_others",
    ),
    Mutant(
        name="pruning-takes-a-part-of-a-job",
        promises=(12,),
        about="Retention deletes the newest run of a fine-tuning job although it keeps an earlier one.",
        changes=(
            Change(
                "app/runs/retention.py",
                "if run.job_run_id not in changing_jobs]",
                "]",
            ),
        ),
        test="tests/app/runs/test_retention.py::TestRuns::test_runs_of_a_job_go_together_or_stay",
    ),
    Mutant(
        name="pruning-forgets-who-learns-from-it",
        promises=(12,),
        about="Retention deletes a run whose reward model another run still uses.",
        changes=(
            Change(
                "app/runs/retention.py",
                "free = [~run.pinned, ~needed.exists(), ~reward_users.exists()]",
                "free = [~run.pinned, ~needed.exists()]",
            ),
        ),
        test="tests/app/runs/test_retention.py::TestRuns::test_old_runs_go_with_those_that_only_they_needed",
    ),
    Mutant(
        name="rename-before-fsync",
        promises=(11,),
        about="A checkpoint is renamed to its final name before its files are fsynced.",
        changes=(Change(_MANIFEST, _SYNC_FILES + _RENAME, _RENAME + _SYNC_FILES.replace("staging", "final")),),
        test=f"{_DURABLE}::test_files_and_folders_are_on_the_disk_before_the_rename_and_the_name_after_it",
    ),
    Mutant(
        name="manifest-not-on-the-disk",
        promises=(11,),
        about="The manifest of a checkpoint is never fsynced.",
        changes=(
            Change(_MANIFEST, "    path.write_bytes(text)\n    _sync_to_disk(path)\n", "    path.write_bytes(text)\n"),
            Change(
                _MANIFEST,
                "        path.chmod(0o644)\n        _sync_to_disk(path)\n",
                "        path.chmod(0o644)\n        if path.name != MANIFEST:\n            _sync_to_disk(path)\n",
            ),
        ),
        test=f"{_DURABLE}::TestAWholeRun::test_checkpoints_of_the_fake_trainer_are_durable",
    ),
    Mutant(
        name="name-not-on-the-disk",
        promises=(11,),
        about="A checkpoint is reported before its rename is durable.",
        changes=(Change(_MANIFEST, "    _sync_to_disk(final.parent)\n", ""),),
        test=f"{_DURABLE}::TestAWholeRun::test_checkpoints_of_the_fake_trainer_are_durable",
    ),
    Mutant(
        name="half-a-checkpoint-stays",
        promises=(13,),
        about="A save that fails on a full disk leaves its partial files, and the disk stays full.",
        changes=(
            Change(
                "worker/training/checkpointing/saver.py",
                "    except BaseException:\n        remove_tree(staging, ignore_errors=True)\n        raise\n",
                "    except BaseException:\n        raise\n",
            ),
        ),
        test="tests/worker/training/test_failures.py::TestFailures"
        "::test_a_full_disk_is_said_and_nothing_half_written_stays[in-the-optimizer]",
    ),
    Mutant(
        name="resume-unverified",
        promises=(11,),
        about="A run resumes from its newest checkpoint folder without verification.",
        changes=(
            Change(
                "worker/attempts/checkpoint_source.py",
                "            problems = manifest.verify(place, checkpoint.manifest_sha256, check)\n"
                "            if not problems:\n                return RestoreResult(RestoreOutcome.WHOLE)\n",
                "            return RestoreResult(RestoreOutcome.WHOLE)\n",
            ),
        ),
        test="tests/worker/attempts/test_job_builder.py::test_a_damaged_checkpoint_is_marked_reported_and_skipped[flipped]",
    ),
    Mutant(
        name="copy-unverified",
        promises=(11,),
        about="A run resumes from a checkpoint of an object store without verification.",
        changes=(
            Change(
                "worker/checkpoint_store/remote_store.py",
                "            problems = differences(staging)\n",
                "            problems: list[str] = []\n",
            ),
        ),
        test="tests/worker/checkpoint_store/test_restore.py::TestTheNextAttempt::test_takes_nothing_that_is_damaged_in_the_store",
    ),
    Mutant(
        name="working-copy-unverified",
        promises=(11,),
        about="A run uses the file of a dataset in the working copy without verification.",
        changes=(
            Change(
                "worker/checkpoint_store/working_copy.py",
                "if folder.is_dir() and not find_differences(folder, {path.name: (size, sha256)}, check):",
                "if path.exists():",
            ),
        ),
        test="tests/worker/checkpoint_store/test_working_copy.py::TestADataset"
        "::test_is_fetched_once_and_again_if_a_byte_differs",
    ),
    Mutant(
        name="removed-while-used",
        promises=(11,),
        about="The working copy removes what a run of another worker uses.",
        changes=(
            Change(
                "worker/checkpoint_store/working_copy.py",
                "enter_context(_hold_lock(self._lock_file(folder), fcntl.LOCK_SH, check))",
                "enter_context(_hold_lock(folder.parent / 'unlocked', fcntl.LOCK_SH, check))",
            ),
        ),
        test="tests/worker/checkpoint_store/test_working_copy.py::TestItsSize::test_takes_nothing_from_a_run",
    ),
    Mutant(
        name="completed-before-sent",
        promises=(11,),
        about="A run is completed although its output could not be sent to the object store.",
        changes=(
            Change(
                "worker/attempts/delivery.py",
                "                transition = machine.release(run.id, run.lease_epoch, reason, _REQUEUE_SECONDS)\n",
                "                pass\n",
            ),
        ),
        test="tests/worker/attempts/test_delivery.py"
        "::test_without_the_store_it_is_requeued_after_a_time_and_nothing_says_that_it_is_stored",
    ),
    Mutant(
        name="unreadable-is-damaged",
        promises=(11,),
        about="A checkpoint that a worker temporarily cannot read is marked as corrupt.",
        changes=(
            Change(
                "worker/checkpoint_files/manifest.py",
                "    except (FileNotFoundError, NotADirectoryError):\n",
                "    except OSError:\n",
            ),
        ),
        test="tests/worker/attempts/test_job_builder.py::test_a_checkpoint_that_cannot_be_read_now_is_not_a_bad_one",
    ),
    Mutant(
        name="random-state-not-saved",
        promises=(10,),
        about="A checkpoint omits the random number generator state, so dropout differs after a resume.",
        changes=(
            Change("worker/training/checkpointing/snapshot.py", "        trainer._save_rng_state(str(folder))\n", ""),
        ),
        test="tests/worker/training/checkpointing/test_resume.py::TestExact"
        "::test_losses_rows_and_weights_equal_the_undisturbed_runs[lora-mid-epoch]",
    ),
    Mutant(
        name="written-from-live-weights",
        promises=(10,),
        about="A checkpoint written in a background thread references the weights instead of copying them.",
        changes=(
            Change(
                "worker/training/checkpointing/saver.py",
                "            return snapshot.copied_to(self._memory)\n",
                "            return snapshot\n",
            ),
        ),
        test="tests/worker/training/checkpointing/test_async_writer.py::TestWhileTrainingGoesOn"
        "::test_a_checkpoint_on_a_slow_disk_holds_the_moment_of_its_step[full]",
    ),
    Mutant(
        name="clean-up-takes-the-newest",
        promises=(12,),
        about="Pruning keeps the oldest checkpoints instead of the newest.",
        changes=(
            Change(
                _RETENTION,
                "there.order_by(candidate.attempt.desc(), candidate.step.desc()",
                "there.order_by(candidate.attempt, candidate.step",
            ),
        ),
        test=f"{_KEPT}::test_the_furthest_are_kept_and_the_others_go[1-steps0]",
    ),
    Mutant(
        name="clean-up-goes-by-steps-alone",
        promises=(12,),
        about="Pruning ignores the attempt: new checkpoints below an earlier attempt's steps are deleted at once.",
        changes=(
            Change(
                _RETENTION,
                "there.order_by(candidate.attempt.desc(), candidate.step.desc()",
                "there.order_by(candidate.step.desc()",
            ),
        ),
        test=f"{_KEPT}::test_what_an_attempt_saves_stays_however_far_an_earlier_one_was[1-saved0]",
    ),
    Mutant(
        name="clean-up-takes-the-best",
        promises=(12,),
        about="Pruning deletes the checkpoint with the lowest evaluation loss.",
        changes=(Change(_RETENTION, "            Checkpoint.id.not_in(best),\n", ""),),
        test=f"{_KEPT}::test_the_one_with_the_lowest_evaluation_loss_stays",
    ),
    Mutant(
        name="clean-up-takes-the-pinned",
        promises=(12,),
        about="Pruning deletes a pinned checkpoint.",
        changes=(Change(_RETENTION, "            Checkpoint.pinned.is_(False),\n", ""),),
        test=f"{_KEPT}::test_a_pinned_one_stays_however_old",
    ),
)
