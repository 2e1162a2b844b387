"""A run on two hosts of which one loses its network: never two trainers, and the run completes on others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.proxy import Proxies
from tests.e2e.test_hosts import Hosts, is_running
from tests.namespaces import INTERFACE, WHY_NOT, Network
from tests.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


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
