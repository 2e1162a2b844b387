"""Slots and devices are found without touching any of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Settings
from app.contracts.attempt.device import AssignedDevice
from worker import devices


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing remembered from another machine, nor for the next."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices.gpus.cache_clear()
    yield
    devices.gpus.cache_clear()


class Driver:
    """A management library with GPUs of our choice; counts how often it is open."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, count: int, broken: bool = False) -> None:
        self.count = count
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)


def install(monkeypatch: pytest.MonkeyPatch, count: int, broken: bool = False) -> Driver:
    driver = Driver(count, broken)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


class TestCpu:
    @pytest.fixture(autouse=True)
    def no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, 0, broken=True)

    def test_a_machine_without_gpus_has_one_slot(self, tmp_path: Path) -> None:
        machine = devices.find(Settings(home=tmp_path))
        assert machine.slots == 1
        (cpu,) = machine.devices
        assert cpu.for_job() == AssignedDevice("cpu", 0, "cpu-0")
        assert cpu.name
        assert cpu.memory_bytes == machine.memory_bytes

    def test_slots_can_be_set_and_share_the_memory(self, tmp_path: Path) -> None:
        machine = devices.find(Settings(home=tmp_path, slots=4))
        assert [device.id for device in machine.devices] == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
        assert sum(device.memory_bytes for device in machine.devices) <= machine.memory_bytes

    def test_without_the_library_there_is_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert not devices.has_gpu()

    def test_there_is_no_capability_without_a_gpu(self) -> None:
        with pytest.raises(IndexError):
            devices.capability(0)


class TestGpu:
    def test_every_gpu_is_a_slot(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        driver = install(monkeypatch, 2)
        machine = devices.find(Settings(home=tmp_path))
        assert [device.for_job() for device in machine.devices] == [
            AssignedDevice("cuda", 0, "GPU-0abc"),
            AssignedDevice("cuda", 1, "GPU-1abc"),
        ]
        assert machine.devices[0].capability == (9, 0)
        assert machine.devices[0].memory_bytes == 80 << 30
        assert driver.open == 0  # a fork inherits nothing of it

    def test_fewer_slots_take_the_first_gpus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, 2)
        machine = devices.find(Settings(home=tmp_path, slots=1))
        assert [device.index for device in machine.devices] == [0]

    def test_more_slots_than_gpus_are_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, 2)
        with pytest.raises(ValueError, match="ANNEAL_SLOTS=3"):
            devices.find(Settings(home=tmp_path, slots=3))

    @pytest.mark.parametrize(
        ("visible", "found"),
        [("1", [1]), ("2,0", [2, 0]), ("", []), ("-1", []), ("0,9,1", [0]), ("GPU-1", [1]), ("GPU-x", [])],
    )
    def test_hidden_gpus_stay_hidden(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, found: list[int]
    ) -> None:
        install(monkeypatch, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.index for gpu in devices.gpus()] == found

    def test_the_capability_is_that_of_the_visible_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, 1)
        assert devices.capability(0) == (9, 0)


def test_looking_imports_no_torch() -> None:
    code = "import sys; from worker import devices; devices.gpus(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
