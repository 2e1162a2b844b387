"""The check of a device takes a step as a run does, and finds one that computes wrongly."""

from typing import Any

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction, chunked_logprob
from trl.trainer import utils as trl_utils

from anneal.contracts.attempt.device import AssignedDevice
from worker.training.failures import TrainingFailure
from worker.training.model import device_check, loader

CPU = AssignedDevice("cpu", 0, "cpu-0")


@pytest.fixture(autouse=True)
def own_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the loss head of TRL as it was to the tests that follow in this process."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)


def test_a_device_that_works_passes_with_the_4_bit_weights_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    load = loader.load_model
    monkeypatch.setattr(loader, "load_model", lambda *arguments: loaded.append(load(*arguments)) or loaded[-1])
    device_check.check_device(CPU)
    (model,) = loaded
    assert model.is_loaded_in_4bit
    stepped = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert stepped and all("lora_" in name for name in stepped)


@pytest.mark.parametrize("wrong", [torch.nan, 100.0])
def test_device_that_computes_wrongly_fails_the_check(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    load = loader.load_model

    def broken(*arguments: Any) -> Any:
        model = load(*arguments)
        with torch.no_grad():
            model.model.norm.weight.mul_(wrong)
        return model

    monkeypatch.setattr(loader, "load_model", broken)
    with pytest.raises(RuntimeError, match=r"wrong results: a loss of .* instead of about 4\.16"):
        device_check.check_device(CPU)


def test_device_that_fails_only_with_4_bit_weights_is_logged_and_not_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = loader.load_model

    def without_kernels(base: Any, config: Any, machine: Any) -> Any:
        if config.method == "qlora":
            raise RuntimeError("no kernel image is available for 4 bits")
        return load(base, config, machine)

    monkeypatch.setattr(loader, "load_model", without_kernels)
    device_check.check_device(CPU)
    assert "4-bit weights do not work on device cpu-0: no kernel image" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_host_that_cannot_compile_the_loss_kernels_fails_the_check_with_the_package_to_install(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(chunked_logprob, f"_{direction}_tile", compile_kernel)
    with pytest.raises(TrainingFailure, match="`gcc`") as failed:
        device_check.check_device(CPU)
    assert failed.value.code == "device_error"


def test_missing_device_fails_the_check_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingFailure) as failed:
        device_check.check_device(AssignedDevice("cuda", 0, "GPU-1"))
    assert failed.value.code == "device_error"


def test_device_with_memory_used_by_other_programs_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(loader, "load_model", full)
    device_check.check_device(CPU)
