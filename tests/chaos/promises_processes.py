"""Promises about the processes of the service after all runs have ended: 3 and 17."""

from collections.abc import Iterator

from tests.chaos.history import History, Violation


def no_trainer_is_left(history: History) -> Iterator[Violation]:
    """Check promise 3: the trainers of ended runs have exited.

    Sound: a worker writes the end of an attempt after its process has exited, or kills the process if it lost the run.
    """
    for pid, reported in history.left.items():
        yield Violation(3, "", f"every run has ended, but trainer {pid} is alive according to {reported}")


def attempts_do_not_overlap(history: History) -> Iterator[Violation]:
    """Check promise 3 for every rank on every host: no process of an attempt lives when one of a later attempt starts.

    Sound: a run is claimed again after the processes of all its parts have ended, or their leases have expired, before
    which their own timers have ended them. Each process holds a file lock for life, which the kernel releases.
    """
    for what in history.overlaps:
        yield Violation(3, "", what)


def processes_do_not_grow(history: History) -> Iterator[Violation]:
    """Check promise 17: a process holds no more descriptors and threads than before the segment.

    Sound: pools have a maximum size, and the campaign waits until resources in use are closed.
    """
    for growth in history.growth:
        if growth.is_too_much:
            reported = f"{growth.descriptors} descriptors and {growth.threads} threads, before and after"
            yield Violation(17, "", f"{growth.process} leaks resources: {reported}")
