"""A fused LoRA layer computes what peft computes, with the same random numbers, and keeps less of the forward pass."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from torch import nn
from transformers import AutoConfig

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.worker.training.tiny import make_tiny_model
from worker.training.model import fused_lora, loader
from worker.training.model.base_model import BaseModelSource
from worker.training.model.dropout.mask import kept_values
from worker.training.model.dropout.products import TorchProducts
from worker.training.model.fused_lora import dropout_kernels, fuse_lora_layers

CPU = DeviceCapabilities(kind="cpu", bf16=True)
BASES: dict[str, dict[str, Any]] = {
    "32 bit": {"method": "lora"},
    "16 bit": {"method": "lora"},
    "8 bit": {"method": "sft", "load_in_8bit": True},
    "4 bit": {"method": "qlora"},
}
IDS = torch.arange(96).reshape(4, 24) % 90 + 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=2)


@pytest.fixture
def redraws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers draw masks again in the backward pass, as on a GPU."""
    monkeypatch.setattr(fused_lora, "_REDRAWS_ON", {"cpu"})


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep seeds of masks, as on a GPU with Triton; torch computes what the kernels do."""
    monkeypatch.setattr(fused_lora, "triton_products", lambda *_: TorchProducts())


@pytest.fixture(params=["kept", "drawn again"])
def masks(request: pytest.FixtureRequest) -> str:
    """Both ways to have the masks of dropout in the backward pass."""
    if request.param == "drawn again":
        request.getfixturevalue("redraws")
    return str(request.param)


@pytest.fixture(params=["kept", "drawn again", "of seeds"])
def all_masks(request: pytest.FixtureRequest) -> str:
    """All ways to have the masks of dropout in the backward pass."""
    if request.param != "kept":
        request.getfixturevalue({"drawn again": "redraws", "of seeds": "seeds"}[request.param])
    return str(request.param)


def adapted(folder: Path, base: str = "32 bit", rate: float = 0.0, **options: Any) -> PeftModel:
    """A model with an adapter as a run trains it, whose second matrices are not zero."""
    fields = {"base_model": "tiny", "lora_r": 4, "lora_dropout": rate, **BASES[base], **options}
    config = resolve_config(TrainingConfig(**fields), set(fields), CPU).config
    architecture = AutoConfig.from_pretrained(folder)
    source = BaseModelSource(str(folder), str(folder), {"local_files_only": True}, architecture, identity="")
    network = loader.load_model(source, config, CPU)
    if base == "16 bit":
        network.to(torch.bfloat16)
    torch.manual_seed(3)
    model = get_peft_model(network, loader.lora_config(config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    loader.keep_full_precision(model)
    return model.train()


def fused(model: PeftModel) -> PeftModel:
    """A copy of the model with fused layers."""
    other = copy.deepcopy(model)
    assert fuse_lora_layers(other) == "fused"
    return other


@contextmanager
def autocast_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mixed precision on a CPU that peft takes for that of a GPU, which it asks about."""
    enabled = torch.is_autocast_enabled
    with monkeypatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": enabled(kind))
        yield


