"""A run on a CPU that plans its steps as on a GPU: bytes and operations are counted instead of measured."""

from typing import Any

from benchmarks.counting_meter import CountingMeter
from worker.training.planning import pass_meter


def begin(device: dict[str, Any]) -> None:
    """From now on in this process, the device has room for `usable` bytes of tensors beside the weights.

    A pass takes its operations and `fixed_seconds`.
    """
    pass_meter.meter_of = lambda _: CountingMeter(**device)
