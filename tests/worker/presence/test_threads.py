"""Each thread of a worker works by itself: publisher and listener without a database, the heartbeat without Redis."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import Engine, delete, select

from app.config import Settings
from app.infra.ids import new_id
from app.tables.workers import Device, Worker
from app.workers.status_files import WorkerStatusFile
from tests.waiting import eventually
from worker.context import WorkerContext
from worker.devices import find_machine
from worker.presence.control_listener import ControlListener
from worker.presence.heartbeat import Heartbeat
from worker.presence.held_leases import HeldLeases
from worker.presence.publisher import Publisher
from worker.presence.registration import Registration
from worker.process.launcher import Launcher
from worker.service import WorkerService


def test_published_name_reaches_the_listener_of_another_worker(settings: Settings) -> None:
    redis: Redis = Redis.from_url(settings.redis_url or "", decode_responses=True)
    names: list[str] = []
    listener, publisher = ControlListener(redis, names.append), Publisher(redis)
    listener.start()
    publisher.start()

    def is_heard() -> bool:
        publisher.signal_control("run_1")  # again until the listener has subscribed
        return "run_1" in names

    try:
        eventually(is_heard, what="the name arrives")
    finally:
        listener.close()
        publisher.close()


def test_message_that_redis_does_not_take_delays_no_caller_and_costs_no_later_one() -> None:
    is_away, tries = threading.Event(), threading.Event()
    published: list[tuple[str, str]] = []

    def publish(channel: str, message: str) -> None:
        tries.set()
        if is_away.is_set():
            raise ConnectionError("away")
        published.append((channel, message))

    redis: Any = SimpleNamespace(publish=publish)
    is_away.set()
    publisher = Publisher(redis)
    publisher.start()
    publisher.wake_streams("run_1")
    assert tries.wait(30)
    is_away.clear()
    publisher.signal_control("run_2")
    eventually(lambda: [message for _, message in published] == ["run_2"], what="the later message is published")
    publisher.close()


def test_worker_whose_row_was_deleted_is_registered_again_by_a_heartbeat(settings: Settings, engine: Engine) -> None:
    settings = settings.model_copy(update={"slots": 1})
    worker_id, closing = new_id("wrk"), threading.Event()
    registration = Registration(settings, worker_id, "here", find_machine(settings), ["fake"], Launcher(settings), None)
    leases = HeldLeases(WorkerStatusFile(settings.home, worker_id))
    heartbeat = Heartbeat(engine, registration, leases, closing, 3600.0)
    heartbeat.start()

    def states() -> list[Any]:
        heartbeat.beat_now()
        with engine.connect() as connection:
            query = select(Worker.state, Device.index).join(Device, Device.worker_id == Worker.id)
            return [tuple(row) for row in connection.execute(query)]

    eventually(lambda: states() == [("online", 0)], what="it is registered, with its device")
    with engine.begin() as connection:
        connection.execute(delete(Device))
        connection.execute(delete(Worker))
    closing.set()
    eventually(lambda: states() == [("draining", 0)], what="it is registered again")
    heartbeat.close()


def test_closing_worker_ends_its_heartbeat_before_its_processes(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat brings parts of runs to train, which nothing would end any more."""
    context = WorkerContext(settings.model_copy(update={"slots": 1}))
    service = WorkerService(context)
    has_ended: list[bool] = []
    heartbeat = service._heartbeat
    monkeypatch.setattr(context.launcher, "stop", lambda: has_ended.append(heartbeat._ended.is_set()))
    heartbeat.start()
    service.close()
    assert has_ended == [True]
