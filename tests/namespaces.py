"""Network namespaces that stand for hosts of one network, whose links can be cut; they need root."""

import os
import shutil
import subprocess
from pathlib import Path

INTERFACE = "group0"
"""Name of the interface in each namespace."""


class Network:
    """A bridge of this machine, to which each namespace is connected by a link."""

    def __init__(self) -> None:
        self._name = f"anl{os.getpid() % 100_000}"
        self._prefix = f"10.231.{os.getpid() % 250}"
        self._hosts: list[str] = []
        self.address = f"{self._prefix}.1"
        """Address of this machine."""
        _ip("link", "add", self._name, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")

    def add(self) -> list[str]:
        """Add a namespace; return the command under which a program runs in it."""
        number = len(self._hosts)
        namespace, outside = f"{self._name}n{number}", self._link(number)
        self._hosts.append(namespace)
        _ip("netns", "add", namespace)
        # Names are looked up backwards, and nothing would answer.
        names = Path("/etc/netns") / namespace / "hosts"
        names.parent.mkdir(parents=True)
        addresses = [f"{self._prefix}.{last} host-{last}" for last in range(1, 12)]
        names.write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
        _ip("link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _ip("link", "set", outside, "master", self._name, "up")
        _ip("-n", namespace, "address", "add", f"{self.address_of(number)}/24", "dev", INTERFACE)
        _ip("-n", namespace, "link", "set", INTERFACE, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return ["ip", "netns", "exec", namespace]

    def cut(self, number: int) -> None:
        """Cut the link of a namespace. Packets are dropped without an error on either side."""
        _ip("link", "set", self._link(number), "down")

    def separate(self) -> None:
        """Let the namespaces reach this machine only, and not each other. Packets are dropped without an error."""
        for number in range(len(self._hosts)):
            _ip("link", "set", self._link(number), "type", "bridge_slave", "isolated", "on")

    def address_of(self, number: int) -> str:
        """Return the address of a namespace."""
        return f"{self._prefix}.{number + 2}"

    def close(self) -> None:
        """Remove everything."""
        for number, namespace in enumerate(self._hosts):
            _ip("link", "del", self._link(number))
            _ip("netns", "del", namespace)
            shutil.rmtree(Path("/etc/netns") / namespace)
        _ip("link", "del", self._name)

    def _link(self, number: int) -> str:
        return f"{self._name}v{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
