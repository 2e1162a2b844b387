"""Telemetry of the worker's GPUs: sampled once a second through NVML, reported as means and peaks every ten seconds."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.device_telemetry import DeviceTelemetry
from anneal.contracts.field_types import format_timestamp
from app.runs.events.log import NewEvent
from app.workers import registry
from worker import devices
from worker.devices import Device

log = logging.getLogger(__name__)

SAMPLES = 10
"""Samples, one a second, in a report. One event per sample would be most of the events of a run."""


@dataclass(frozen=True)
class Sample:
    """State of a GPU at one time; None for what its driver does not report."""

    utilization_percent: int | None = None
    memory_mb: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    ecc_uncorrected: int | None = None


@dataclass(frozen=True)
class Report:
    """Telemetry of a GPU with the time that it covers."""

    began: float
    """Monotonic time."""
    at: float
    """Unix time of its end."""
    telemetry: DeviceTelemetry


class TelemetrySampler:
    """Samples the worker's GPUs from its own thread and stores each report with the device."""

    def __init__(self, worker_id: str, gpus: Sequence[Device], engine: Engine) -> None:
        self._worker_id = worker_id
        self._gpus = gpus
        self._engine = engine
        self._reports: dict[int, Report] = {}
        self._samples: dict[int, list[Sample]] = {gpu.index: [] for gpu in gpus}
        self._began = time.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread; without a GPU, log that there is no telemetry."""
        if not any(gpu.kind == "cuda" for gpu in self._gpus):
            log.info("no GPU on this machine, or no driver: there is no device telemetry")
            return
        threading.Thread(target=self._run_sampler, name="telemetry", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def newest_report(self, index: int) -> Report | None:
        """Return the newest report of a device; None before the first."""
        return self._reports.get(index)

    def take_samples(self, nvml: Any) -> None:
        """Take a sample of each GPU, and make a report once there are enough."""
        for gpu in self._gpus:
            self._samples[gpu.index].append(take_sample(nvml, gpu))
        if all(len(samples) >= SAMPLES for samples in self._samples.values()):
            self._report_samples()

    def _run_sampler(self) -> None:
        # Opened once: to open NVML takes longer than to sample. It holds no CUDA context.
        with devices.open_nvml() as nvml:
            if nvml is None:
                return
            due = time.monotonic()
            while not self._ended.wait(max(due - time.monotonic(), 0.0)):
                due = max(due + 1.0, time.monotonic())
                try:
                    self.take_samples(nvml)
                except Exception:  # telemetry must not end with the first surprise of a driver
                    log.exception("device telemetry failed")

    def _report_samples(self) -> None:
        now = time.monotonic()
        reports = {}
        for index, samples in self._samples.items():
            reports[index] = Report(self._began, time.time(), summarize(samples, now - self._began))
            self._samples[index] = []
        self._began = now
        self._reports = reports
        try:
            with self._engine.begin() as connection:
                for index, report in reports.items():
                    fields = {
                        "at": format_timestamp(datetime.fromtimestamp(report.at, UTC)),
                        **report.telemetry.model_dump(),
                    }
                    connection.execute(registry.store_telemetry(self._worker_id, index, fields))
        except SQLAlchemyError as error:
            log.info("device telemetry is not stored, the next report will be: %s", error)


class DeviceFeed:
    """Reports of the device of a run as `device` events of the run."""

    def __init__(self, sampler: TelemetrySampler, device: Device, put: Callable[[NewEvent], None]) -> None:
        self._sampler = sampler
        self._device = device
        self._put = put
        self._began = time.monotonic()
        self._last: Report | None = None

    def put_new_report(self) -> None:
        """Put an event if there is a new report that covers only time of this run; may be called at any rate."""
        report = self._sampler.newest_report(self._device.index)
        if report is None or report is self._last or report.began < self._began:
            return
        self._last = report
        which = {"index": self._device.index, "uid": self._device.id}
        self._put(NewEvent.from_payload("device", report.at, {**which, **report.telemetry.model_dump()}))


def take_sample(nvml: Any, gpu: Device) -> Sample:
    """Read what the driver reports of a GPU now."""

    def read_value(get: Callable[[Any], float]) -> float | None:
        try:
            return get(handle)
        except nvml.NVMLError:  # not supported by this GPU, or the GPU is lost
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.id)
    except nvml.NVMLError:
        return Sample()
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    memory = read_value(lambda it: nvml.nvmlDeviceGetMemoryInfo(it).used)
    power = read_value(nvml.nvmlDeviceGetPowerUsage)  # in milliwatts
    return Sample(
        utilization_percent=_to_int(read_value(lambda it: nvml.nvmlDeviceGetUtilizationRates(it).gpu)),
        memory_mb=None if memory is None else int(memory) // 2**20,
        temperature_celsius=_to_int(
            read_value(lambda it: nvml.nvmlDeviceGetTemperatureV(it, nvml.NVML_TEMPERATURE_GPU))
        ),
        power_watts=None if power is None else power / 1000,
        sm_clock_mhz=_to_int(read_value(lambda it: nvml.nvmlDeviceGetClockInfo(it, nvml.NVML_CLOCK_SM))),
        ecc_uncorrected=_to_int(read_value(lambda it: nvml.nvmlDeviceGetTotalEccErrors(it, uncorrected, volatile))),
    )


def summarize(samples: Sequence[Sample], seconds: float) -> DeviceTelemetry:
    """Return means of rates, and peaks of memory, temperature and errors."""

    def known_values(name: str) -> list[float]:
        return [value for sample in samples if (value := getattr(sample, name)) is not None]

    def mean_of(name: str) -> float | None:
        values = known_values(name)
        return round(sum(values) / len(values), 1) if values else None

    def peak_of(name: str) -> int | None:
        return _to_int(max(known_values(name), default=None))

    return DeviceTelemetry(
        seconds=round(seconds, 1),
        utilization_percent=mean_of("utilization_percent"),
        memory_mb=peak_of("memory_mb"),
        temperature_celsius=peak_of("temperature_celsius"),
        power_watts=mean_of("power_watts"),
        sm_clock_mhz=mean_of("sm_clock_mhz"),
        ecc_uncorrected=peak_of("ecc_uncorrected"),
    )


def _to_int(value: float | None) -> int | None:
    return None if value is None else int(value)
