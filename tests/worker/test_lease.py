"""How long a run counts as ours: from the moment a renewal was sent, by a clock that nobody sets."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, event

import app.infra.clock
from anneal.contracts.attempt.messages import ControlMessage
from app.config import Settings
from app.infra.clock import since_boot
from app.runs.queue.dispatcher import Dispatcher
from tests.rows import add_run, add_worker, claim, run_row
from worker import lease
from worker.lease import Lease

HOUR = 3600.0


class Process:
    """Stands for a training process: remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> None:
        self.sent.append(message)


class Context:
    """What a lease needs of its worker."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.lease_engine = engine
        self.leases = SimpleNamespace(hold=lambda _: None, release=lambda _: None)


class Clock:
    """Seconds since boot, which pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def held(settings: Settings, engine: Engine, sent: float) -> Lease:
    """The lease on a run that was just claimed; nothing renews it but the test."""
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=settings.lease_seconds)
    context: Any = Context(settings, engine)
    return Lease(context, run.id, run.lease_epoch, sent)


def test_a_renewal_counts_from_when_it_was_sent_however_late_its_answer(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from its answer, the trainer would outlive the lease that the database counts."""
    clock, process = Clock(), Process()
    monkeypatch.setattr(lease, "since_boot", clock)
    mine = held(settings, engine, clock.now)
    mine.guard(process)  # type: ignore[arg-type]
    clock.now = 1001.0

    def dawdle(_: Any) -> None:
        clock.now += 1.5

    event.listen(engine, "commit", dawdle)
    assert mine._renew()
    event.remove(engine, "commit", dawdle)
    assert mine.kill_at == 1001.0 + settings.kill_after_seconds
    assert process.sent[-1] == ControlMessage(renew_until=mine.kill_at)
    clock.now = mine.kill_at
    assert mine.expired


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_wall_clock_that_jumps_an_hour_changes_nothing(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """On the worker's machine, on the API's, or both: leases are counted by Postgres, waits by the monotonic clock."""
    from app.infra.broker import Broker
    from app.infra.db import async_engine

    wall, today = time.time, app.infra.clock.utc_now
    mine = held(settings, engine, since_boot())
    assert mine._renew()
    until = mine.kill_at
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    monkeypatch.setattr(app.infra.clock, "utc_now", lambda: today().fromtimestamp(wall() + jump, today().tzinfo))
    assert not mine.expired
    assert mine.kill_at == until
    assert mine._renew(), "renewing goes on"
    assert until <= mine.kill_at < until + 60
    waiting = async_engine(settings.database_url or "", pool_size=1)
    queue = Broker(settings)
    _, moved = await Dispatcher(waiting, queue, settings).round()
    await queue.close()
    await waiting.dispose()
    assert moved == [], "nobody is called lost"
    row = run_row(engine, mine.run_id)
    assert (row.status, row.lease_epoch, row.lost_count) == ("initializing", 1, 0)
