"""Peak throughput of devices: the denominator of MFU.

Dense 16-bit products (bfloat16; float16 where there is no bfloat16) with sums in 32 bits, in 10^12 operations per
second, at the clock that the vendor states; a figure "with sparsity" is halved. Sources: NVIDIA's data sheets of V100,
T4, A10, A30, A40, A100, L4, L40, L40S, H100, H200, GH200, B200, GB200, B300, GB300 and of the workstation cards, the
white papers of GA102 (RTX 30), AD102 (RTX 40) and RTX Blackwell (RTX 50, RTX PRO), and for A10G the data sheet that AWS
links.
"""

import re

_PEAKS = (
    (r"GB[23]00", 2500.0), (r"B[23]00", 2250.0),
    (r"GH200", 989.4), (r"H200 NVL", 835.5), (r"H200", 989.4),
    (r"H[18]00 NVL", 835.5), (r"H[18]00 PCIe", 756.5), (r"H[18]00", 989.4), (r"H20", 148.0),
    (r"A[18]00", 312.0), (r"A10G", 70.0), (r"A10", 125.0), (r"A30", 165.0), (r"A40", 149.7),
    (r"L40S", 362.0), (r"L40", 181.0), (r"L4", 121.0),
    (r"RTX PRO 6000 Blackwell Workstation Edition", 503.8), (r"RTX 6000 Ada Generation", 364.2),
    (r"RTX A6000", 154.8), (r"RTX A5000", 111.1),
    (r"RTX 5090", 209.5), (r"RTX 4090", 165.2), (r"RTX 4080", 97.5),
    (r"RTX 3090 Ti", 80.0), (r"RTX 3090", 71.2),
    (r"V100-PCIE", 112.0), (r"V100", 125.0), (r"T4", 65.0),
)  # fmt: skip
"""Patterns of device names as the driver reports them, the more specific ones first."""
_OTHERS = re.compile(r"\b(?:MIG|Laptop|Max-Q|SUPER|D)\b")
"""Partitions of devices, and devices with a similar name that are slower or faster."""


def peak_tflops(name: str | None) -> float | None:
    """Return the peak of the device with this name, in 10^12 operations per second; None: unknown, so no MFU."""
    if name is None or _OTHERS.search(name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(rf"\b{pattern}\b", name)), None)
