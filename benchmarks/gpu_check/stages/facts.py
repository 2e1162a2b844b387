"""Machine, packages, and what the GPU computes and copies at best."""

import importlib.metadata
import json
import os
import platform
import shutil
import sysconfig
import time
from pathlib import Path

from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.processes import Call
from worker import devices

PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "flash-attn",
    "liger-kernel", "kernels", "torchao", "nvidia-ml-py",
)  # fmt: skip


def run(check: Check) -> None:
    disk, memory = shutil.disk_usage(check.work), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    check.record(
        "machine", kernel=platform.release(), cores=len(os.sched_getaffinity(0)), memory_gib=round(memory / 2**30),
        disk_free_gib=round(disk.free / 2**30), weights_in=str(check.weights.parent), pidfd_open=_opens_pidfd(),
    )  # fmt: skip
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    check.record(
        "compiler", cc=shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc"), python_header=header.exists(),
        python=platform.python_version(),
    )  # fmt: skip
    check.record("packages", **{name: _version(name) for name in PACKAGES})
    if not check.on_gpu:
        check.record("gpu", "skipped", "needs a GPU")
        return
    gpu, (used, _) = check.device, devices.memory_use(check.device) or (0, 0)
    check.record(
        "gpu", name=gpu.name, capability=gpu.capability, memory_gib=round(gpu.memory_bytes / 2**30, 1),
        used_gib=round(used / 2**30, 1), driver=_driver(),
    )  # fmt: skip
    folder = check.folder("device speed")
    end = processes.run(Call(_measure_device, folder, (str(folder / "result.json"),), 40))
    if end.code == 0:
        check.record("device speed", **json.loads((folder / "result.json").read_text()))
    else:
        check.record("device speed", "failed", (folder / "stderr").read_text()[-300:])


def _measure_device(path: str) -> None:
    import torch

    def seconds(repeats: int, operation: object) -> float:
        operation()  # type: ignore[operator]
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(repeats):
            operation()  # type: ignore[operator]
        torch.cuda.synchronize()
        return (time.monotonic() - began) / repeats

    side, size = 8192, 2**30
    matrix = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    source, target = (torch.empty(size, device="cuda", dtype=torch.uint8) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    measured = {
        "bf16_tflops": round(2 * side**3 / seconds(20, lambda: matrix @ matrix) / 1e12, 1),
        "memory_gb_per_s": round(2 * size / seconds(20, lambda: target.copy_(source)) / 1e9),
        "to_host_gb_per_s": round(size / seconds(5, lambda: host.copy_(source)) / 1e9, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    Path(path).write_text(json.dumps(measured))


def _opens_pidfd() -> bool:
    """Return True if the kernel has `pidfd_open`, which gVisor lacks."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    with devices.open_nvml() as library:
        try:
            return str(library.nvmlSystemGetDriverVersion())
        except library.NVMLError:
            return "unknown"
