"""Addresses that a guarded transport connects to."""

import pytest

from app.infra.guarded_http import is_public


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1",
        "fe80::1", "fe80::1%eth0", "fec0::1", "feff::1", "64:ff9b:1::7f00:1", "fc00::1", "fd00:ec2::254", "ff02::1",
        "2001:db8::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1",
        "2001:0:7f00:1::80ff:fffe", "", "localhost", "2130706433", "127.1",
    ],
)  # fmt: skip
def test_no_address_of_a_private_network_is_taken_for_one_of_the_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)
