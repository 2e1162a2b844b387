"""Signs of life: cheap, never in the way, and given only for what got done."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from worker.checkpoint_files import manifest
from worker.wire import heartbeat
from worker.wire.heartbeat import HEARTBEAT, Heartbeat, heartbeat_while_growing
from worker.wire.reporter import Reporter


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def heard(ours: socket.socket) -> list[bytes]:
    """All that was said so far."""
    said = []
    while True:
        try:
            said.append(ours.recv(1 << 20))
        except BlockingIOError:
            return said


class TestHeartbeat:
    def test_a_sign_at_once_and_then_one_a_second_however_often_it_is_asked_for(
        self, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours, theirs = ends
        now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
        beat = Heartbeat(theirs.fileno()).send_if_due
        for hundredth in range(250):
            now = 1000.0 + hundredth / 100
            beat()
        assert heard(ours) == [HEARTBEAT] * 3

    def test_it_costs_a_step_next_to_nothing(self, ends: tuple[socket.socket, socket.socket]) -> None:
        beat = Heartbeat(ends[1].fileno()).send_if_due
        best = float("inf")
        for _ in range(20):  # the best of many: this machine may be busy
            began = time.perf_counter()
            for _ in range(1000):
                beat()
            best = min(best, (time.perf_counter() - began) / 1000)
        assert best < 10e-6

    def test_it_does_not_wait_for_a_supervisor_that_is_behind(
        self, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours, theirs = ends
        monkeypatch.setattr(heartbeat, "_SECONDS_BETWEEN", 0.0)
        beat = Heartbeat(theirs.fileno()).send_if_due
        beating = threading.Thread(target=lambda: [beat() for _ in range(10_000)], daemon=True)
        beating.start()
        beating.join(10)
        waits = beating.is_alive()
        said = set(heard(ours))
        eventually(lambda: heard(ours) is not None and not beating.is_alive())
        assert not waits, "until somebody reads"
        assert said == {HEARTBEAT}
        beat()
        assert heard(ours) == [HEARTBEAT], "and what follows is heard again"

    def test_it_leaves_the_socket_of_the_records_open_and_as_it_is(
        self, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        ours, theirs = ends
        report = Reporter(theirs.fileno())
        report.alive()
        assert os.get_blocking(theirs.fileno())
        del report
        Reporter(theirs.fileno()).message("still open")
        sign, message = heard(ours)
        assert (sign, json.loads(message)["line"]) == (HEARTBEAT, "still open")

    def test_by_hand_nothing_is_printed(self, capfd: pytest.CaptureFixture[str]) -> None:
        Reporter(None).alive()
        assert capfd.readouterr() == ("", "")

    def test_a_process_whose_supervisor_is_gone_ends_at_its_next_sign(self) -> None:
        code = (
            "import socket; from worker.wire.reporter import Reporter\n"
            "ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); ours.close()\n"
            "Reporter(theirs.fileno()).alive(); print('still here')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")


class TestCheckpoints:
    def test_a_large_file_gives_signs_while_it_is_read_and_each_when_it_is_on_the_disk(self, tmp_path: Path) -> None:
        signs: list[int] = []
        staging = tmp_path / ".tmp"
        staging.mkdir()
        with (staging / "weights").open("wb") as weights:
            weights.truncate(64 << 20)
        manifest.write_manifest(staging, 1, {}, lambda: signs.append(1))
        assert len(signs) >= 5
        signs.clear()
        manifest.commit(staging, tmp_path / "checkpoint-1", lambda: signs.append(1))
        assert len(signs) == 2, "one for the weights, one for the manifest"


class TestWhileGrowing:
    def test_a_sign_for_growth_and_none_without(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        signs: list[int] = []
        held = heartbeat._bytes_held

        def look(folders: Any) -> int:
            looks.append(1)
            return held(folders)

        def further_looks(count: int) -> None:
            until = len(looks) + count
            eventually(lambda: len(looks) >= until, timeout=30)

        monkeypatch.setattr(heartbeat, "_bytes_held", look)
        with heartbeat_while_growing(lambda: signs.append(1), tmp_path, tmp_path / "comes later", every=0.01):
            further_looks(5)
            assert signs == []
            (tmp_path / "comes later").mkdir()
            (tmp_path / "comes later" / "weights").write_bytes(b"x")
            eventually(lambda: signs, timeout=30)
            further_looks(2)
            after = len(signs)
            (tmp_path / "comes later" / "weights").rename(tmp_path / "weights")
            further_looks(5)
            assert len(signs) <= after + 1, "moved, and counted twice at most in one look"
            (tmp_path / "weights").unlink()
            further_looks(5)
        settled = len(looks)
        assert len(signs) <= after + 1
        assert not [thread for thread in threading.enumerate() if thread.name == "growth"]
        assert len(looks) == settled

    def test_a_file_that_has_its_length_before_its_bytes_grows(self, tmp_path: Path) -> None:
        signs: list[int] = []
        with (tmp_path / "weights").open("wb") as file:
            file.truncate(1 << 22)
            with heartbeat_while_growing(lambda: signs.append(1), tmp_path, every=0.01):
                eventually(lambda: [t for t in threading.enumerate() if t.name == "growth"])
                place = 0

                def written() -> list[int]:
                    nonlocal place
                    file.seek(place)
                    file.write(b"y" * 65536)
                    file.flush()
                    place = (place + 65536) % (1 << 22)
                    return signs

                eventually(written, timeout=30)
        assert (tmp_path / "weights").stat().st_size == 1 << 22
