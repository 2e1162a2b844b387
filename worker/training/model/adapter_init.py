"""Adapter of a run, and first values that follow from the weights of the base: PiSSA, OLoRA and LoftQ.

PiSSA and OLoRA subtract the first values of the adapter from the base weights, so that the model starts as the base
does. Every checkpoint has these values, from which a resumed run gets exactly the same base weights, and the adapter of
an output is converted, so that it can be used with the unchanged base.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.loftq_utils import _SafetensorLoader
from peft.utils.other import TrainableTokensWrapper
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from anneal.contracts.training_config.adapters import CHANGES_BASE
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.model import loader
from worker.training.model.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BaseModelSource

FIRST_VALUES = "initial_adapter.safetensors"
"""File of a checkpoint with the first values of an adapter that changed the base weights."""
_ADAPTER = "default"
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, Conv1D)

Values = dict[str, torch.Tensor]
"""Values of an adapter by the names in its file."""


def adapter_config(
    run: TrainingContext, network: PreTrainedModel, revision: str | None, head: loader.Head = "causal"
) -> LoraConfig | None:
    """Return the configuration of the adapter that a run trains or evaluates on `network`; None without one.

    Raises:
        TrainingFailure: `config_error`: the model has not the layers or tokens that it names, or no adapter is possible
            for them.
    """
    adapter, config = loader.lora_config(run.config, revision, head), run.config
    if adapter is None:
        return None
    _check_targets(network, config.target_modules or ())
    if config.layers_to_transform is not None:
        _check_layers(network, config.layers_to_transform)
        # peft takes no layers beside `all-linear`.
        adapter.target_modules = set(config.target_modules or _linear_names(network))
        adapter.layers_to_transform = list(config.layers_to_transform)
    if config.trainable_token_indices is not None:
        _check_tokens(network, config.trainable_token_indices)
    source = _adapter_to_continue(run)
    changes_base = config.init_lora_weights in CHANGES_BASE
    if source is None and changes_base:
        adapter.init_lora_weights = config.init_lora_weights
    elif source is not None and (changes_base or run.is_inference) and not (source / FIRST_VALUES).is_file():
        described = json.loads((source / ADAPTER_CONFIG).read_text())  # of an output, which may be converted
        adapter.r, adapter.lora_alpha = described["r"], described["lora_alpha"]
    return adapter


def set_first_values(run: TrainingContext, model: Any, base: BaseModelSource) -> Values:
    """Set the first values of a new adapter, or the base weights that belong to the one of a checkpoint.

    Returns:
        The first values that checkpoints need; empty if the base weights are unchanged.

    Raises:
        TrainingFailure: `config_error`: the base has not the weights for it.
    """
    init, source = run.config.init_lora_weights, _adapter_to_continue(run)
    if run.config.lora_r is None or (init not in CHANGES_BASE and init != "loftq"):
        return {}
    if init == "loftq":
        if source is None:
            _correct_quantization(run, model, base)
        return {}
    layers = _adapted_layers(model)
    others = [name for name, layer in model.named_modules() if isinstance(layer, LoraLayer) and name not in layers]
    if others:
        name = others[0].removeprefix("base_model.model.")
        message = (
            f"`init_lora_weights: {init}` needs linear layers, and {name} is none: leave it out of `target_modules`."
        )
        raise TrainingFailure("config_error", message)
    if source is None:
        for name, layer in layers.items():
            if layer.lora_A[_ADAPTER].weight.shape[0] < layer.r[_ADAPTER]:
                raise TrainingFailure(
                    "config_error",
                    f"`lora_r` is {layer.r[_ADAPTER]}, and `init_lora_weights: {init}` needs at least as many rows and "
                    f"columns in each layer; {name.removeprefix('base_model.model.')} has the size "
                    f"{layer.out_features}×{layer.in_features}: lower `lora_r`.",
                )
        return {
            f"{name}.{part}.weight": getattr(layer, part)[_ADAPTER].weight.detach().cpu().contiguous().clone()
            for name, layer in layers.items()
            for part in ("lora_A", "lora_B")
        }
    if not (source / FIRST_VALUES).is_file():
        return {}
    values: Values = safetensors.torch.load_file(source / FIRST_VALUES)
    for name, layer in layers.items():
        _subtract_first_product(layer, values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"])
    model.peft_config[_ADAPTER].init_lora_weights = init  # as peft loads the adapters of checkpoints
    return values


def give_bias_to_trained_head(model: Any) -> None:
    """Give the output embeddings the bias of the layer that they wrap, if single tokens of them are trained.

    They are wrapped if they are one matrix with the input embeddings. TRL reads weight and bias of the head, and peft
    answers for the weight alone.
    """
    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        vars(head)["bias"] = head.original_module.bias  # not as a parameter of its own


def save_first_values(values: Values, folder: Path) -> None:
    """Write first values beside an adapter, unless there are none."""
    if values:
        safetensors.torch.save_file(values, folder / FIRST_VALUES, metadata={"format": "pt"})


def convert_to_unchanged_base(folder: Path) -> None:
    """Convert an adapter that has first values beside it to one for the unchanged base: of twice the rank.

    What it adds to the weights is the difference of the trained and the first product.
    """
    if not (folder / FIRST_VALUES).is_file():
        return
    first = safetensors.torch.load_file(folder / FIRST_VALUES)
    values = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
    for name, value in first.items():
        is_input = name.endswith(".lora_A.weight")
        trained = values[name]
        both = [trained, value.to(trained.dtype)] if is_input else [trained, -value.to(trained.dtype)]
        values[name] = torch.cat(both, dim=0 if is_input else 1).contiguous()
    safetensors.torch.save_file(values, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    described = json.loads((folder / ADAPTER_CONFIG).read_text())
    described["r"] *= 2
    described["lora_alpha"] *= math.sqrt(2) if described["use_rslora"] else 2  # the same factor
    described["init_lora_weights"] = True
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True))
    (folder / FIRST_VALUES).unlink()


def _adapter_to_continue(run: TrainingContext) -> Path | None:
    """Return the folder of the adapter that the run resumes or uses; None: it has a new one."""
    source = run.job.weights if run.is_inference else run.resume_from
    return None if source is None else source.path


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and _ADAPTER in layer.lora_A
    }


def _subtract_first_product(layer: Any, first_a: torch.Tensor, first_b: torch.Tensor) -> None:
    """Subtract first values from the base weights of a layer, with the operations of peft in their order."""
    base = layer.get_base_layer()
    weight = base.weight.data
    is_transposed = isinstance(base, Conv1D)
    first_a, first_b = first_a.to(weight.device), first_b.to(weight.device)
    whole = weight.float().T if is_transposed else weight.float()
    with torch.no_grad():
        rest = (whole - layer.scaling[_ADAPTER] * first_b @ first_a).to(weight.dtype)
    base.weight.data = rest.T if is_transposed else rest


def _correct_quantization(run: TrainingContext, model: Any, base: BaseModelSource) -> None:
    """Let the adapter start with the part of the error of each 4-bit weight that its rank can represent.

    peft's `replace_lora_weights_loftq` needs a GPU, and ignores the factor by which the adapter is scaled.
    """
    folder = Path(base.source)
    if not folder.is_dir():
        folder = Path(cached_file(base.source, "config.json", revision=base.revision, local_files_only=True)).parent
    # Checked with peft 0.21: nothing public reads a weight by the name of its module.
    try:
        files = _SafetensorLoader(model, str(folder / "model.safetensors"))
        for name, layer in _adapted_layers(model).items():
            quantized = layer.get_base_layer().weight
            if not isinstance(quantized, Params4bit):
                continue
            stored = files.get_tensor(f"{name.removeprefix('base_model.model.')}.weight")
            loaded = dequantize_4bit(quantized.data, quantized.quant_state).float()
            left, sizes, right = torch.linalg.svd(stored.to(loaded.device).float() - loaded, full_matrices=False)
            rank = layer.r[_ADAPTER]
            roots = (sizes[:rank] / layer.scaling[_ADAPTER]).sqrt()
            layer.lora_A[_ADAPTER].weight.data[: len(roots)] = roots[:, None] * right[:rank]
            layer.lora_B[_ADAPTER].weight.data[:, : len(roots)] = left[:, :rank] * roots
            run.report.alive()
    except (KeyError, FileNotFoundError, SafetensorError) as error:
        raise TrainingFailure(
            "config_error",
            f"`init_lora_weights: loftq` finds no weight in the files of {base.name} for a layer of the model: "
            f"{error}. Leave it out.",
        ) from error


def _check_layers(network: PreTrainedModel, layers: list[int]) -> None:
    count = getattr(network.config.get_text_config(), "num_hidden_layers", None)
    if count is not None and (above := [layer for layer in layers if layer >= count]):
        raise TrainingFailure(
            "config_error",
            f"`layers_to_transform`: this model has {count} layers, 0 to {count - 1}, and so no "
            f"{', '.join(map(str, above[:10]))}.",
        )


def _check_targets(network: PreTrainedModel, names: Sequence[str]) -> None:
    """Reject modules that cannot have an adapter; what matches nothing is found once the adapter exists."""
    for name in names:
        matching = [module for place, module in network.named_modules() if place == name or place.endswith(f".{name}")]
        unfit = next((module for module in matching if not isinstance(module, _ADAPTABLE)), None)
        if unfit is None:
            continue
        inner = sorted(
            {place.rpartition(".")[2] for place, part in unfit.named_modules() if isinstance(part, _ADAPTABLE)}
        )
        advice = f"name those in it ({', '.join(inner[:12])})" if inner else "leave it out"
        raise TrainingFailure(
            "config_error",
            f"`target_modules`: `{name}` is a {type(unfit).__name__}, and adapters are for linear layers, embeddings "
            f"and convolutions: {advice}.",
        )


def _check_tokens(network: PreTrainedModel, tokens: list[int]) -> None:
    rows = network.get_input_embeddings().weight.shape[0]
    if above := [token for token in tokens if token >= rows]:
        raise TrainingFailure(
            "config_error",
            f"`trainable_token_indices`: this model has embeddings for {rows} tokens, 0 to {rows - 1}, and so none for "
            f"{', '.join(map(str, above[:10]))}.",
        )


def _linear_names(network: PreTrainedModel) -> set[str]:
    """Return the last parts of the names of the linear layers within the layers of a model."""
    return {
        name.rpartition(".")[2]
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split("."))
    }
