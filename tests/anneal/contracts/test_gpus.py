"""Names of GPUs, as drivers and users write them."""

import pytest

from anneal.contracts.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("h200", "H200"),
        ("a100 80 GB", "A100 80GB"),
        ("Tesla T4", None),
        ("", None),
        (None, None),
    ],
)
def test_name_of_a_driver_or_a_user_leads_to_the_model(name: str | None, gpu: str | None) -> None:
    known = find_gpu(name)
    assert (known and known.name) == gpu


def test_every_model_is_known_by_its_own_name() -> None:
    assert [find_gpu(gpu.name) for gpu in GPUS] == [*GPUS]
