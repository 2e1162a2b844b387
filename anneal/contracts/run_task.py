"""Task of a run."""

from enum import StrEnum


class RunTask(StrEnum):
    """Task of a run: to train a model, or to do something that changes no weights."""

    train = "train"
    evaluate = "evaluate"
    """Evaluate a base model, the output of a run or a checkpoint on a dataset."""
    export = "export"
    """Write the output from a checkpoint."""
