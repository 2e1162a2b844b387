"""Promises about the processes of a run on several devices: which end is the end of all."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.infra.process.handle import ProcessHandle
from app.infra.process.identity import ProcessIdentity
from tests.worker.process.launching import Said, is_alive, launch, start_launcher
from worker.process import process_group, training_group
from worker.process.launcher import Launcher
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit, TrainingProcess
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
    training_group_of_two, processes = group(_LOST, None)
    assert training_group_of_two.poll() is None
    now[0] += training_group._CAUSE_SECONDS - 1
    processes[1].end = _LOST
    assert training_group_of_two.poll() is None
    now[0] += 2
    assert training_group_of_two.poll() == Exit(peer_lost=True)


@pytest.fixture(scope="module", params=["zygote", "cold"])
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = start_launcher(tmp_path_factory.mktemp("home"), request.param)
    yield launcher
    launcher.stop()


class TestEndOfAll:
    """An error in ending one process does not leave another one running."""

    @pytest.fixture
    def processes(self, launcher: Launcher, tmp_path: Path) -> list[TrainingProcess]:
        """Two processes that wait for a stop request."""
        started = [launch(launcher, tmp_path / str(rank), "wait_for_stop") for rank in (0, 1)]
        for process in started:
            Said(process).until(lambda said: said.has("message"))
        return started

    def test_a_process_that_takes_long_to_die_delays_the_end_of_no_other(
        self, processes: list[TrainingProcess], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One with a GPU takes a second and longer."""
        first, second = (process.pid for process in processes)
        members, alive_meanwhile = process_group._session_members, []

        def dying(leader: ProcessIdentity) -> Iterator[int]:
            if leader.pid == first and len(alive_meanwhile) < 20:
                alive_meanwhile.append(is_alive(second))
                return iter([first])
            return members(leader)

        with monkeypatch.context() as patched:
            patched.setattr(process_group, "_session_members", dying)
            TrainingGroup(processes).kill()
        assert not alive_meanwhile[-1]
        TrainingGroup(processes).close()

    def test_an_error_in_closing_one_closes_the_others(
        self, processes: list[TrainingProcess], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when no descriptor is left to look for the processes of its session."""
        second, kill = processes[1], process_group.kill_session

        def without_descriptors(leader: ProcessIdentity, process: ProcessHandle | None = None) -> list[int]:
            if leader.pid == processes[0].pid:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return kill(leader, process)

        group, cleaned_up = TrainingGroup(processes), []
        group.at_end(lambda: cleaned_up.append(True))
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "kill_session", without_descriptors)
            with pytest.raises(OSError, match="Too many open files"):
                group.close()
        assert not is_alive(second.pid) and second.channel.fileno() == -1 and cleaned_up == [True]
