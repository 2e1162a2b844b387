"""Model weights on the device, loaded as configured, with the adapter that a run trains."""

import copy
import importlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import accelerate
import bitsandbytes
import datasets
import peft
import torch
import transformers
import trl
from bitsandbytes.nn import Int8Params, Linear4bit, Params4bit
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl.trainer.reward_trainer import suppress_seqcls_warning

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities, default_dtype
from worker.training.failures import TrainingFailure, device_failure
from worker.training.model.attention import VARLEN, supports_varlen
from worker.training.model.base_model import BaseModelSource, load_failure
from worker.training.model.checked_weights import load_pretrained
from worker.training.model.merging import dequantize_model, options_of_stored
from worker.wire.heartbeat import HeartbeatCallback, no_heartbeat

# The first call compiles hundreds of patterns, which transformers keeps: here, so that forks of the zygote have them.
get_checkpoint_conversion_mapping("llama")

Head = Literal["causal", "reward"]
"""Output of a model: next-token probabilities, or one number for a whole text."""

SCORE = "score"
"""Name of the layer that computes the one number of a text."""


def machine_of(device: AssignedDevice | None) -> DeviceCapabilities:
    """Return the capabilities of this job's device; None: a GPU if there is one."""
    kind = device.kind if device else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return DeviceCapabilities(kind="cpu", bf16=True)
    try:
        # A sick GPU is found by its driver, and fails only when it is used.
        torch.zeros(1, device="cuda").item()
    except (RuntimeError, AssertionError) as error:
        raise device_failure(error) from error
    return DeviceCapabilities(
        kind="cuda",
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        flash_attention=is_flash_attn_2_available() and _can_import("flash_attn"),
        flash_attention_3=is_flash_attn_3_available() and _can_import("flash_attn_interface"),
    )


def _can_import(package: str) -> bool:
    """Return True if a compiled package can be imported, unlike one that was built for another torch."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError):
        return False
    return True


def weights_dtype(config: TrainingConfig, machine: DeviceCapabilities) -> torch.dtype:
    """Return the dtype of the weights as loaded: `weights_dtype` if all are trained, else that of the computation."""
    name = config.weights_dtype if config.lora_r is None else config.dtype or default_dtype(machine)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_model(
    base: BaseModelSource,
    config: TrainingConfig,
    machine: DeviceCapabilities,
    head: Head = "causal",
    *,
    in_host_memory: bool = False,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load the base model onto the device, quantized as configured; weights from safetensors only.

    A `reward` head that the base does not have is initialized randomly with the seed, as in TRL. With `in_host_memory`,
    a model that is not quantized stays there. `dtype` is that of the weights; None: as a run trains them.
    """
    options = dict(base.options)
    attention = _choose_attention(base, config, machine)
    if attention is not None:
        options["attn_implementation"] = attention
    if head == "reward":
        options["num_labels"] = 1
    if base.from_scratch:
        return _initialize_model(base, config, machine, options)
    # The new head is fully trained, so it is not quantized; transformers excludes a `causal` head by itself.
    unquantized = [SCORE] if head == "reward" else None
    stored = base.stored_quantization
    if stored is not None and stored.is_dequantized:
        options |= options_of_stored(stored)
    elif stored is not None:
        options["config"] = _stored_config(base, config, head)
        options.pop("num_labels", None)  # is in it
    elif config.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_compute_dtype=getattr(torch, config.bnb_4bit_compute_dtype),
            bnb_4bit_use_double_quant=config.trainer_options.double_quant,
            llm_int8_skip_modules=unquantized,
        )
    elif config.load_in_8bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=unquantized)
    quantized = (config.load_in_4bit or config.load_in_8bit) if stored is None else stored.bits is not None
    if machine.kind == "cuda" and (quantized or not in_host_memory):
        options["device_map"] = {"": torch.cuda.current_device()}
    elif quantized:
        options["device_map"] = {"": "cpu"}
    transformers.set_seed(config.seed)
    try:
        with suppress_seqcls_warning() if head == "reward" else nullcontext():
            dtype = dtype or weights_dtype(config, machine)
            model: PreTrainedModel = load_pretrained(
                _AUTO[head],
                base.source,
                f"The base model {base.name}",
                has_new_head=head == "reward",
                dtype=dtype,
                **options,
            )
    except (RuntimeError, MemoryError, TrainingFailure):
        raise  # out of memory is classified as such
    except Exception as error:
        raise load_failure(error, base.source, "model") from error
    if stored is not None:
        model = _as_configured(model, config, dtype)
    if machine.kind == "cpu":
        keep_evaluation_neutral(model)
    return model


def _stored_config(base: BaseModelSource, config: TrainingConfig, head: Head) -> Any:
    """Return the configuration of a model whose files are quantized, with what is no property of the files changed."""
    described = copy.deepcopy(base.architecture)
    parts = (described, described.get_text_config(decoder=True))
    stored = dict(next(part.quantization_config for part in parts if getattr(part, "quantization_config", None)))
    stored["bnb_4bit_compute_dtype"] = config.bnb_4bit_compute_dtype
    if head == "reward":
        described.num_labels = 1
        stored["llm_int8_skip_modules"] = [*(stored.get("llm_int8_skip_modules") or ()), SCORE]
    described.quantization_config = stored
    return described


