"""Whole models: an adapter merged into its base, and a quantized base in 16 or 32 bits again."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from transformers import Mxfp4Config, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from anneal.contracts.training_config.stored_quantization import StoredQuantization
from worker.training.model.checked_weights import checked_adapters
from worker.training.overrides import drop_weight_conversions

_READERS = (Bnb4bitDeserialize, Bnb8bitDeserialize, Mxfp4Dequantize)
"""Operations by which transformers reads quantized weights."""


def merge_adapter(model: PreTrainedModel, adapter: Path, what: str) -> PreTrainedModel:
    """Return `model`, which is not quantized, with the adapter in a folder merged into its weights.

    It computes what the adapted model does. Tied input and output embeddings are untied, also in the configuration, if
    the adapter changes one of them. `what` names the adapter at the start of a sentence.

    Raises:
        TrainingFailure: `config_error`: the files of the adapter do not fit the model.
    """
    with checked_adapters(what):
        adapted = PeftModel.from_pretrained(model, str(adapter), is_trainable=False, torch_device=str(model.device))
    _untie_adapted(adapted)
    return adapted.merge_and_unload(safe_merge=True)


def dequantize_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return `model` with weights of `dtype`, whether it was quantized when it was loaded or stored so."""
    if getattr(model, "hf_quantizer", None) is not None:
        model = model.dequantize(dtype=dtype)
    # When it saves, transformers applies the inverse of what read the stored weights. There is none for these, or one
    # that only renames the weights.
    drop_weight_conversions(model, _reads_quantized)
    return model.to(dtype)


def _reads_quantized(conversion: Any) -> bool:
    return any(isinstance(operation, _READERS) for operation in getattr(conversion, "operations", ()))


def options_of_stored(stored: StoredQuantization | None) -> dict[str, Any]:
    """Return the options of `from_pretrained` with which a model is dequantized when it is loaded."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if stored and stored.is_dequantized else {}


def _untie_adapted(adapted: PeftModel) -> None:
    """Give both of two tied layers their own weights if the adapter changes either, which a merge writes into them."""
    model = adapted.get_base_model()
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for names in list(tied.items()):
        layer_name, _, parameter = names[0].rpartition(".")
        layers = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        if not any(isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper) for layer in layers):
            continue
        if all(isinstance(layer, TrainableTokensWrapper) for layer in layers):
            continue  # peft trains the same rows for both
        owner = _unwrap_layer(model.get_submodule(layer_name))
        setattr(owner, parameter, torch.nn.Parameter(getattr(owner, parameter).detach().clone(), requires_grad=False))
        del tied[names[0]]
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _unwrap_layer(layer: Any) -> Any:
    """Return the layer of the base in what peft has put around it."""
    while isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
        layer = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
    return layer
