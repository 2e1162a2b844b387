"""Pretends four GPUs, as a driver and torch would: a step works on the first, fails on the second, hangs on the third.

On the fourth it fails and says what to do.

A new process that checks one of them is the program that an environment variable names.
"""

import os
import signal
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from anneal.contracts.attempt.device import AssignedDevice
from tests.worker.test_devices import Driver
from worker import devices
from worker.training.failures import TrainingFailure


def check_device(device: AssignedDevice) -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device.id
    if device.index == 1:
        raise RuntimeError("illegal memory access")
    if device.index == 2:
        signal.pause()
    if device.index == 3:
        raise TrainingFailure("device_error", "This host cannot compile GPU kernels: install `gcc`.")


zygote: Any = sys.modules["__main__"]
zygote._CHECK_SECONDS = 3  # far more than a fork needs to answer
sys.executable = os.environ["HF_XET_TEST_NEW_PROCESS"]
torch: Any = ModuleType("torch")
torch.cuda = SimpleNamespace(is_initialized=lambda: False)
driver: Any = Driver(4)
sys.modules |= {"torch": torch, "pynvml": driver, "worker.training.model.device_check": sys.modules[__name__]}
devices.list_gpus.cache_clear()
