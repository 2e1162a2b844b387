"""The network over which training processes of several hosts meet."""

import socket

import pytest

from app.infra.errors import SetupError
from worker.group_network import MeetingPort, address_of


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