def results(model: nn.Module, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output of a layer and its gradients, with random numbers of the same seed, and the next random number."""
    layer = model.get_submodule(f"base_model.model.model.layers.0.{name}")
    x = x.clone().requires_grad_()
    torch.manual_seed(11)
    output = layer(x)
    following = torch.rand(())
    (output.float() * torch.linspace(-1, 1, output.shape[-1])).sum().backward()
    tensors = {"output": output.detach(), "x": x.grad, "following": following}
    for part, parameter in (("A", layer.lora_A.default.weight), ("B", layer.lora_B.default.weight)):
        tensors[part], parameter.grad = parameter.grad, None
    return tensors


def distance(some: torch.Tensor, other: torch.Tensor) -> float:
    return float(((some.float() - other.float()).norm() / other.float().norm()).detach())


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("base", [name for name in BASES if name != "16 bit"])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_output_and_gradients_in_32_bits_equal_those_of_peft(folder: Path, base: str, rate: float, name: str) -> None:
    model = adapted(folder, base, rate)
    x = torch.randn(2, 7, 128 if "down" in name else 64)
    expected, actual = results(model, name, x), results(fused(model), name, x)
    for part in expected:
        assert actual[part].dtype == expected[part].dtype
        assert distance(actual[part], expected[part]) < 1e-6, part


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("base", list(BASES))
def test_output_and_gradients_in_mixed_precision_are_as_close_to_32_bits_as_those_of_peft(
    folder: Path, base: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, name = adapted(folder, base, rate), "self_attn.q_proj"
    x = torch.randn(8, 64, 64).bfloat16()
    exact = results(copy.deepcopy(model).float() if base == "16 bit" else model, name, x.float())
    with autocast_as_on_a_gpu(monkeypatch):
        plain, actual = results(model, name, x), results(fused(model), name, x)
    for part in exact:
        assert actual[part].dtype == plain[part].dtype
        assert distance(actual[part], exact[part]) <= 1.1 * distance(plain[part], exact[part]) + 1e-6, part
        assert distance(actual[part], exact[part]) < 2e-2, part


def step(model: PeftModel, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("use_rslora", [False, True])
def test_loss_and_gradients_of_a_model_with_dropout_equal_those_of_peft(folder: Path, use_rslora: bool) -> None:
    model = adapted(folder, rate=0.2, use_rslora=use_rslora)
    (expected, gradients), (loss, own) = step(model), step(fused(model))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert own.keys() == gradients.keys()
    assert max(distance(own[name], gradients[name]) for name in own) < 1e-5


@pytest.mark.usefixtures("all_masks")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_recomputation_in_the_backward_pass_changes_no_bit(folder: Path, autocast: bool, reentrant: bool) -> None:
    model = fused(adapted(folder, rate=0.2))
    model.enable_input_require_grads()
    without_recomputation = step(model, autocast)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss, gradients = step(model, autocast)
    assert loss == without_recomputation[0]
    assert all(torch.equal(gradients[name], without_recomputation[1][name]) for name in without_recomputation[1])


@pytest.mark.usefixtures("all_masks")
def test_gradients_are_the_derivatives_of_the_output(folder: Path) -> None:
    layer = fused(adapted(folder, rate=0.3, lora_r=2)).base_model.model.model.layers[0].self_attn.q_proj.double()
    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)

    def output(*_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return layer(x)

    assert torch.autograd.gradcheck(output, (x, layer.lora_A.default.weight, layer.lora_B.default.weight))


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize("base", list(BASES))
def test_output_and_gradients_are_those_of_the_mask_of_the_seed(
    folder: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_lora, "draw_seed", lambda _: torch.tensor([17]))
    layer = fused(adapted(folder, base, 0.25)).base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(2, 7, 128, dtype=torch.bfloat16 if base == "16 bit" else torch.float32, requires_grad=True)
    inputs = [x, layer.lora_A.default.weight, layer.lora_B.default.weight]
    mask = kept_values(torch.tensor([17]), 14, 128, 0.25).reshape(x.shape)
    direction = torch.randn(2, 7, 64)

    def explicit() -> torch.Tensor:
        dropped = torch.where(mask, x, 0).to(inputs[1].dtype) / 0.75
        return layer.base_layer(x) + layer.scaling["default"] * (dropped @ inputs[1].t() @ inputs[2].t())

    outputs = layer(x), explicit()
    assert distance(*outputs) < (1e-2 if base == "16 bit" else 1e-5)
    results = [torch.autograd.grad((output * direction).sum(), inputs) for output in outputs]
    for own, expected in zip(*results, strict=True):
        assert own.dtype == expected.dtype
        assert distance(own, expected) < (1e-2 if base == "16 bit" else 1e-5)


@pytest.mark.usefixtures("seeds")
def test_each_projection_and_each_call_has_a_mask_of_its_own(folder: Path) -> None:
    attention = fused(adapted(folder, rate=0.5)).base_model.model.model.layers[0].self_attn
    seeds: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.int64:
            seeds.append(int(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for projection in (attention.q_proj, attention.q_proj, attention.v_proj):
            projection(torch.randn(5, 64).requires_grad_())
    assert len(seeds) == len(set(seeds)) == 3


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize("base", ["16 bit", "4 bit"])
def test_dropout_keeps_only_a_seed_of_each_layer(folder: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with autocast_as_on_a_gpu(monkeypatch):
        dropped, undropped = fused(adapted(folder, base, 0.05)), fused(adapted(folder, base, 0.0))
        layers = sum(isinstance(module, lora.LoraLayer) for module in dropped.modules())
        assert kept_bytes(dropped) == kept_bytes(undropped) + 8 * layers


class TestReportedDropout:
    @pytest.fixture
    def failures(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
        """Why the kernels of a GPU cannot be used, by rank."""
        by_rank: dict[int, str] = {}
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        monkeypatch.setattr(fused_lora, "kernel_failure", lambda _, rank, *types: by_rank.get(rank))
        return by_rank

    def test_on_a_cpu_is_computed_by_torch(self, folder: Path) -> None:
        assert dropout_kernels(fused(adapted(folder, rate=0.1))) == "torch"

    def test_is_absent_without_dropout_or_fused_layers(self, folder: Path) -> None:
        assert dropout_kernels(fused(adapted(folder))) is None
        assert dropout_kernels(adapted(folder, rate=0.1, use_dora=True)) is None

    def test_on_a_gpu_is_computed_by_triton_or_says_why_not(self, folder: Path, failures: dict[int, str]) -> None:
        model = fused(adapted(folder, rate=0.1))
        assert dropout_kernels(model) == "Triton"
        assert dropout_kernels(model, is_half=False) == "torch", "the kernels compute in 16 bits"
        failures[4] = "they fail: no compiler"
        assert dropout_kernels(model) == "torch (Triton kernels cannot be used: they fail: no compiler)"

    def test_on_a_gpu_may_be_torch_for_some_ranks(self, folder: Path, failures: dict[int, str]) -> None:
        network = adapted(folder).unload()
        config = LoraConfig(r=4, rank_pattern={"q_proj": 200}, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        failures[200] = "ranks above 128 are not supported"
        model = fused(get_peft_model(network, config))
        assert dropout_kernels(model) == "Triton, in some layers torch (ranks above 128 are not supported)"


def kept_bytes(model: PeftModel) -> int:
    """Bytes that the forward pass keeps for the backward pass, without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved_tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor_: tensor_),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        loss = model(input_ids=IDS).logits.sum()
    kept_now = sum(tensor.untyped_storage().nbytes() for place, tensor in saved_tensors.items() if place not in own)
    del loss
    return kept_now


