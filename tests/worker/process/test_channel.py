"""Everything that a training process says arrives, in the order in which it was said."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from tests.waiting import eventually
from tests.worker.process.launching import Said, launch, start_launcher
from worker.process.channel import Channel
from worker.process.launcher import Launcher


@pytest.fixture(scope="module", params=["zygote", "cold"])
def launcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = start_launcher(tmp_path_factory.mktemp("home"), request.param)
    yield launcher
    launcher.stop()


class TestOutput:
    def test_every_way_to_print_arrives_in_exact_order(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(launch(launcher, tmp_path, "chatty"))
        assert said.to_the_end().code == 0
        ways = ["print", "stderr", "logging", "warning", "printf", "puts", "write", "subprocess", "record"]
        expected = []
        for round_ in (0, 11, 22):
            expected += [f"{round_ + n} {way}" for n, way in enumerate(ways)]
            expected.append(f"{round_ + 9} partial {round_ + 10} continued")
        lines = [line for line in said.text.splitlines() if "warnings.warn(" not in line]
        assert [line.partition("UserWarning: ")[2] or line for line in lines] == expected

    def test_streams_are_distinguished(self, launcher: Launcher, tmp_path: Path) -> None:
        said = Said(launch(launcher, tmp_path, "chatty"))
        said.to_the_end()
        stderr = b"".join(piece for source, piece in said.pieces if source == "stderr")
        assert b"1 stderr\n2 logging\n" in stderr
        assert b"print" not in stderr.replace(b"printf", b"")

    def test_a_line_of_a_megabyte_arrives_whole_and_an_oversized_record_cut(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        said = Said(launch(launcher, tmp_path, "big"))
        assert said.to_the_end().code == 0
        record = said.record("message")
        assert record["truncated"] is True
        assert len(record["line"]) > 10_000
        assert "\n" + "y" * 1_000_000 + "\nz\n" in said.text

    @pytest.mark.parametrize(
        ("how", "code", "signal"),
        [("segv", None, 11), ("kill", None, 9), ("exit", 7, None), ("exception", 1, None), ("system exit", 1, None)],
    )
    def test_the_last_output_arrives_however_the_process_ends(
        self, launcher: Launcher, tmp_path: Path, how: str, code: int | None, signal: int | None
    ) -> None:
        said = Said(launch(launcher, tmp_path, "die", how=how))
        end = said.to_the_end()
        assert (end.code, end.signal) == (code, signal)
        assert said.text.startswith("last print\nlast puts\nlast record\nhalf a line")
        if how == "segv":
            assert "Segmentation fault" in said.text
            assert "in die" in said.text
        if how == "exception":
            assert said.text.endswith("RuntimeError: on purpose\n")
        if how == "system exit":
            assert said.text.endswith("a reason\n")

    def test_a_child_that_writes_on_after_the_end_is_ended_with_the_session(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        said = Said(launch(launcher, tmp_path, "late_child"))
        assert said.to_the_end().code == 0
        assert "parent ends" in said.text


class TestChannel:
    @pytest.fixture
    def channel(self) -> Iterator[Channel]:
        channel = Channel()
        yield channel
        channel.close()

    def test_no_one_else_can_connect(self, channel: Channel) -> None:
        address = channel._receiver.getsockname()
        assert not Path(address).parent.exists()

    def test_an_unrelated_process_cannot_write_into_a_sender(self, channel: Channel) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unrelated, pytest.raises(OSError):
            unrelated.sendto(b"forged", channel._senders[0].getsockname())

    def test_a_writer_waits_for_a_slow_reader_and_loses_nothing(self, channel: Channel) -> None:
        report, *_ = channel.trainer_fds

        def write() -> None:
            for n in range(1000):
                os.write(report, str(n).encode())

        writer = threading.Thread(target=write)
        writer.start()
        got: list[bytes] = []
        while len(got) < 1000:
            pieces = channel.receive(10)
            assert pieces
            got += [piece for _, piece in pieces]
        writer.join()
        assert got == [str(n).encode() for n in range(1000)]

    def test_receive_returns_empty_after_its_timeout(self, channel: Channel) -> None:
        assert channel.receive(0.01) == []

    def test_a_single_write_of_200_kib_fits(self, channel: Channel) -> None:
        os.write(channel.trainer_fds[1], b"x" * 200 * 1024)
        assert channel.receive(1) == [("stdout", b"x" * 200 * 1024)]

    def test_sending_to_a_trainer_that_is_gone_says_so(self, channel: Channel) -> None:
        channel.release_trainer_ends()
        assert channel.send(ControlMessage(stop=StopRequest("checkpoint"))) is False

    def test_sending_through_a_closed_channel_says_so(self, channel: Channel) -> None:
        channel.close()
        assert channel.send(ControlMessage(renew_until=1.0)) is False

    def test_sending_to_a_trainer_that_does_not_listen_never_blocks(self, channel: Channel) -> None:
        eventually(lambda: not channel.send(ControlMessage(renew_until=1.0)), timeout=60, every=0.0)
