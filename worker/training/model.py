"""The base model, its tokenizer and the adapter that a run trains."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import datasets
import huggingface_hub
import peft
import torch
import transformers
import trl
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.runs.config import Machine, TrainingConfig, TrainingMethod
from worker.training.failures import TrainingFailure

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Base:
    """Where the weights that a run starts from lie, once a base that is an adapter has been merged."""

    source: str
    """Folder or hub name that `from_pretrained` and the adapter's own configuration name."""
    tokenizer_source: str
    options: dict[str, Any]
    """Revision, offline and trust options, the same for configuration, weights and tokenizer."""
    merged: Path | None = None
    """The private folder of a merged base; it becomes part of the output."""
    from_scratch: bool = False
    """The folder holds an architecture without weights: they start as random numbers drawn with the seed."""


def machine_of(device: dict[str, Any] | None) -> Machine:
    """What the device of this job can do; None: a GPU if there is one."""
    kind = device["kind"] if device else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return Machine(kind="cpu", bf16=True)
    if not torch.cuda.is_available():
        raise TrainingFailure("config_error", "The run was given a GPU, but torch finds none on this machine.")
    flash = transformers.utils.is_flash_attn_2_available()
    return Machine(kind="cuda", bf16=torch.cuda.is_bf16_supported(including_emulation=False), flash_attention=flash)


def weights_dtype(config: TrainingConfig, machine: Machine) -> torch.dtype:
    """Type of the weights as loaded: those that train keep 32 bits, frozen ones take 16 on a GPU."""
    if machine.kind == "cpu" or config.lora_r is None:
        return torch.float32
    return torch.bfloat16 if machine.bf16 else torch.float16


def find_base(job: dict[str, Any], config: TrainingConfig, machine: Machine) -> Base:
    """Locate the base model; an adapter is merged into its own base first, in 16 or 32 bits.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    named = job["base_model"]
    options: dict[str, Any] = {
        "local_files_only": bool(job.get("offline")),
        "trust_remote_code": bool(job.get("trust_remote_code")),
    }
    if named.get("path") is None:
        options["revision"] = named.get("revision") or config.revision or "main"
        return Base(named["hub"], named["hub"], options)
    folder = Path(named["path"])
    if config.revision is not None:
        raise TrainingFailure("config_error", "`revision` belongs to a hub model, and the base is a folder.")
    if not folder.is_dir():
        raise TrainingFailure("model_not_found", f"The base model {named['name']} is not there any more.")
    if not (folder / ADAPTER_CONFIG).is_file():
        return Base(str(folder), str(folder), options, from_scratch=_has_no_weights(folder, named["name"], config))
    merged = _merge(folder, Path(job["output_dir"]) / "base_model", weights_dtype(config, machine), options)
    tokenizer = folder if (folder / "tokenizer_config.json").is_file() else merged
    return Base(str(merged), str(tokenizer), options, merged)


def load_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """The base's tokenizer, with a padding token.

    Raises:
        TrainingFailure: there is none, or it cannot say where a text ends.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_source, **base.options)
    except Exception as error:
        raise _not_loaded(error, base.tokenizer_source, "tokenizer") from error
    if tokenizer.eos_token is None:
        raise TrainingFailure(
            "config_error", "The tokenizer has no end-of-sequence token; set `eos_token` in its configuration."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(base: Base) -> Any:
    """The base's architecture (a transformers configuration), without its weights."""
    try:
        return AutoConfig.from_pretrained(base.source, **base.options)
    except Exception as error:
        raise _not_loaded(error, base.source, "configuration") from error


def load_model(base: Base, config: TrainingConfig, machine: Machine) -> PreTrainedModel:
    """The base model on the device, quantised as the configuration says; weights from safetensors only."""
    options = dict(base.options)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    if base.from_scratch:
        return _initialise(base, config, machine, options)
    if config.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_compute_dtype=getattr(torch, config.bnb_4bit_compute_dtype),
            bnb_4bit_use_double_quant=config.extra.get("double_quant", True),
        )
    elif config.load_in_8bit:
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    if machine.kind == "cuda":
        options["device_map"] = {"": 0}
    elif config.load_in_4bit or config.load_in_8bit:
        options["device_map"] = {"": "cpu"}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base.source, dtype=weights_dtype(config, machine), use_safetensors=True, **options
        )
    except (RuntimeError, MemoryError):
        raise  # memory, or weights that do not fit their configuration: classified as what they are
    except Exception as error:
        raise _not_loaded(error, base.source, "model") from error
    if machine.kind == "cpu":
        keep_evaluation_neutral(model)
    return model


