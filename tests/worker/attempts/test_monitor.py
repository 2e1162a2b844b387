"""Stop requests that become less while they are followed have their own time; too much output is not read."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from anneal.contracts.attempt.part_activity import PartActivity
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.stop import StopRequest
from worker.attempts.monitor import Monitor
from worker.ingest.attempt_state import AttemptState
from worker.lease import ActivePart, EndedPart
from worker.process.training_process import Exit


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, to be set."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_discard_late_in_a_stop_that_saves_has_its_own_seconds_and_no_more(now: list[float]) -> None:
    sent: list[Any] = []
    settings = SimpleNamespace(hang_seconds=1e9, save_grace_seconds=120.0)
    context: Any = SimpleNamespace(settings=settings, draining=threading.Event())
    lease: Any = SimpleNamespace(expired=False, preempted_for=None, leaving=None, stop=StopRequest("checkpoint"))
    record_handler: Any = SimpleNamespace(
        state=AttemptState(last_output_at=now[0], training_started=True), log=SimpleNamespace(log_line=lambda *_: None)
    )
    process: Any = SimpleNamespace(send=lambda message: sent.append(message) or True)
    nothing: Any = None
    monitor = Monitor(context, lease, nothing, record_handler, process, nothing, nothing)

    def killed_at(second: float) -> bool:
        now[0] = 1000.0 + second
        return monitor._reason_to_kill() == "stop"

    assert not killed_at(0) and not killed_at(60)
    lease.stop = StopRequest("discard")
    assert not killed_at(60.1) and not killed_at(65) and killed_at(65.2)
    assert [one.stop.mode for one in sent] == ["checkpoint", "discard"]


def test_repeated_stop_request_does_not_extend_the_grace_period(now: list[float]) -> None:
    settings = SimpleNamespace(hang_seconds=1e9, save_grace_seconds=120.0)
    context: Any = SimpleNamespace(settings=settings, draining=threading.Event())
    context.draining.set()
    lease: Any = SimpleNamespace(expired=False, preempted_for=None, leaving=None, stop=None)
    record_handler: Any = SimpleNamespace(
        state=AttemptState(last_output_at=now[0], training_started=True), log=SimpleNamespace(log_line=lambda *_: None)
    )
    process: Any = SimpleNamespace(send=lambda _: True)
    nothing: Any = None
    monitor = Monitor(context, lease, nothing, record_handler, process, nothing, nothing)
    assert monitor._reason_to_kill() is None
    now[0], lease.stop = 1100.0, StopRequest("checkpoint")
    assert monitor._reason_to_kill() is None
    now[0] = 1121.0
    assert monitor._reason_to_kill() == "stop"
    lease.stop = StopRequest("checkpoint", grace_seconds=60.0)
    assert monitor._reason_to_kill() is None, "a request may set a deadline of its own"
    now[0] = 1181.5
    assert monitor._reason_to_kill() == "stop"


@pytest.mark.parametrize(("is_full", "is_over_budget"), [(True, False), (False, True)])
def test_output_is_not_read_while_too_much_waits_or_is_reported_and_the_process_does_not_count_as_hung(
    now: list[float], is_full: bool, is_over_budget: bool
) -> None:
    settings = SimpleNamespace(hang_seconds=10.0, save_after_seconds=1e9)
    context: Any = SimpleNamespace(settings=settings, draining=threading.Event())
    lease: Any = SimpleNamespace(
        expired=False, preempted_for=None, leaving=None, stop=None, silent_seconds=0.0, requested_stop=None, actions=[]
    )
    writer: Any = SimpleNamespace(is_full=is_full)
    record_handler: Any = SimpleNamespace(
        state=AttemptState(last_output_at=now[0], training_started=True),
        is_over_budget=is_over_budget,
        handle_output=pytest.fail,
    )
    nothing: Any = None
    monitor = Monitor(context, lease, writer, record_handler, nothing, nothing, nothing)
    for _ in range(3):
        now[0] += 8.0
        monitor._receive_output()
        assert monitor._reason_to_kill() is None


class TestHangOnSeveralHosts:
    """Before training, rank 0 may be silent because it waits for another host; who hangs is named."""

    @staticmethod
    def monitor(now: list[float], waiting: set[int], *parts: ActivePart, training_started: bool = False) -> Monitor:
        context: Any = SimpleNamespace(
            settings=SimpleNamespace(hang_seconds=10.0, save_after_seconds=1e9), draining=threading.Event()
        )
        lease: Any = SimpleNamespace(
            expired=False, preempted_for=None, leaving=None, stop=None, silent_seconds=0.0, requested_stop=None,
            actions=[], active_parts=parts,
        )  # fmt: skip
        state = AttemptState(last_output_at=now[0], training_started=training_started, waiting=waiting)
        handler: Any = SimpleNamespace(state=state)
        processes: Any = SimpleNamespace(identities=[None, None], suspended=lambda: ())
        nothing: Any = None
        return Monitor(context, lease, nothing, handler, processes, nothing, nothing)

    @staticmethod
    def part(silent: float, waiting: list[int], suspended: list[int] | None = None) -> ActivePart:
        activity = PartActivity(silent_seconds=silent, waiting=waiting, suspended=suspended or [])
        return ActivePart("wrk_b", 2, 2, activity)

    def test_a_host_that_still_loads_keeps_the_run_alive(self, now: list[float]) -> None:
        monitor = self.monitor(now, {0, 1}, self.part(0.5, []))
        now[0] += 20
        assert monitor._reason_to_kill() is None

    def test_all_silent_for_too_long_is_a_hang_and_the_rank_that_the_others_wait_for_is_named(
        self, now: list[float]
    ) -> None:
        monitor = self.monitor(now, {0, 1}, self.part(11.0, [2, 3], [3]))
        now[0] += 20
        assert monitor._reason_to_kill() == "hang"
        assert monitor._describe_hang() == {"suspended": (3,), "behind": ("rank 3 on worker wrk_b",)}
        monitor = self.monitor(now, {0, 1}, self.part(11.0, [2]))
        assert monitor._describe_hang() == {"suspended": (), "behind": ("rank 3 on worker wrk_b",)}

    def test_in_training_the_silence_of_rank_0_decides_and_nobody_is_blamed(self, now: list[float]) -> None:
        monitor = self.monitor(now, {0, 1}, self.part(0.5, []), training_started=True)
        now[0] += 20
        assert monitor._reason_to_kill() == "hang"
        assert monitor._describe_hang()["behind"] == ()


class TestRunOnSeveralHosts:
    """Ranks of other hosts that lost the connection end the run, with the end that made them lose it."""

    @staticmethod
    def ends(local: Exit | None, later: list[list[EndedPart]], now: list[float]) -> Exit:
        """Return the end of a run with two members; each renewal brings the next state of their parts."""
        settings = SimpleNamespace(lease_seconds=60.0, renew_seconds=10.0, hang_seconds=1e9)
        context: Any = SimpleNamespace(settings=settings, draining=threading.Event())
        states = iter(later)
        lease: Any = SimpleNamespace(stop=None, leaving=None, fenced=False, expired=False, ended_parts=next(states))

        def renew() -> None:
            lease.ended_parts = next(states, lease.ended_parts)

        lease.renew_now = renew
        killed: list[bool] = []
        processes: Any = SimpleNamespace(poll=lambda: local, kill=lambda: killed.append(True), drain=lambda: ())
        handler: Any = SimpleNamespace(take_part_end=lambda _: None, flush_output=lambda: None, state=AttemptState())
        memory: Any = SimpleNamespace(sample_if_due=lambda _: None)
        writer: Any = SimpleNamespace(raise_if_failed=lambda: None)
        monitor = Monitor(context, lease, writer, handler, processes, memory, (), ["wrk_b", "wrk_c"])
        monitor._receive_output = lambda: now.__setitem__(0, now[0] + 0.5)  # type: ignore[method-assign]
        monitor._reason_to_kill = lambda: None  # type: ignore[method-assign]
        end = monitor.run_until_exit()
        assert killed
        return end

    @pytest.fixture(autouse=True)
    def _no_sleep(self, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    lost = EndedPart("wrk_b", 1, 1, PartEnd(rank=1, exit_code=75, peer_lost=True))

    def test_it_ends_when_a_part_lost_the_connection_while_rank_0_waits(self, now: list[float]) -> None:
        assert self.ends(None, [[self.lost]], now) == Exit(peer_lost=True)
        assert now[0] < 1000 + 5 + 60 + 2, "seconds for the ranks here, then a lease for those elsewhere"

    def test_the_end_of_another_part_that_arrives_later_is_the_cause(self, now: list[float]) -> None:
        failed = EndedPart("wrk_c", 2, 1, PartEnd(rank=2, exit_signal=11))
        end = self.ends(Exit(peer_lost=True), [[], [self.lost], [self.lost, failed]], now)
        assert end == Exit(signal=11, rank=2)

    def test_a_worker_whose_lease_expires_later_is_the_cause(self, now: list[float]) -> None:
        end = self.ends(Exit(peer_lost=True), [[], [self.lost], [self.lost, EndedPart("wrk_c", 2, 1, None)]], now)
        assert end.part_problem == "worker wrk_c, which trained rank 2 of the run, was lost"

    def test_without_a_cause_it_waits_no_longer_than_until_all_parts_are_over(self, now: list[float]) -> None:
        other = EndedPart("wrk_c", 2, 1, PartEnd(rank=2, exit_code=75, peer_lost=True))
        assert self.ends(Exit(peer_lost=True), [[], [self.lost, other]], now) == Exit(peer_lost=True)
        assert now[0] < 1003
