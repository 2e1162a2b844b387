"""Promises about the processes of a run on several devices: which end is the end of all."""

import time
from typing import Any

import pytest

from worker.process import training_group
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit
from worker.wire.rank_place import EXIT_PEER_LOST


class Process:
    """A process that ends when a test says so."""

    end: Exit | None = None

    def poll(self) -> Exit | None:
        return self.end


def group(*ends: Exit | None) -> tuple[TrainingGroup, list[Process]]:
    processes = [Process() for _ in ends]
    for process, end in zip(processes, ends, strict=True):
        process.end = end
    members: Any = processes
    return TrainingGroup(members), processes


_LOST = Exit(code=EXIT_PEER_LOST)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((None, None), None),
        ((Exit(code=0), None), Exit(code=0)),
        ((None, Exit(code=0)), None),  # it has done its part, and rank 0 still exports
        ((Exit(code=1), _LOST), Exit(code=1)),
        ((_LOST, Exit(signal=9)), Exit(signal=9, rank=1)),
        ((_LOST, _LOST, Exit(code=1)), Exit(code=1, rank=2)),
        ((None, Exit(signal=11)), Exit(signal=11, rank=1)),
    ],
)
def test_the_end_that_caused_the_others_counts(ends: tuple[Exit | None, ...], expected: Exit | None) -> None:
    assert group(*ends)[0].poll() == expected


def test_a_lost_connection_waits_for_its_cause_and_is_one_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found, processes = group(_LOST, None)
    assert found.poll() is None
    now[0] += training_group._CAUSE_SECONDS - 1
    processes[1].end = _LOST
    assert found.poll() is None
    now[0] += 2
    assert found.poll() == Exit(peer_lost=True)
