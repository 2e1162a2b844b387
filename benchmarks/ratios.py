"""Timing of alternating participants and the ratios of their blocks: drift affects all of a block equally."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lane:
    """Participant: the timed call, calls per block, and untimed setup and cleanup."""

    call: Callable[[], Any]
    times: int
    prepare: Callable[[], object] = lambda: None
    check: Callable[[Any], object] = lambda _: None

    def seconds(self) -> float:
        """Return the seconds of one call."""
        self.prepare()
        began = time.perf_counter()
        result = self.call()
        took = time.perf_counter() - began
        self.check(result)
        return took


class Turns:
    """Seconds per call of each participant, block by block."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.blocks = blocks
        self.seconds: dict[str, list[float]] = {}

    def take(self, lanes: Mapping[str, Lane]) -> None:
        """Run the participants alternately and keep the median of the calls of each block."""
        for lane in lanes.values():
            lane.seconds()  # warm up connections and caches
        for _ in range(self.blocks):
            for name, lane in lanes.items():
                median = statistics.median(lane.seconds() for _ in range(lane.times))
                self.seconds.setdefault(name, []).append(median)

    def ratio(self, slow: str, quick: str) -> "Ratio":
        """Return the ratio of the first participant's time to the second's, per block."""
        pairs = zip(self.seconds[slow], self.seconds[quick], strict=True)
        return Ratio([one / other for one, other in pairs])

    def show(self, lane: str, note: str = "") -> None:
        """Print one line with median and spread of the blocks."""
        milliseconds = sorted(1e3 * one for one in self.seconds[lane])
        print(
            f"{self.name} {lane:34s} median {statistics.median(milliseconds):9.2f} ms  min {milliseconds[0]:9.2f}  "
            f"max {milliseconds[-1]:9.2f}  of {len(milliseconds)} blocks  {note}".rstrip(),
            flush=True,
        )

    def median(self, lane: str) -> float:
        """Return the median seconds of a participant."""
        return statistics.median(self.seconds[lane])


class Ratio:
    """Median and spread of the ratios of all blocks."""

    def __init__(self, blocks: list[float]) -> None:
        self.blocks = blocks
        self.median = statistics.median(blocks)

    def __str__(self) -> str:
        return f"{self.median:.2f} (blocks: {min(self.blocks):.2f} to {max(self.blocks):.2f})"
