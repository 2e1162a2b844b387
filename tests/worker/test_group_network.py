"""The network over which training processes of several hosts meet."""

import socket
import time

import pytest

from app.infra.errors import SetupError
from tests.waiting import eventually
from worker import group_network
from worker.group_network import MeetingPort, MeetingWatch, address_of


def test_the_address_is_that_of_the_interface_and_an_unknown_one_is_named_with_those_that_exist() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(SetupError, match=r"ANNEAL_GROUP_INTERFACE=ib9: this machine has no such interface, but .*lo"):
        address_of("ib9")


def test_a_port_stays_reserved_until_another_socket_listens_on_it() -> None:
    port = MeetingPort("127.0.0.1")
    try:
        address, _, number = port.meeting.removeprefix("tcp://").rpartition(":")
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind((address, int(number)))
        with (
            socket.create_server((address, int(number))) as listener,
            socket.create_connection((address, int(number)), timeout=5) as client,
            listener.accept()[0] as accepted,
        ):
            assert accepted.getpeername() == client.getsockname()
    finally:
        port.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        MeetingPort("192.0.2.1")


def test_a_host_that_answers_is_reached_even_if_it_refuses_and_one_that_does_not_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        MeetingWatch(listener.getsockname(), "127.0.0.1", 0.05) as it,
    ):
        listener.accept()[0].close()
        listener.close()
        closed_at = time.monotonic()
        eventually(lambda: it._reached_at > closed_at, what="a refusal is an answer")

        def cut_off(*_: object) -> socket.socket:
            raise TimeoutError("timed out")

        monkeypatch.setattr(group_network.socket, "create_connection", cut_off)
        eventually(lambda: it.silent_seconds > 0.3, what="silence")
