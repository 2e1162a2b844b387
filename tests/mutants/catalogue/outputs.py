"""Mutants of outputs, of exports of checkpoints, and of evaluations and predictions without training."""

from tests.mutants.mutant import Change, Mutant

_OUTPUT = "tests/worker/training/output"
_PREDICTION = "tests/worker/training/prediction/test_predict.py"

MUTANTS = (
    Mutant(
        name="export-unverified",
        promises=(11,),
        about="The best checkpoint is exported without a check of its files.",
        changes=(
            Change(
                "worker/training/output/export.py",
                "problems = manifest.verify(best.path, best.manifest_sha256, run.report.alive)",
                "problems: list[str] = []",
            ),
        ),
        test=f"{_OUTPUT}/test_export.py"
        "::TestWeights::test_the_best_of_an_earlier_attempt_is_exported_unless_it_is_damaged[damaged]",
    ),
    Mutant(
        name="converter-fails-the-training",
        promises=(14,),
        about="A failure of the GGUF converter fails the run that has trained.",
        changes=(
            Change(
                "worker/training/output/gguf.py",
                "        if is_export:\n            raise failure from error\n",
                "        raise failure from error\n",
            ),
        ),
        test=f"{_OUTPUT}/test_gguf.py"
        "::TestRuns::test_a_failure_costs_a_training_nothing_else_and_an_export_of_the_checkpoint_repairs_it",
    ),
    Mutant(
        name="evaluation-of-the-base",
        promises=(10,),
        about="An evaluation does not load the weights that it is to evaluate.",
        changes=(
            Change(
                "worker/training/methods/pipeline.py",
                "    if weights is not None:\n        trainer.load_trained_weights",
                "    if weights is None:\n        trainer.load_trained_weights",
            ),
        ),
        test="tests/worker/training/methods/test_evaluation.py"
        "::test_an_evaluation_equals_that_of_the_training_and_does_not_depend_on_the_batch_size[lora-fields1]",
    ),
    Mutant(
        name="evaluation-forgets-its-model",
        promises=(12,),
        about="An evaluation does not keep the run whose output it evaluates.",
        changes=(
            Change(
                "app/runs/creating/inference.py",
                "base_run_id=run.id if run is not None and is_output",
                "base_run_id=None if run is not None and is_output",
            ),
        ),
        test="tests/app/runs/creating/test_evaluation.py::TestResult::test_evaluation_result_is_on_its_run_and_is_not_ranked",
    ),
    Mutant(
        name="answers-ahead-count-as-written",
        promises=(10,),
        about="A resumed prediction takes rows for written that were answered before those in front of them.",
        changes=(
            Change(
                "worker/training/prediction/answers_file.py",
                'state = {"written": self.written,',
                'state = {"written": self.answered,',
            ),
        ),
        test=f"{_PREDICTION}::test_prediction_killed_three_times_writes_the_file_of_an_undisturbed_one[0-80]",
    ),
    Mutant(
        name="rows-share-random-numbers",
        promises=(10,),
        about="The random numbers of a sampled row depend on its place in the batch.",
        changes=(
            Change(
                "worker/training/prediction/generation.py",
                'random.Random(f"{seed} {row}") for row in rows',
                'random.Random(f"{seed} {row}") for row in range(len(rows))',
            ),
        ),
        test=f"{_PREDICTION}::test_sampled_answers_depend_on_seed_and_row_and_not_on_batches",
    ),
)
