"""Calls of an object store: a silent one keeps neither the caller waiting nor the threads of other work."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from app.infra.files.object_store import StoreBusy, StoreUnavailable
from app.infra.files.store_calls import StoreCalls
from tests.waiting import eventually_async


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """The store answers once it is set."""
    event = threading.Event()
    yield event
    event.set()


async def wait_for_slot(calls: StoreCalls) -> None:
    """Wait until a call finds a free slot."""

    async def divide() -> bool:
        with suppress(StoreBusy):
            return await calls.run(divmod, 7, 2) == (3, 1)
        return False

    await eventually_async(divide, what="a slot is free again")


async def test_the_result_and_errors_are_those_of_the_call() -> None:
    calls = StoreCalls(1, 1.0, 5.0)
    assert await calls.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await calls.run(divmod, 7, 0)

    def gives_up() -> None:
        raise TimeoutError("of the call itself")

    with pytest.raises(TimeoutError, match="of the call itself"):
        await calls.run(gives_up)


async def test_a_silent_store_is_given_up_and_keeps_its_slots_until_it_answers(gate: threading.Event) -> None:
    calls = StoreCalls(2, 0.2, 0.1)
    async with asyncio.timeout(30):
        given_up = await asyncio.gather(*(calls.run(gate.wait) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in given_up] == [StoreUnavailable] * 2
    with pytest.raises(StoreBusy):
        await calls.run(divmod, 7, 2)
    gate.set()
    await wait_for_slot(calls)


async def test_calls_are_refused_at_once_while_most_are_stuck(gate: threading.Event) -> None:
    wait_seconds = 30.0
    calls = StoreCalls(4, wait_seconds, 10 * wait_seconds)
    stuck = [asyncio.create_task(calls.run(gate.wait)) for _ in range(4)]
    await asyncio.sleep(0)
    for number in range(4):
        calls._began[number] -= wait_seconds  # as if so much time had passed
    began = time.monotonic()
    refused = await asyncio.gather(*(calls.run(divmod, 7, 2) for _ in range(50)), return_exceptions=True)
    assert {type(one) for one in refused} == {StoreBusy} and time.monotonic() - began < wait_seconds / 2
    gate.set()
    assert await asyncio.gather(*stuck) == [True] * 4


async def test_a_caller_that_goes_away_does_not_keep_its_slot(gate: threading.Event) -> None:
    calls = StoreCalls(1, 0.2, 30.0)
    gone = asyncio.create_task(calls.run(gate.wait))
    waiting = asyncio.create_task(calls.run(divmod, 7, 2))
    await asyncio.sleep(0.05)
    gone.cancel()
    waiting.cancel()
    gate.set()
    await asyncio.gather(gone, waiting, return_exceptions=True)
    await wait_for_slot(calls)
