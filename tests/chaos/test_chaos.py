"""Short form of `make chaos`: every fault once, every window hit, no promise broken."""

import pytest

from tests.chaos.campaign import run
from tests.chaos.faults import FAULTS
from tests.chaos.report import show


@pytest.mark.timeout(900)
def test_every_promise_holds_under_every_fault() -> None:
    result = run(seed=20, rounds=len(FAULTS))
    print(show(result))
    assert result.violations == []
    assert result.missed == []
    assert result.counted["events"] > 5000
