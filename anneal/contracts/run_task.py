"""Task of a run."""

from enum import StrEnum


class RunTask(StrEnum):
    """Task of a run: to train a model, or to do something that changes no weights."""

    train = "train"
    evaluate = "evaluate"
    """Evaluate a base model, the output of a run or a checkpoint on a dataset."""
    export = "export"
    """Write the output from a checkpoint."""
    predict = "predict"
    """Answer the rows of a dataset with a base model, the output of a run or a checkpoint."""
    serve = "serve"
    """Answer the questions of callers to a model, until there are none for a while."""

    @property
    def saves_checkpoints(self) -> bool:
        """True if a run of this task saves checkpoints, from which it can be resumed."""
        return self in (RunTask.train, RunTask.predict)

    @property
    def is_inference(self) -> bool:
        """True if a run of this task uses the weights of a model that it does not change."""
        return self in (RunTask.evaluate, RunTask.predict, RunTask.serve)
