"""Short form of `make chaos`: every fault once, no promise broken.

A busy machine may miss the window that a fault aims at. The long form, `make chaos`, fails for a window that was never
hit; the short form fails for broken promises only.
"""

import pytest

from tests.chaos.campaign import run
from tests.chaos.faults import FAULTS
from tests.chaos.report import show


@pytest.mark.timeout(900)
def test_every_promise_holds_under_every_fault() -> None:
    result = run(seed=20, rounds=len(FAULTS))
    print(show(result))
    assert result.violations == []
    assert {fault.__name__ for fault in FAULTS} == result.faults.keys(), "every fault was injected"
    assert result.counted["events"] > 0, "there was something to check"
