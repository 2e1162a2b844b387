"""Slots and devices are found without touching any of them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anneal.contracts.attempt.device import AssignedDevice
from app.config import Settings
from worker import devices


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing remembered from another machine, nor for the next."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices.list_gpus.cache_clear()
    yield
    devices.list_gpus.cache_clear()


class Driver:
    """A management library with GPUs of our choice; counts how often it is open."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, count: int, broken: bool = False) -> None:
        self.count = count
        self.broken = broken
        self.open = 0
        self.used: list[int] = [0] * count
        """GiB of memory in use on each GPU."""
        self.partitioned: dict[int, dict[int, str]] = {}
        """UUIDs of the MIG instances of a GPU, by their numbers, of at most 7."""
        self.without_mig: int | None = None

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

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == self.without_mig:
            raise self.NVMLError("not supported")
        return [int(handle in self.partitioned), 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> str:
        if index not in self.partitioned[handle]:
            raise self.NVMLError("not found")
        return self.partitioned[handle][index]

    def nvmlDeviceGetUUID(self, handle: int | str) -> str:
        return handle if isinstance(handle, str) else f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int | str) -> bytes:
        return b"NVIDIA H100 MIG 1g.10gb" if isinstance(handle, str) else b"NVIDIA H100"

    def nvmlDeviceGetHandleByUUID(self, uid: str) -> int | str:
        return uid if uid.startswith("MIG-") else int(uid.removeprefix("GPU-").removesuffix("abc"))

    def nvmlDeviceGetMemoryInfo(self, handle: int | str) -> Any:
        if isinstance(handle, str):
            return SimpleNamespace(total=10 << 30, used=1 << 30, free=9 << 30)
        used = self.used[handle] << 30
        return SimpleNamespace(total=80 << 30, used=used, free=(80 << 30) - used)

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
        machine = devices.find_machine(Settings(home=tmp_path))
        assert machine.slots == 1
        (cpu,) = machine.devices
        assert cpu.for_job() == AssignedDevice("cpu", 0, "cpu-0")
        assert cpu.name
        assert cpu.memory_bytes == machine.memory_bytes

    def test_slots_can_be_set_and_share_the_memory(self, tmp_path: Path) -> None:
        machine = devices.find_machine(Settings(home=tmp_path, slots=4))
        assert [device.id for device in machine.devices] == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
        assert sum(device.memory_bytes for device in machine.devices) <= machine.memory_bytes

    def test_without_the_library_there_is_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert not devices.has_gpu()

    def test_there_is_no_capability_without_a_gpu(self) -> None:
        with pytest.raises(IndexError):
            devices.compute_capability(0)


class TestGpu:
    def test_every_gpu_is_a_slot(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        driver = install(monkeypatch, 2)
        machine = devices.find_machine(Settings(home=tmp_path))
        assert [device.for_job() for device in machine.devices] == [
            AssignedDevice("cuda", 0, "GPU-0abc"),
            AssignedDevice("cuda", 1, "GPU-1abc"),
        ]
        assert machine.devices[0].capability == (9, 0)
        assert machine.devices[0].memory_bytes == 80 << 30
        assert driver.open == 0  # a fork inherits nothing of it

    def test_fewer_slots_take_the_first_gpus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, 2)
        machine = devices.find_machine(Settings(home=tmp_path, slots=1))
        assert [device.index for device in machine.devices] == [0]

    def test_more_slots_than_gpus_are_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, 2)
        with pytest.raises(ValueError, match="ANNEAL_SLOTS=3"):
            devices.find_machine(Settings(home=tmp_path, slots=3))

    @pytest.mark.parametrize(
        ("visible", "indexes"),
        [("1", [1]), ("2,0", [2, 0]), ("", []), ("-1", []), ("0,9,1", [0]), ("GPU-1", [1]), ("GPU-x", [])],
    )
    def test_hidden_gpus_stay_hidden(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, indexes: list[int]
    ) -> None:
        install(monkeypatch, 3)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.index for gpu in devices.list_gpus()] == indexes

    def test_the_capability_is_that_of_the_visible_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, 1)
        assert devices.compute_capability(0) == (9, 0)


class TestMig:
    """GPUs of which one is partitioned: a run gets an instance, by its UUID."""

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> Driver:
        driver = install(monkeypatch, 3)
        driver.partitioned = {1: {0: "MIG-aa11", 3: "MIG-aa22"}}
        driver.without_mig = 2
        return driver

    def test_each_instance_is_a_device_with_its_uuid_memory_and_a_number_of_its_own(
        self, driver: Driver, tmp_path: Path
    ) -> None:
        machine = devices.find_machine(Settings(home=tmp_path))
        assert [device.for_job() for device in machine.devices] == [
            AssignedDevice("cuda", 0, "GPU-0abc"),
            AssignedDevice("cuda", 1, "MIG-aa11"),
            AssignedDevice("cuda", 2, "MIG-aa22"),
            AssignedDevice("cuda", 3, "GPU-2abc"),
        ]
        instance = machine.devices[1]
        assert (instance.name, instance.capability) == ("NVIDIA H100 MIG 1g.10gb", (9, 0))
        assert (instance.memory_bytes, devices.memory_use(instance)) == (10 << 30, (1 << 30, 9 << 30))
        assert driver.open == 0

    @pytest.mark.parametrize(
        ("visible", "ids", "warned"),
        [
            ("MIG-aa22,0", ["MIG-aa22", "GPU-0abc"], ""),
            ("1", ["MIG-aa11", "MIG-aa22"], ""),
            ("GPU-1,MIG-aa11,2", ["MIG-aa11", "MIG-aa22", "GPU-2abc"], ""),
            ("0,MIG-bb,1", ["GPU-0abc"], "hides MIG-bb and what follows it: there is no GPU or MIG instance"),
            ("MIG-aa", [], "there is more than one GPU"),
            ("-1", [], ""),
        ],
    )
    def test_hidden_instances_stay_hidden_and_a_name_of_none_is_logged(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        visible: str, ids: list[str], warned: str,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.id for gpu in devices.list_gpus()] == ids
        assert (warned in caplog.text) if warned else not caplog.records

    def test_a_partitioned_gpu_without_an_instance_is_no_device_and_the_log_says_so(
        self, driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver.partitioned = {1: {}}
        assert [(gpu.index, gpu.id) for gpu in devices.list_gpus()] == [(0, "GPU-0abc"), (1, "GPU-2abc")]
        assert "GPU 1 (GPU-1abc) has MIG enabled and no instance" in caplog.text


def test_looking_imports_no_torch() -> None:
    code = "import sys; from worker import devices; devices.list_gpus(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
