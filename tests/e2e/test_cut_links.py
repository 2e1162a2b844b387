"""A run on two hosts of which one loses its network: never two trainers, and the run completes on others."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.proxy import Proxies
from tests.e2e.test_hosts import Hosts, is_running
from tests.namespaces import INTERFACE, Network
from tests.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.needs("network namespaces")]


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture
def hosts(tmp_path: Path, network: Network) -> Iterator[Hosts]:
    """Three workers in namespaces, which reach the database and Redis only over their link."""
    hosts, proxies = Hosts(tmp_path), Proxies()
    settings = hosts.stack.settings
    ways = {
        name: proxies.to(getattr(settings, name) or "", network.address).url for name in ("database_url", "redis_url")
    }
    for _ in range(3):
        hosts.add(under=network.add(), group_interface=INTERFACE, **ways)
    yield hosts
    hosts.stack.close()
    proxies.close()


@pytest.mark.parametrize("whose", ["lead", "member"])
def test_a_host_that_is_cut_off_ends_its_part_and_the_run_completes_on_others(
    hosts: Hosts, network: Network, whose: str
) -> None:
    run_id = hosts.start(max_steps=80, save_steps=5)
    hosts.stack.until_step(run_id, 15, timeout=180)
    lead, (member,) = hosts.of(run_id)
    before = hosts.trainers(lead) + hosts.trainers(member)
    assert len(before) == 2 and all(map(is_running, before))
    victim = lead if whose == "lead" else member
    network.cut(list(hosts.homes).index(victim))
    shown = hosts.completes_again(run_id, before, timeout=180)
    steps = [line["step"] for line in hosts.stack.journal(run_id) if line["event"] == "step"]
    assert steps[-1] == 80 and shown["current_step"] == 80
    eventually(lambda: not any(map(is_running, before)), what="no process of the first attempt is left")
    assert victim.process.poll() is None, "the worker itself waits for its network"


def test_hosts_that_lose_each_other_but_not_the_database_end_the_attempt_long_before_the_hang_watch(
    hosts: Hosts, network: Network
) -> None:
    run_id = hosts.start(max_steps=5000, save_steps=5)
    hosts.stack.until_step(run_id, 15, timeout=180)
    lead, (member,) = hosts.of(run_id)
    before, name = hosts.trainers(lead) + hosts.trainers(member), hosts.id_of(member)
    network.separate()
    eventually(lambda: hosts.stack.run(run_id)["attempt"] > 1, timeout=120, what="another attempt")
    assert not any(map(is_running, before))
    reason = next(why for why in hosts.reasons(run_id) if "could not be reached" in why)
    assert reason.startswith(f"worker {name}, which trained rank 1 of the run, ended its part: the host of rank 0")


def test_group_processes_listen_only_on_the_address_of_the_interface(hosts: Hosts, network: Network) -> None:
    run_id = hosts.start()
    hosts.stack.until_step(run_id, 1, timeout=180)
    lead, (member,) = hosts.of(run_id)
    for worker in (lead, member):
        (trainer,) = hosts.trainers(worker)
        own = network.address_of(list(hosts.homes).index(worker))
        assert listening(trainer) <= {own}, "gloo listens for each peer"
    assert listening(hosts.trainers(lead)[0]), "rank 0 listens for the others"


def listening(pid: int) -> set[str]:
    """Addresses on which something listens in the namespace of a process."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                words = [local[at : at + 8] for at in range(0, len(local.partition(":")[0]), 8)]
                packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
                ports.add(socket.inet_ntop(socket.AF_INET if name == "tcp" else socket.AF_INET6, packed))
    return ports