def _as_configured(model: PreTrainedModel, config: TrainingConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose files are quantized with all other weights in `dtype`, which transformers leaves as stored.

    Without an adapter, which is an evaluation, it is dequantized: no trainer of TRL takes it otherwise.
    """
    if config.lora_r is None or getattr(model, "hf_quantizer", None) is None:
        return dequantize_model(model, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, Params4bit | Int8Params):
            parameter.data = parameter.data.to(dtype)
    return model


def load_for_merge(
    base: BaseModelSource, config: TrainingConfig, machine: DeviceCapabilities, head: Head = "causal"
) -> PreTrainedModel:
    """Load the base model onto the device in its own data type; a quantized one as the adapter saw it, dequantized."""
    dtype = base.architecture.get_text_config().dtype or torch.float32
    if config.load_in_4bit or config.load_in_8bit or base.stored_quantization is not None:
        return dequantize_model(load_model(base, config, machine, head), dtype)
    # On a GPU, directly in the data type of the base: a frozen base is trained on in 16 bits, whatever its own are.
    return load_model(base, config, machine, head, dtype=dtype if machine.kind == "cuda" else None).to(dtype)


def load_saved(folder: Path, head: Head, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load a whole model from a folder onto the CPU, in the data type of its weights."""
    model: PreTrainedModel = load_pretrained(
        _AUTO[head], folder, "The output", dtype="auto", trust_remote_code=trust_remote_code
    )
    return model


def name_base(model: Any, name: str) -> None:
    """Replace the place that a model was loaded from by a name that means the same on other machines."""
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.base_model_name_or_path = name
    model.config._name_or_path = name


def _choose_attention(base: BaseModelSource, config: TrainingConfig, machine: DeviceCapabilities) -> str | None:
    """Return the attention implementation; None leaves it to the model, which uses sdpa if it supports it.

    Raises:
        TrainingFailure: `config_error`: the requested one is not right for this model.
    """
    takes_varlen = supports_varlen(base.architecture)
    if config.attn_implementation == VARLEN and not takes_varlen:
        raise TrainingFailure(
            "config_error",
            "`attn_implementation` is `varlen`, which computes causal attention and windows of it only, and this model "
            "needs another one: leave it out.",
        )
    if config.attn_implementation is not None:
        return config.attn_implementation
    flash = ("flash_attention_2", machine.flash_attention), ("flash_attention_3", machine.flash_attention_3)
    installed = next((name for name, is_installed in flash if is_installed), None)
    if machine.kind == "cuda" and installed and config.dtype != "float32":
        kind = AutoModelForCausalLM._model_mapping.get(type(base.architecture), None)
        if getattr(kind, "_supports_flash_attn", False):
            return installed
    return VARLEN if takes_varlen else None


_AUTO: dict[Head, Any] = {"causal": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}


def _initialize_model(
    base: BaseModelSource, config: TrainingConfig, machine: DeviceCapabilities, options: dict[str, Any]
) -> PreTrainedModel:
    """Create the architecture with random weights, the same for the same seed on every device."""
    transformers.set_seed(config.seed)
    chosen = {name: options[name] for name in ("attn_implementation", "trust_remote_code") if name in options}
    try:
        model = AutoModelForCausalLM.from_config(base.architecture, dtype=weights_dtype(config, machine), **chosen)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise load_failure(error, base.source, "architecture") from error
    return model


def keep_evaluation_neutral(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in an evaluation on a CPU.

    The repacked form computes slightly differently, also in the training steps that follow: losses after an
    evaluation would differ from those without it, and from those of a run resumed in between.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def check_vocabulary(network: PreTrainedModel, highest_id: int) -> None:
    """Reject a tokenizer whose ids the model has no embeddings for: they would be read out of bounds."""
    rows = network.get_input_embeddings().weight.shape[0]
    if highest_id >= rows:
        raise TrainingFailure(
            "config_error",
            f"The tokenizer returns the token id {highest_id}, but the model has embeddings for {rows} tokens (0 to "
            f"{rows - 1}). Use the tokenizer that the model was trained with. If {highest_id} is the id of the padding "
            "token alone, set `pad_token` in tokenizer_config.json to a token that the model has, such as its "
            "end-of-sequence token.",
        )


def check_modules(model: torch.nn.Module, config: TrainingConfig) -> None:
    """Reject module names that match nothing, so that everything the user wants trained is trained."""
    layers = dict(model.named_modules())
    adapted = [name for name, layer in layers.items() if isinstance(layer, BaseTunerLayer)]
    missing = [w for w in config.target_modules or () if not any(name.endswith(f".{w}") for name in adapted)]
    whole = [w for w in config.modules_to_save or () if not any(f"{w}.modules_to_save" in name for name in layers)]
    for field, names, there in (
        ("target_modules", missing, _last_parts([name for name in layers if _is_linear(layers[name])])),
        ("modules_to_save", whole, _last_parts(list(layers))),
    ):
        if names:
            some = ", ".join(there[:12])
            raise TrainingFailure(
                "config_error", f"`{field}`: this model has no module {', '.join(names)}; it has {some}."
            )


@contextmanager
def unrounded_adapters(alive: HeartbeatCallback = no_heartbeat) -> Iterator[None]:
    """During the block, which creates a trainer, new adapters keep the 32-bit values that peft draws for them.

    `alive` is called for each of them, since first values may take a decomposition of the base weights.

    peft converts an adapter to the data type of its base layer before it converts it to 32 bits, and TRL converts those
    on a quantized base to bfloat16. Either rounds the values.
    """
    drawn: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    # Checked with peft 0.21: nothing public keeps it from the conversion.
    name = "_move_adapter_to_device_of_base_layer"
    originals = {kind: getattr(kind, name) for kind in (BaseTunerLayer, ParamWrapper)}

    def keep_unrounded(move: Callable[..., None]) -> Callable[..., None]:
        def move_alone(layer: BaseTunerLayer, adapter: str, device: torch.device | None = None) -> None:
            alive()
            values = [parameter.data for parameter in _adapter_parameters(layer, adapter)]
            move(layer, adapter, device)
            for parameter, value in zip(_adapter_parameters(layer, adapter), values, strict=True):
                parameter.data = value.to(parameter.device)
                drawn.append((parameter, parameter.data))

        return move_alone

    for kind, original in originals.items():
        setattr(kind, name, keep_unrounded(original))
    try:
        yield
    finally:
        for kind, original in originals.items():
            setattr(kind, name, original)
    for parameter, value in drawn:
        if parameter.dtype is not value.dtype:
            parameter.data = value.to(parameter.device)


def _adapter_parameters(layer: BaseTunerLayer, adapter: str) -> list[torch.nn.Parameter]:
    parts = [getattr(layer, name, {}) for name in layer.adapter_layer_names]
    owned = [part[adapter] for part in parts if adapter in part]
    return [p for one in owned for p in (one.parameters() if isinstance(one, torch.nn.Module) else [one])]


def keep_full_precision(model: torch.nn.Module) -> None:
    """Convert every trained parameter to 32 bits, since 16 bits round small updates to nothing.

    A copy of a frozen module has that module's type, and TRL converts what trains on a quantized base to bfloat16.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _is_linear(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear | BaseTunerLayer)


def _last_parts(names: Sequence[str]) -> list[str]:
    ours = ("lora_", "base_layer", "default", "base_model")
    last = (name.rpartition(".")[2] for name in names)
    return sorted({part for part in last if part and not part.isdigit() and not part.startswith(ours)})


def lora_config(config: TrainingConfig, revision: str | None = None, head: Head = "causal") -> LoraConfig | None:
    """Return the configuration of the adapter, with the base's `revision`; None if all weights are trained.

    A `reward` head is fully trained in addition to the adapter. `adapter_init.py` adds what depends on the model.
    """
    if config.lora_r is None:
        return None
    whole = list(config.modules_to_save or ())
    if head == "reward" and SCORE not in whole:
        whole.append(SCORE)
    return LoraConfig(
        task_type="SEQ_CLS" if head == "reward" else "CAUSAL_LM",
        revision=revision,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=list(config.target_modules) if config.target_modules else "all-linear",
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        modules_to_save=whole or None,
        init_lora_weights=config.init_lora_weights if config.init_lora_weights in ("gaussian", "orthogonal") else True,
        trainable_token_indices=list(config.trainable_token_indices) if config.trainable_token_indices else None,
    )


def initial_run_info(model: torch.nn.Module, machine: DeviceCapabilities) -> dict[str, Any]:
    """Return the run info known before step 1: parameters, device, library versions."""
    total = trainable = 0
    for parameter in model.parameters():
        # A 4-bit weight packs two values in a byte; its quantization state has the real shape.
        state = getattr(parameter, "quant_state", None)
        count = state.shape.numel() if state is not None else parameter.numel()
        total += count
        trainable += count if parameter.requires_grad else 0
    facts: dict[str, Any] = {
        "parameters_total": total,
        "parameters_trainable": trainable,
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "device": machine.kind,
        "versions": library_versions(),
        # Vector instructions and the number of threads of a CPU affect how its sums are rounded.
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if machine.kind == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["device_name"] = properties.name
        facts["device_memory_mb"] = round(properties.total_memory / 2**20)
    return facts


def library_versions() -> dict[str, str]:
    """Return the versions of everything that affects the numbers of a run."""
    modules = (torch, transformers, trl, peft, bitsandbytes, accelerate, datasets)
    return {"python": platform.python_version(), **{m.__name__: str(m.__version__) for m in modules}}
