"""Stop requests that become less while they are followed have their own time; too much output is not read."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from app.contracts.attempt.part_end import PartEnd
from app.contracts.stop import StopRequest
from worker.attempts.monitor import Monitor
from worker.lease import EndedPart
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
    record_handler: Any = SimpleNamespace(last_output_at=now[0], training_started=True, say=lambda *_: None)
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


def test_to_ask_for_the_same_once_more_gives_no_more_time(now: list[float]) -> None:
    settings = SimpleNamespace(hang_seconds=1e9, save_grace_seconds=120.0)
    context: Any = SimpleNamespace(settings=settings, draining=threading.Event())
    context.draining.set()
    lease: Any = SimpleNamespace(expired=False, preempted_for=None, leaving=None, stop=None)
    record_handler: Any = SimpleNamespace(last_output_at=now[0], training_started=True, say=lambda *_: None)
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
        last_output_at=now[0], training_started=True, is_over_budget=is_over_budget, take=pytest.fail
    )
    nothing: Any = None
    monitor = Monitor(context, lease, writer, record_handler, nothing, nothing, nothing)
    for _ in range(3):
        now[0] += 8.0
        monitor._take()
        assert monitor._reason_to_kill() is None


class TestProcessesThatHaveLostEachOther:
    """On several hosts, the first cause may be that of another host's process."""

    def monitor(self, parts: list[EndedPart], poll: Exit | None, others: int) -> tuple[Any, list[str]]:
        calls: list[str] = []
        settings = SimpleNamespace(lease_seconds=60.0)
        lease: Any = SimpleNamespace(ended_parts=parts, renew_now=lambda: calls.append("renew"))
        processes: Any = SimpleNamespace(poll=lambda: poll, kill=lambda: calls.append("kill"))
        nothing: Any = None
        context: Any = SimpleNamespace(settings=settings)
        return Monitor(context, lease, nothing, nothing, processes, nothing, nothing, others), calls

    def test_wait_for_the_cause_of_a_part(self, now: list[float]) -> None:
        parts: list[EndedPart] = []
        monitor, calls = self.monitor(parts, Exit(peer_lost=True), others=1)
        assert monitor._end() is None and calls == ["kill", "renew"]
        now[0] += 5.0
        assert monitor._end() is None and calls == ["kill", "renew", "renew"]
        parts.append(EndedPart("wrk_b", 1, 1, PartEnd(exit_code=1, rank=1)))
        found = monitor._end()
        assert (found.code, found.rank) == (1, 1)

    def test_end_once_all_parts_are_over_without_a_cause(self) -> None:
        lost = EndedPart("wrk_b", 1, 1, PartEnd(rank=1, exit_code=75, peer_lost=True))
        monitor, calls = self.monitor([lost], None, others=1)
        assert monitor._end() == Exit(peer_lost=True), "rank 0 would wait for the part in vain"
        assert calls == ["kill"]

    def test_end_after_a_lease_at_most(self, now: list[float]) -> None:
        monitor, _ = self.monitor([], Exit(peer_lost=True), others=1)
        assert monitor._end() is None
        now[0] += 61.0
        assert monitor._end() == Exit(peer_lost=True)

    def test_end_at_once_on_one_host(self) -> None:
        monitor, _ = self.monitor([], Exit(peer_lost=True), others=0)
        assert monitor._end() == Exit(peer_lost=True)
