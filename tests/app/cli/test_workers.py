"""`anneal workers list`: a machine with many devices takes one short line."""

from anneal.contracts.schemas.workers import DeviceRead
from app.cli.workers import _device_texts


def device(index: int, trouble: str | None = None) -> DeviceRead:
    return DeviceRead(
        index=index, uid=f"GPU-{index}", kind="cuda", name="H100", memory_mb=81_000, run_id=None, trouble=trouble,
        paused_until=None, telemetry=None,
    )  # fmt: skip


def test_equal_devices_are_counted_and_a_paused_one_is_named() -> None:
    devices = [device(0), device(1, "ECC error"), device(2)]
    assert _device_texts(devices) == ["2 x H100 (81,000 MiB)", "H100 (81,000 MiB) (paused: ECC error)"]
    assert _device_texts(devices[:1]) == ["H100 (81,000 MiB)"]