@pytest.mark.usefixtures("redraws")
@pytest.mark.parametrize("base", ["16 bit", "4 bit"])
def test_dropout_keeps_nothing_for_the_backward_pass(folder: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with autocast_as_on_a_gpu(monkeypatch):
        dropped, undropped = adapted(folder, base, 0.05), adapted(folder, base, 0.0)
        assert kept_bytes(fused(dropped)) == kept_bytes(fused(undropped))
        assert kept_bytes(fused(dropped)) < 0.75 * kept_bytes(dropped)


@pytest.mark.usefixtures("redraws")
def test_a_layer_keeps_its_input_once_for_all_projections_of_it(folder: Path) -> None:
    attention = fused(adapted(folder, "16 bit", 0.05)).base_model.model.model.layers[0].self_attn
    x, saved_bytes = torch.randn(4, 32, 64).bfloat16().requires_grad_(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in {one.data_ptr() for one in attention.parameters()}:
            saved_bytes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        outputs = [projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    rows, rank = 4 * 32, 4
    assert sum(saved_bytes.values()) == x.nbytes + len(outputs) * rows * rank * 2


def test_on_a_cpu_a_layer_keeps_one_byte_of_mask_for_each_value_of_its_input(folder: Path) -> None:
    layer, x, saved_tensors = fused(adapted(folder, rate=0.05)).base_model.model.model.layers[0].mlp.down_proj, None, []
    x = torch.randn(3, 128).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor
    ):
        layer(x)
    (mask,) = [tensor for tensor in saved_tensors if tensor.dtype == torch.bool]
    assert mask.nbytes == x.numel()


@pytest.mark.usefixtures("redraws")
def test_mask_is_drawn_again_for_an_input_that_is_no_longer_in_the_same_order_of_memory(folder: Path) -> None:
    """Activations in host memory come back contiguous."""
    model = fused(adapted(folder, rate=0.3))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(64, 7).t()

    def gradient(returned: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, returned):
            layer(x.detach().requires_grad_()).sum().backward()
        weight_gradient, layer.lora_A.default.weight.grad = layer.lora_A.default.weight.grad, None
        assert weight_gradient is not None
        return weight_gradient

    assert torch.equal(gradient(lambda tensor: tensor), gradient(lambda tensor: tensor.contiguous()))


def test_gradients_of_a_4_bit_layer_with_wider_input_are_computed_in_its_own_type(folder: Path) -> None:
    model = adapted(folder, "4 bit")
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    layer.base_layer.compute_dtype = torch.bfloat16
    x = torch.randn(5, 64)
    nn.init.zeros_(layer.lora_B.default.weight)  # the gradient is that of the base alone
    expected, actual = (results(each, "self_attn.q_proj", x)["x"] for each in (model, fused(model)))
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


class TestWhatStaysWithPeft:
    def test_a_disabled_adapter_leaves_the_base_alone(self, folder: Path) -> None:
        model = fused(adapted(folder, rate=0.2))
        with model.disable_adapter():
            logits = model(input_ids=IDS).logits
        assert torch.equal(logits, model.unload()(input_ids=IDS).logits)

    def test_a_merged_adapter_is_not_added_again(self, folder: Path) -> None:
        model = fused(adapted(folder)).eval()
        before = model(input_ids=IDS).logits
        model.merge_adapter()
        assert torch.allclose(model(input_ids=IDS).logits, before, atol=1e-5)
        model.unmerge_adapter()
        assert torch.allclose(model(input_ids=IDS).logits, before, atol=1e-5)

    def test_another_active_adapter_and_several_are_those_of_peft(self, folder: Path) -> None:
        model = adapted(folder)
        model.add_adapter("reference", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        other = fused(model)
        for active in ("reference", ["default", "reference"]):
            for trained in (model, other):
                trained.base_model.set_adapter(active)
            expected, actual = (trained.eval()(input_ids=IDS).logits for trained in (model, other))
            assert distance(actual, expected) < 1e-6

    def test_rows_with_adapters_of_their_own_are_those_of_peft(self, folder: Path) -> None:
        model = adapted(folder).eval()
        names = ["default", "__base__", "default", "__base__"]
        expected, actual = (one(input_ids=IDS, adapter_names=names).logits for one in (model, fused(model)))
        assert torch.equal(actual, expected)

    def test_dora_and_layers_that_are_not_linear_are_reported(self, folder: Path) -> None:
        assert fuse_lora_layers(adapted(folder, use_dora=True)) == "peft"
        model = adapted(folder, target_modules=["q_proj", "embed_tokens"])
        assert fuse_lora_layers(model) == "2 of 3 layers fused"
        assert fuse_lora_layers(model.unload()) is None

    def test_a_hook_on_a_part_sees_its_gradient(self, folder: Path) -> None:
        model, gradients = fused(adapted(folder)), []
        part = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default
        part.register_full_backward_hook(lambda *_: gradients.append(1))
        step(model)
        assert gradients == [1]

    def test_evaluation_drops_nothing(self, folder: Path) -> None:
        model = adapted(folder, rate=0.5).eval()
        with torch.no_grad():
            expected, actual = (one(input_ids=IDS).logits for one in (model, fused(model)))
        assert distance(actual, expected) < 1e-6
