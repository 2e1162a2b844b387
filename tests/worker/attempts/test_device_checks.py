"""Promises about the checks of devices before a claim."""

from types import SimpleNamespace
from typing import Any

from worker.attempts.device_checks import unusable_reason
from worker.devices import Device

GPU = Device("cuda", 0, "GPU-1", "H100", 80 << 30, (9, 0))


def test_device_that_failed_its_check_says_what_to_do_and_that_a_restart_tries_it_again() -> None:
    reason = "This host cannot compile GPU kernels: install a C compiler (Debian and Ubuntu: `gcc` and `libc6-dev`)."
    context: Any = SimpleNamespace(launcher=SimpleNamespace(broken={GPU.id: reason}))
    why = unusable_reason(context, GPU)
    assert why is not None and why.endswith(f"tried again when it restarts: {reason}")
    assert "nvidia-smi" not in why
