"""Telemetry of GPUs, from a driver's management library of our choice to events, `/v1/workers` and Prometheus."""

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.events import DeviceEvent
from app.runs.events.log import NewEvent
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_worker, events_of
from tests.server import ApiServer
from worker import devices
from worker.devices import Device
from worker.telemetry import SAMPLES, DeviceFeed, TelemetrySampler


class Driver:
    """The functions of NVML that telemetry needs; each reading is one higher than the one before."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 1, 0, 0, 1

    def __init__(self) -> None:
        self.time = 0
        self.has_ecc = True
        self.lost = False

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uid: str) -> int:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        self.time += 1
        return self.time

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=80 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=handle << 30)

    def nvmlDeviceGetTemperatureV(self, handle: int, sensor: int) -> int:
        return 50 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 400_000 + handle * 1000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return 1800 + handle

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        if not self.has_ecc:
            raise self.NVMLError("not supported")
        return 2


GPU = Device("cuda", 0, "cuda-0", "NVIDIA H100", 80 << 30, (9, 0))
SHOWN = {
    "utilization_percent": 85.5, "memory_mb": 10_240, "temperature_celsius": 60, "power_watts": 405.5,
    "sm_clock_mhz": 1805.5, "ecc_uncorrected": 2,
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    yield driver


def sample(sampler: TelemetrySampler, times: int = SAMPLES) -> None:
    with devices.open_nvml() as nvml:
        for _ in range(times):
            sampler.take_samples(nvml)


def test_ten_samples_make_one_report_for_workers_prometheus_and_the_run(
    api: ApiServer, engine: Engine, driver: Driver
) -> None:
    run = make_run(api.client, make_dataset(engine))["id"]
    worker = add_worker(engine, kind="cuda", memory_mb=[81_559])
    trainer, put = Trainer(engine, run).begin(), list[NewEvent]()
    sampler = TelemetrySampler(worker, [GPU], engine)
    early = DeviceFeed(sampler, GPU, put.append)
    sample(sampler, SAMPLES - 1)
    early.put_new_report()
    assert sampler.newest_report(0) is None and put == []
    sample(sampler, 1)
    early.put_new_report()
    assert put == [], "the first report covers time before the run"
    driver.time = 0
    sample(sampler)
    for _ in range(3):
        early.put_new_report()
    trainer.store(put)
    (event,) = (one for one in events_of(engine, run) if one.type == "device")
    parsed = DeviceEvent(type="device", run_id=run, seq=event.seq, **event.data)
    assert {name: getattr(parsed, name) for name in SHOWN} == SHOWN and (parsed.index, parsed.uid) == (0, "cuda-0")
    (shown,) = (one for one in api.client.get("/v1/workers").json()["data"] if one["id"] == worker)
    telemetry = shown["devices"][0]["telemetry"]
    assert {name: telemetry[name] for name in SHOWN} == SHOWN and telemetry["at"].endswith("Z")
    scraped = api.client.get("/metrics").text
    assert f'anneal_device_power_watts{{device="cuda-0",worker_id="{worker}"}} 405.5' in scraped
    assert f'anneal_device_ecc_uncorrected_errors{{device="cuda-0",worker_id="{worker}"}} 2.0' in scraped


def test_what_a_gpu_does_not_report_is_null_and_a_lost_gpu_has_no_figures(engine: Engine, driver: Driver) -> None:
    sampler = TelemetrySampler(add_worker(engine, kind="cuda"), [GPU], engine)
    driver.has_ecc = False
    sample(sampler)
    report = sampler.newest_report(0)
    assert report is not None and report.telemetry.model_dump(exclude={"seconds"}) == {**SHOWN, "ecc_uncorrected": None}
    driver.lost = True
    sample(sampler)
    report = sampler.newest_report(0)
    assert report is not None and report.telemetry.model_dump(exclude={"seconds"}) == dict.fromkeys(SHOWN)


def test_without_a_gpu_the_absence_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "worker.telemetry"):
        TelemetrySampler("wrk", [Device("cpu", 0, "cpu-0", "Xeon", 1 << 30)], engine).start()
    assert [record.message for record in caplog.records] == [
        "no GPU on this machine, or no driver: there is no device telemetry"
    ]
