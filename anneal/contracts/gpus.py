"""GPUs that estimates know without a worker that has one, from the data sheets of their manufacturer."""

import re
from dataclasses import dataclass

REACHED_SHARE = 0.4
"""Share of a data sheet's operations that a training step is assumed to reach; an H100 reached 0.46 with QLoRA."""


@dataclass(frozen=True)
class Gpu:
    """Model of GPU."""

    name: str
    memory_mb: int
    """MiB that its driver reports."""
    tflops: float
    """Dense products of bfloat16 with 32-bit sums, 10¹² operations a second."""
    bandwidth: int
    """Memory bandwidth, GB/s."""

    @property
    def training_speed(self) -> float:
        """Operations per second that a training step is assumed to reach."""
        return self.tflops * 1e12 * REACHED_SHARE


GPUS = (
    Gpu("RTX 4060 Ti", 16_380, 44, 288),
    Gpu("RTX 5080", 16_303, 113, 960),
    Gpu("RTX 3090", 24_576, 71, 936),
    Gpu("RTX 4090", 24_564, 165, 1008),
    Gpu("L4", 23_034, 121, 300),
    Gpu("A10G", 23_028, 70, 600),
    Gpu("A10", 23_028, 125, 600),
    Gpu("A30", 24_576, 165, 933),
    Gpu("RTX 5090", 32_607, 210, 1792),
    Gpu("A100 40GB", 40_960, 312, 1555),
    Gpu("A40", 46_068, 150, 696),
    Gpu("L40S", 46_068, 362, 864),
    Gpu("RTX A6000", 49_140, 155, 768),
    Gpu("RTX 6000 Ada", 49_140, 364, 960),
    Gpu("A100 80GB", 81_920, 312, 2039),
    Gpu("H100 PCIe", 81_559, 756, 2039),
    Gpu("H100", 81_559, 989, 3350),
    Gpu("RTX PRO 6000", 97_887, 503, 1792),
    Gpu("GH200", 97_871, 989, 4000),
    Gpu("H200", 143_771, 989, 4800),
    Gpu("B200", 183_359, 2250, 8000),
)
"""In the order of their memory. Those without bfloat16, such as the T4 and the V100, are not among them."""


def find_gpu(name: str | None) -> Gpu | None:
    """Return the model that a driver or a user names, such as `NVIDIA A100-SXM4-80GB` or `h100`; None if unknown."""
    words = _name_parts(name or "")
    matching = [gpu for gpu in GPUS if _name_parts(gpu.name) <= words]
    return max(matching, key=lambda gpu: len(_name_parts(gpu.name)), default=None)


def may_be(name: str, gpu: Gpu) -> bool:
    """Return True if this is a name of the model or a part of one, such as `A100` for `A100 80GB`."""
    return find_gpu(name) is gpu or _name_parts(name) <= _name_parts(f"NVIDIA {gpu.name}")


def gpu_names() -> str:
    """Return all names, for messages."""
    return ", ".join(f"`{gpu.name}`" for gpu in GPUS)


def _name_parts(name: str) -> set[str]:
    """Return the words of a name, with the size of the memory apart from what precedes it."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d+) ?g(i?b)?\b", r" \1gb ", name.lower())))
