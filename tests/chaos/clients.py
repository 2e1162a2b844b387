"""Clients of a campaign: they create, stop, resume and stream runs, retry on every error, and record the responses."""

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
from httpx_sse import connect_sse

from tests.chaos.history import Creation, StopCall, Transcript
from tests.chaos.profiles import PLANS, Plan, body
from tests.chaos.world import World

UNFINISHED = 7
FOLLOWED = 0.5
STOPPED = 0.25
RESUMED = 0.6


class Clients:
    """All clients of one segment of a campaign."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.hits: Counter[str] = Counter()
        """Windows that the clients hit."""
        self.stops: list[StopCall] = []
        self._seed = seed
        self._lock = threading.Lock()
        self._creations: dict[str, tuple[str, list[str], str | None]] = {}
        self._profile_of: dict[str, str] = {}
        self._ended: set[str] = set()
        self._spared: set[str] = set()
        self._streams: list[_Stream] = []
        self._wanted: list[tuple[Plan, int]] = []
        self._over = threading.Event()
        self._failures: list[Exception] = []
        work = {
            "creator 0": partial(self._create_for_ever, 0),
            "creator 1": partial(self._create_for_ever, 1),
            "stopper": self._stop_for_ever,
            "resumer": self._resume_for_ever,
            "deaf reader": self._never_read,
        }
        self._threads = [
            threading.Thread(target=self._note_failure, args=(todo,), name=name, daemon=True)
            for name, todo in work.items()
        ]
        self._watched = time.monotonic()

    def start(self) -> None:
        """Start all client threads."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Stop new requests, and raise what has ended a client; streams continue until their runs end."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self._failures:
            raise ExceptionGroup("clients have ended", self._failures)

    def join_streams(self, timeout: float) -> None:
        """Wait for the `end` event of every followed run."""
        deadline = time.monotonic() + timeout
        for stream in self._streams:
            stream.thread.join(max(0.0, deadline - time.monotonic()))
            stream.over.set()

    def want(self, name: str, priority: int = 0) -> None:
        """Queue a run of this profile to be created next."""
        with self._lock:
            self._wanted.append((PLANS[name], priority))

    def create(self, name: str, priority: int = 0) -> str:
        """Create a run of this profile and return its id after the API has accepted it."""
        rng = random.Random(f"{self._seed} {time.monotonic_ns()}")
        return self._create(rng, PLANS[name], priority, is_spared=True)

    def stop(self, run_id: str, save: bool = True, attempts: int = 200) -> int | None:
        """Request a stop until there is a response; return its status code, or None after all attempts failed."""
        for _ in range(attempts):
            try:
                with self.world.client() as client:
                    answer = client.post(f"/v1/runs/{run_id}/stop", json={"save_checkpoint": save})
            except httpx.HTTPError:
                self._over.wait(0.1)
                continue
            if answer.status_code == 202:
                self.stops.append(StopCall(run_id, time.time(), save))
            if answer.status_code < 500:
                assert answer.status_code in (202, 409), answer.text
                return answer.status_code
            self._over.wait(0.1)
        return None

    def creations(self) -> tuple[Creation, ...]:
        """Return all creation requests with their responses."""
        return tuple(
            Creation(key, profile, tuple(answers), parent)
            for key, (profile, answers, parent) in self._creations.items()
        )

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the events that each reader received."""
        return tuple(
            Transcript(stream.run_id, tuple(stream.received), stream.connections, stream.ended)
            for stream in self._streams
        )

    def profile_of(self, run_id: str) -> str | None:
        """Return the profile of a run."""
        return self._profile_of.get(run_id)

    def _note_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failures.append(error)

    # Creating

    def _create_for_ever(self, number: int) -> None:
        rng = random.Random(f"{self._seed} creator {number}")
        plans = [plan for plan in PLANS.values() for _ in range(plan.weight)]
        while not self._over.is_set():
            with self._lock:
                wanted_plan = self._wanted.pop(0) if self._wanted else None
            if wanted_plan is None and self._unfinished() >= UNFINISHED:
                self._over.wait(0.1)
                continue
            plan, priority = wanted_plan or (rng.choice(plans), rng.choice((0, 0, 0, 5)))
            self._create(rng, plan, priority)

    def _unfinished(self) -> int:
        # Query at most twice a second, because two creators poll continuously.
        if time.monotonic() - self._watched > 0.5:
            self._watched = time.monotonic()
            with contextlib.suppress(Exception):  # Postgres may be down
                rows = self.world.rows("SELECT id FROM runs WHERE status IN ('completed', 'failed', 'cancelled')")
                self._ended = {row["id"] for row in rows}
        return len(self._profile_of.keys() - self._ended)

    def _create(self, rng: random.Random, plan: Plan, priority: int, is_spared: bool = False) -> str:
        key = f"{plan.name}-{rng.getrandbits(64):x}"
        request = body(plan, self.world.datasets, priority)
        answers: list[str] = []
        with self._lock:
            self._creations[key] = (plan.name, answers, None)
        run_id = self._post_until_accepted("/v1/runs", key, request)
        answers.append(run_id)
        if is_spared:  # it is reserved for a fault
            self._spared.add(run_id)
        self._profile_of[run_id] = plan.name
        if rng.random() < 0.15:  # like a client that lost the response
            answers.append(self._post_until_accepted("/v1/runs", key, request))
            self.hits["creation replayed"] += 1
        self._maybe_follow(rng, run_id)
        return run_id

    def _post_until_accepted(self, path: str, key: str, request: dict[str, Any]) -> str:
        failed = False
        while True:
            try:
                with self.world.client() as client:
                    answer = client.post(path, json=request, headers={"Idempotency-Key": key})
            except httpx.HTTPError:
                failed = True
                self._over.wait(0.1)
                continue
            if answer.status_code == 202:
                self.hits["creation tried again after an error"] += failed
                run_id: str = answer.json()["id"]
                return run_id
            # While the only worker with two devices is replaced, a run that needs both is refused.
            is_away = answer.status_code == 422 and answer.json()["code"] == "too_many_devices"
            assert is_away or answer.status_code >= 500, f"{path}: {answer.status_code} {answer.text}"
            failed = True
            self._over.wait(0.1)

    # Stopping and resuming

    def _stop_for_ever(self) -> None:
        rng = random.Random(f"{self._seed} stopper")
        decided: set[str] = set()
        while not self._over.wait(0.1):
            for run_id in list(self._profile_of.keys() - decided - self._spared):
                decided.add(run_id)
                plan = PLANS[self._profile_of[run_id]]
                if plan.weight and rng.random() < STOPPED:
                    self._over.wait(rng.uniform(0, 1.5))
                    self.stop(run_id, save=rng.random() < 0.8)

    def _resume_for_ever(self) -> None:
        rng = random.Random(f"{self._seed} resumer")
        decided: set[str] = set()
        while not self._over.wait(0.2):
            try:
                ended = self.world.rows(
                    "SELECT id FROM runs WHERE status IN ('cancelled', 'failed') AND checkpoint_step IS NOT NULL"
                )
            except Exception:  # Postgres is down
                continue
            for row in ended:
                run_id = row["id"]
                profile = self._profile_of.get(run_id)
                if run_id in decided or profile is None or PLANS[profile].must_fail_with:
                    continue
                decided.add(run_id)
                if rng.random() < RESUMED:
                    self._resume(rng, run_id, profile)

    def _resume(self, rng: random.Random, parent: str, profile: str) -> None:
        key = f"resume-{rng.getrandbits(64):x}"
        answers: list[str] = []
        with self._lock:
            self._creations[key] = (profile, answers, parent)
        while True:
            try:
                with self.world.client() as client:
                    answer = client.post(f"/v1/runs/{parent}/resume", json={}, headers={"Idempotency-Key": key})
            except httpx.HTTPError:
                self._over.wait(0.1)
                continue
            if answer.status_code < 500:
                break
            self._over.wait(0.1)
        if answer.status_code == 202:
            answers.append(answer.json()["id"])
            self._profile_of[answers[0]] = profile
            self._maybe_follow(rng, answers[0])
        else:  # its checkpoints were all damaged, or nothing is left to train
            code = answer.json().get("code")
            assert answer.status_code in (409, 422) and code in ("no_checkpoint", "nothing_left_to_train"), answer.text
            with self._lock:
                del self._creations[key]  # a run with this key would be a violation

    # Streaming

    def _maybe_follow(self, rng: random.Random, run_id: str) -> None:
        if rng.random() < FOLLOWED:
            stream = _Stream(self.world, run_id, rng.getrandbits(32))
            self._streams.append(stream)
            stream.thread.start()

    def _never_read(self) -> None:
        """Open streams and never read from them."""
        rng = random.Random(f"{self._seed} deaf")
        sockets: list[socket.socket] = []
        while not self._over.wait(1.0):
            known = list(self._profile_of)
            if not known:
                continue
            host = urlsplit(self.world.address(rng.choice(self.world.apis))).netloc
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                connection.settimeout(2)
                name, port = host.split(":")
                connection.connect((name, int(port)))
                head = f"GET /v1/runs/{rng.choice(known[-5:])}/events HTTP/1.1\r\nHost: {host}\r\n"
                connection.sendall(f"{head}Authorization: Bearer {self.world.key}\r\n\r\n".encode())
                self.hits["reader that never reads"] += 1
            sockets.append(connection)
            if len(sockets) > 30:
                sockets.pop(0).close()
        for connection in sockets:
            connection.close()


class _Stream:
    """Client that follows a run, reconnects after every disconnect, and disconnects at random."""

    def __init__(self, world: World, run_id: str, seed: int) -> None:
        self.run_id = run_id
        self.received: list[tuple[int, str, dict[str, Any]]] = []
        self.connections = 0
        self.ended = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, name=f"stream {run_id}", daemon=True)
        self._world = world
        self._random = random.Random(seed)

    def _follow(self) -> None:
        while not self.over.is_set() and not self.ended:
            self.connections += 1
            try:
                self._connect()
            except (httpx.HTTPError, httpx.StreamError, ValueError, KeyError):
                self.over.wait(0.1)  # the replica is down, or was just killed in the middle of a frame

    def _connect(self) -> None:
        headers = {"Last-Event-ID": str(self.received[-1][0])} if self.received else {}
        stay = self._random.choice((3, 20, 200, 10**9))
        with (
            self._world.client(timeout=20) as client,
            connect_sse(client, "GET", f"/v1/runs/{self.run_id}/events", headers=headers) as stream,
        ):
            stream.response.raise_for_status()
            for count, event in enumerate(stream.iter_sse(), 1):
                if self.over.is_set():
                    return
                self.received.append((int(event.id), event.event, json.loads(event.data)))
                if event.event == "end":
                    self.ended = True
                    return
                if count >= stay:
                    return
