"""One worker process: its identity, its connections, its heartbeat, and the leases that its threads hold."""

import importlib.util
import logging
import os
import socket
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from app import migrate
from app.config import Settings
from app.db import is_away, sync_engine
from app.home import HomeError
from app.ids import new_id
from app.queue import CONTROL_CHANNEL, events_channel
from app.runs import lifecycle
from app.runs.models import Run
from app.storage import Storage
from app.workers import registry
from app.workers.local import Notebook
from worker import devices, session
from worker.copies import Copies
from worker.fitness import Fitness
from worker.launcher import Launcher
from worker.remote import Remote
from worker.training.registry import installed as plugins_installed

if TYPE_CHECKING:
    from worker.lease import Lease

log = logging.getLogger(__name__)

_REDIS_PAUSE = 2.0
_DATABASE_PAUSE = 2.0


class Host:
    """What the supervisors of this process share."""

    def __init__(self, settings: Settings) -> None:
        if settings.database_url is None or settings.redis_url is None:
            raise ValueError("no database or Redis URL: start `anneal up` first, or set both ANNEAL_…_URL variables")
        self.settings = settings
        self.id = new_id("wrk")
        self.name = socket.gethostname()
        self.storage = Storage(settings)
        self.fitness = Fitness(self.storage.root)
        self.machine = devices.find(settings)
        self.kind = self.machine.devices[0].kind
        self.launcher = Launcher(settings)
        can_train = importlib.util.find_spec("torch") is not None
        self.backends = ["celery", "fake"] if can_train else ["fake"]
        self.engine = sync_engine(settings.database_url, pool_size=self.machine.slots + 1)
        # Renewals must not queue behind a large append, nor hang with it: their own connections, short time-outs.
        self.lease_engine = sync_engine(
            settings.database_url,
            pool_size=self.machine.slots + 1,
            name="anneal-lease",
            statement_seconds=max(settings.renew_seconds, 0.5),
        )
        self.redis: Redis = Redis.from_url(
            settings.redis_url, socket_connect_timeout=1, socket_timeout=1, decode_responses=True
        )
        self.closing = threading.Event()
        """No further run is taken; what is at work finishes."""
        self.draining = threading.Event()
        """What is at work saves and is handed back now."""
        self.drained_at = float("inf")
        """Monotonic time at which `draining` was set."""
        self.copies: Copies | None = None
        """Second copies of checkpoints, where the operator wants them."""
        if settings.checkpoint_url:
            self.copies = Copies(Remote(settings.checkpoint_url, self.storage), self.storage, self.engine)
        self._notebook = Notebook(settings.home, self.id)
        self._leases: dict[str, Lease] = {}
        self._to_wake: set[str] = set()
        self._wake_up = threading.Event()
        self._beat_now = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._ended = threading.Event()

    def start(self) -> bool:
        """Clear away what a dead predecessor left, register (as soon as the database is there), beat and listen.

        False when meanwhile the worker was told to end. HomeError when the database is older than this code.
        """
        self._notebook.open()
        self.launcher.start()
        while not self._sign_on():
            if self.closing.wait(_DATABASE_PAUSE):
                return False
        self._heartbeat.start()
        if self.copies:
            self.copies.start()
        for name, work in (("control", self._listen), ("wake-ups", self._tell)):
            threading.Thread(target=work, name=name, daemon=True).start()
        log.info(
            "worker %s on %s: %d slot(s) of %s", self.id, self.name, self.machine.slots, self.machine.devices[0].name
        )
        return True

    def take_no_more(self) -> None:
        """Take no more runs; those at work finish."""
        self.closing.set()
        self._notebook.update(draining=True)
        self._beat_now.set()

    def drain(self) -> None:
        """Take no more runs; those at work save and are handed back."""
        self.drained_at = min(self.drained_at, time.monotonic())
        self.draining.set()
        self.closing.set()
        self._beat_now.set()

    def close(self) -> None:
        """Sign off and end what is left."""
        self._ended.set()
        self._wake_up.set()
        self._beat_now.set()
        self.launcher.stop()
        if self.copies:
            self.copies.close()
        if self._heartbeat.is_alive():
            self._heartbeat.join(_DATABASE_PAUSE)  # a beat on its way would say that we are still there
        try:
            with self.engine.begin() as connection:
                connection.execute(registry.gone([self.id]))
        except SQLAlchemyError as error:
            log.warning("could not sign off, the missing heartbeat will tell: %s", error)
        self.engine.dispose()
        self.lease_engine.dispose()
        self._notebook.close()

    def hold(self, lease: "Lease") -> None:
        """A lease that control messages may concern."""
        self._leases[lease.run_id] = lease
        self._note_runs()

    def release(self, lease: "Lease") -> None:
        """The lease is over; one on a later attempt of the same run stays."""
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]
        self._note_runs()

    def wake(self, run_id: str) -> None:
        """Have streams told of new events; without Redis they poll. Never waits."""
        self._to_wake.add(run_id)
        self._wake_up.set()

    def _tell(self) -> None:
        while not self._ended.is_set():
            self._wake_up.wait()
            self._wake_up.clear()
            # Sets are popped from one at a time: threads that add meanwhile are served by the next round.
            while self._to_wake:
                run_id = self._to_wake.pop()
                try:
                    self.redis.publish(events_channel(run_id), "")
                except (RedisError, OSError) as error:
                    log.info("no wake-ups for a while: %s", error)
                    self._ended.wait(_REDIS_PAUSE)

    def _sign_on(self) -> bool:
        try:
            with self.engine.begin() as connection:
                if older := migrate.too_old(migrate.current(connection)):
                    raise HomeError(older)
                self._bury_dead(connection)
                connection.execute(registry.forget(older_than_days=30))
                self._register(connection)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            log.warning("the database cannot be reached, trying again: %s", error)
            return False
        return True

    def _bury_dead(self, connection: Connection) -> None:
        """Take back at once what workers of this machine had whose process is gone."""
        here = session.Identity.of(os.getpid(), 0)
        dead = [
            row.id
            for row in connection.execute(registry.on_host(self.name))
            if row.boot_id == _place(here) and not session.Identity.of(row.pid, row.process_started).exists
        ]
        if dead:
            moved = connection.execute(lifecycle.reap_dead(dead)).mappings().all()
            connection.execute(registry.gone(dead))
            log.warning("%d dead worker(s) of this machine found, %d run(s) taken back", len(dead), len(moved))

    def _register(self, connection: Connection) -> None:
        me = session.Identity.of(os.getpid(), session.start_time(os.getpid()))
        connection.execute(
            registry.register(
                {
                    "id": self.id,
                    "host": self.name,
                    "pid": me.pid,
                    "boot_id": _place(me),
                    "process_started": me.start_time,
                    "version": version("anneal"),
                    "slots": self.machine.slots,
                    "backends": self.backends,
                    "launch_mode": self.launcher.mode,
                    "launch_reason": self.launcher.reason,
                    "plugins": plugins_installed(),
                }
            )
        )
        connection.execute(
            registry.offer(
                [
                    {
                        "worker_id": self.id,
                        "index": device.index,
                        "uid": device.id,
                        "kind": device.kind,
                        "name": device.name,
                        "memory_mb": device.memory_bytes // 2**20,
                    }
                    for device in self.machine.devices
                ]
            )
        )

    def _beat(self) -> None:
        while True:
            self._beat_now.wait(self.settings.renew_seconds)
            self._beat_now.clear()
            if self._ended.is_set():
                return
            state = "draining" if self.closing.is_set() else "online"
            try:
                with self.lease_engine.begin() as connection:
                    alive = registry.beat(self.id, state, self.launcher.mode, self.launcher.reason)
                    if connection.execute(alive).one_or_none() is None:
                        self._register(connection)
                    if self.closing.is_set():
                        self._note_progress(connection)
            except SQLAlchemyError as error:
                log.info("heartbeat missed: %s", error)

    def _note_runs(self) -> None:
        self._notebook.update(runs={run_id: [None, None] for run_id in list(self._leases)})

    def _note_progress(self, connection: Connection) -> None:
        """For whoever waits for the last runs to finish."""
        steps = select(Run.id, Run.current_step, Run.total_steps).where(Run.id.in_(list(self._leases)))
        found = {row.id: [row.current_step, row.total_steps] for row in connection.execute(steps)}
        self._notebook.update(runs={run_id: found.get(run_id, [None, None]) for run_id in list(self._leases)})

    def _listen(self) -> None:
        """Requests to stop, sooner than the next renewal would bring them."""
        while not self._ended.is_set():
            try:
                with self.redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(CONTROL_CHANNEL)
                    while not self._ended.is_set():
                        message = pubsub.get_message(timeout=0.5)
                        lease = self._leases.get(message["data"]) if message else None
                        if lease:
                            lease.renew_now()
            except (RedisError, OSError) as error:
                log.info("control messages are away, renewals bring requests to stop: %s", error)
                self._ended.wait(_REDIS_PAUSE)


def _place(identity: session.Identity) -> str:
    """Boot and pid namespace: where a process id means one process."""
    return f"{identity.boot_id}/{identity.namespace}"
