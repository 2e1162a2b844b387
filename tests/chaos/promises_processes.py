"""Promises about the processes of the service, when all runs have ended: 3 and 17."""

from collections.abc import Iterator

from tests.chaos.history import History, Violation


def no_trainer_is_left(history: History) -> Iterator[Violation]:
    """3. A trainer is gone when its run has ended.

    Sound: a worker writes the end of an attempt when its process is gone; one that lost the run has killed it before.
    """
    for pid, told in history.left.items():
        yield Violation(3, "", f"every run has ended, and the trainer {pid} is there, says {told}")


def processes_do_not_grow(history: History) -> Iterator[Violation]:
    """17. Whatever readers, faults and runs there were, a process holds no more descriptors and threads than before.

    Sound: pools have a size, and the campaign waits until what was in use is closed.
    """
    for one in history.growth:
        if one.is_too_much:
            told = f"{one.descriptors} descriptors and {one.threads} threads, before and after"
            yield Violation(17, "", f"{one.process} keeps what it needs no more: {told}")