def _initialise(base: Base, config: TrainingConfig, machine: Machine, options: dict[str, Any]) -> PreTrainedModel:
    """The architecture with random weights, the same for the same seed on every device."""
    transformers.set_seed(config.seed)
    chosen = {name: options[name] for name in ("attn_implementation", "trust_remote_code") if name in options}
    try:
        model = AutoModelForCausalLM.from_config(load_config(base), dtype=weights_dtype(config, machine), **chosen)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise _not_loaded(error, base.source, "architecture") from error
    return model


def _has_no_weights(folder: Path, name: str, config: TrainingConfig) -> bool:
    """Whether the folder holds an architecture alone, which only `full` can start from."""
    if any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return False
    if config.method is not TrainingMethod.full:
        raise TrainingFailure(
            "config_error",
            f"The folder {name} holds a configuration but no weights, and `{config.method}` needs some to start from: "
            "put them there, or train the model from scratch with method `full` first and name that run.",
        )
    return True


def keep_evaluation_neutral(model: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in an evaluation on a CPU.

    The repacked form computes slightly differently, also in the training steps that follow: losses after an
    evaluation would be others than without it, and than those of a run resumed in between.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def lora_config(config: TrainingConfig) -> LoraConfig | None:
    """The adapter that this run trains, or None when every weight trains."""
    if config.lora_r is None:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=list(config.target_modules) if config.target_modules else "all-linear",
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        modules_to_save=list(config.modules_to_save) if config.modules_to_save else None,
    )


def first_facts(model: torch.nn.Module, machine: Machine) -> dict[str, Any]:
    """What is known before step 1: parameters, device, library versions, cost of a token."""
    total = trainable = 0
    for parameter in model.parameters():
        # A 4-bit weight stores two numbers in a byte; its quantisation state knows the real shape.
        state = getattr(parameter, "quant_state", None)
        count = state.shape.numel() if state is not None else parameter.numel()
        total += count
        trainable += count if parameter.requires_grad else 0
    facts: dict[str, Any] = {
        "parameters_total": total,
        "parameters_trainable": trainable,
        # Forward 2, backward through activations 2, backward to trained weights 2 operations a parameter.
        "flops_per_token": 4 * total + 2 * trainable,
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "device": machine.kind,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    if machine.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["device_name"] = properties.name
        facts["device_memory_mb"] = round(properties.total_memory / 2**20)
    return facts


def versions() -> dict[str, str]:
    """Versions of everything that the numbers of a run depend on."""
    modules = (torch, transformers, trl, peft, bitsandbytes, accelerate, datasets)
    return {"python": platform.python_version(), **{m.__name__: str(m.__version__) for m in modules}}


def _merge(adapter: Path, target: Path, dtype: torch.dtype, options: dict[str, Any]) -> Path:
    base_name = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if not base_name:
        raise TrainingFailure("model_not_found", f"The adapter in {adapter.name} does not name its base model.")
    try:
        peft_config = PeftConfig.from_pretrained(str(adapter))
        if peft_config.revision:
            options = {**options, "revision": peft_config.revision}
        model = AutoModelForCausalLM.from_pretrained(base_name, dtype=dtype, use_safetensors=True, **options)
        merged = PeftModel.from_pretrained(model, str(adapter), is_trainable=False).merge_and_unload()
        tokenizer_source = str(adapter) if (adapter / "tokenizer_config.json").is_file() else base_name
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source, **options)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise _not_loaded(error, str(base_name), "base of the adapter") from error
    merged.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _not_loaded(error: Exception, source: str, what: str) -> TrainingFailure:
    name = source if not Path(source).is_absolute() else Path(source).name
    missing = (
        OSError,
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.HFValidationError,
        huggingface_hub.errors.LocalEntryNotFoundError,
    )
    text = str(error).split("\n")[0][:300]
    if isinstance(error, missing) or type(error).__name__ == "SafetensorError":
        return TrainingFailure("model_not_found", f"The {what} {name} cannot be loaded: {text}")
    return TrainingFailure("config_error", f"The {what} {name} cannot be used: {type(error).__name__}: {text}")
