"""Loads of weights that end with exactly the tensors that a model needs, all of them finite, or with `config_error`.

transformers and peft initialize what a file lacks randomly, ignore what a model lacks, and only log either.
"""

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import WeightTransform, dot_natural_key
from transformers.utils.loading_report import LoadStateDictInfo

from worker.training.failures import TrainingFailure, classify_error

_NAMES_LISTED = 3
_SIZE_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, the shape in "
    r"current model is torch\.Size\(\[([\d, ]*)\]\)"
)
"""A line of the error of `torch.nn.Module.load_state_dict`."""
_SHARED = "vblora_vector_bank"
_CAUSAL_MASK = re.compile(r"\.attn(\.attention)?\.(bias|masked_bias|causal_mask)$")
"""Constants of GPT-2, GPT-Neo, GPT-J and CodeGen, which earlier versions of transformers saved with the weights."""
_VOCABULARY = re.compile(r"embed|wte|lm_head")
"""Names of tensors with a row for each token."""

Sizes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Stored and needed size of tensors by name."""


def load_pretrained(auto: Any, source: str | Path, name: str, *, has_new_head: bool = False, **options: Any) -> Any:
    """Load a model with `auto.from_pretrained`, from safetensors only, and check what was loaded.

    A classifier does not use the head of a language model, and a language model not what the files of a model for text
    and images have beside it. With `has_new_head` the head of a classifier may be missing, and is initialized randomly.

    Args:
        auto: class of transformers with `from_pretrained`.
        source: folder or hub name.
        name: subject of the message, such as `The base model tiny`.
        has_new_head: the files may lack the head of a classifier.
        options: options of `from_pretrained`.

    Raises:
        TrainingFailure: `config_error`: tensors are missing, unexpected, of another size, or not finite.
    """
    with _non_finite_tensors() as non_finite:
        try:
            model, report = auto.from_pretrained(source, use_safetensors=True, output_loading_info=True, **options)
        except RuntimeError as error:
            _raise_mismatch(error, name)
            raise
    missing = set(report["missing_keys"])
    unexpected = {key for key in report["unexpected_keys"] if not _CAUSAL_MASK.search(key)}
    if unexpected and _is_part_of(source, model, options):
        unexpected = set()
    if auto is AutoModelForSequenceClassification:
        if has_new_head:
            missing = {key for key in missing if key.startswith(f"{model.base_model_prefix}.")}
        if unexpected:
            unexpected -= _language_model_keys(model, options)
    missing |= {f"{key}.nested_absmax" for key in _without_nested_state(model)}
    problems = [*_describe_problems(missing, unexpected), *_wrong_sizes(_quantized_sizes(model))]
    if problems:
        raise _mismatch_failure(name, problems, missing, unexpected)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _raise_non_finite(name, [key for key in non_finite if key in parameters], model.dtype)
    return model


def check_finite(model: torch.nn.Module, name: str) -> None:
    """Check that all parameters of a model are finite.

    Raises:
        TrainingFailure: `config_error` that names the tensors.
    """
    non_finite = [key for key, parameter in model.named_parameters() if not _is_finite(parameter)]
    _raise_non_finite(name, non_finite, getattr(model, "dtype", None))


@contextmanager
def checked_adapters(name: str) -> Iterator[None]:
    """Check each adapter that peft loads during the block; `name` is the subject of the message.

    Raises:
        TrainingFailure: `config_error`: tensors are missing, unexpected, of another size, or not finite.
    """
    load = PeftModel.load_adapter

    @wraps(load)
    def load_checked(model: PeftModel, folder: str, adapter: str, *arguments: Any, **options: Any) -> Any:
        try:
            result = load(model, folder, adapter, *arguments, **options)
        except KeyError as error:
            if "." not in str(error.args[0]):
                raise
            # A module that is trained as a whole, which the file lacks.
            raise _adapter_mismatch(name, _describe_problems({str(error.args[0])}, ())) from error
        except RuntimeError as error:
            if sizes := {_base_name(key, adapter): both for key, both in _sizes_in(error).items()}:
                raise _adapter_mismatch(name, _wrong_sizes(sizes), sizes) from error
            raise
        # In memory each layer has the vectors that VB-LoRA shares; prompts are loaded apart from the keys of modules.
        missing = [key for key in result.missing_keys if _SHARED not in key]
        unexpected = [] if model.peft_config[adapter].is_prompt_learning else result.unexpected_keys
        if problems := _describe_problems(missing, unexpected):
            raise _adapter_mismatch(name, problems)
        own = [key for key, value in model.named_parameters() if f".{adapter}" in key and not _is_finite(value)]
        _raise_non_finite(name, own, None)
        return result

    with _replaced_attribute(PeftModel, "load_adapter", load_checked):
        yield


def check_keys(model: torch.nn.Module, missing: Collection[str], unexpected: Collection[str], name: str) -> None:
    """Check the result of `load_state_dict` of a whole model; tied tensors are in a file once.

    Raises:
        TrainingFailure: `config_error` that names the keys.
    """
    tensors = model.state_dict(keep_vars=True)
    loaded = {id(tensor) for key, tensor in tensors.items() if key not in missing}
    missing = [key for key in missing if id(tensors.get(key)) not in loaded]
    if problems := _describe_problems(missing, unexpected):
        raise _mismatch_failure(name, problems, missing, unexpected)


@contextmanager
def checked_sizes(name: str) -> Iterator[None]:
    """Convert the error of `load_state_dict` for tensors of another size.

    Raises:
        TrainingFailure: `config_error` that names the sizes.
    """
    try:
        yield
    except RuntimeError as error:
        if sizes := _sizes_in(error):
            raise _mismatch_failure(name, _wrong_sizes(sizes)) from error
        raise


@contextmanager
def _replaced_attribute(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _non_finite_tensors() -> Iterator[list[str]]:
    """Collect the names of the tensors that are not finite when transformers has read them, on their device.

    A quantized tensor hides such values, so each is checked before that.
    """
    names: list[str] = []
    # Checked with transformers 5.23: nothing public sees a tensor between the file and its quantization.
    materialize = WeightTransform.materialize_tensors

    def materialize_checked(transform: WeightTransform) -> dict[str, list[torch.Tensor]]:
        targets = list(transform.layer_targets)
        tensors: dict[str, list[torch.Tensor]] = materialize(transform)
        if not all(_is_finite(tensor) for parts in tensors.values() for tensor in parts):
            names.extend(targets)
        return tensors

    with _replaced_attribute(WeightTransform, "materialize_tensors", materialize_checked):
        yield names


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all values are finite, or of a type with 8 bits, which cannot be summed."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return True
    values = tensor.detach()
    # A sum is 20 times as fast as a look at each value on a CPU; it overflows with finite values only if they are huge.
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def _raise_non_finite(name: str, keys: Collection[str], dtype: torch.dtype | None) -> None:
    if not keys:
        return
    is_half = dtype is torch.float16
    loaded_as = " once they are converted to float16, whose largest value is 65,504" if is_half else ""
    advice = "Set `dtype` to bfloat16 or float32, copy" if is_half else "Copy"
    raise TrainingFailure(
        "config_error",
        f"{name} cannot be used: its weights contain values that are NaN or infinite{loaded_as}, in "
        f"{_list_keys(keys)}. "
        f"{advice} or download the model again, or use another one.",
    )


def _raise_mismatch(error: RuntimeError, name: str) -> None:
    """Raise the failure that `error` of `from_pretrained` stands for, if it is about tensors that do not fit."""
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    reports = (value for variables in frames for value in variables.values() if isinstance(value, LoadStateDictInfo))
    # The error itself only refers to the log.
    info = next(reports, None)
    if info is None:
        return
    for details in info.conversion_errors.values():
        failure = classify_error(RuntimeError(details))
        if failure.code != "internal":  # such as a lack of memory
            raise failure from error
    problems = _wrong_sizes({key: (tuple(stored), tuple(needed)) for key, stored, needed in info.mismatched_keys})
    if info.conversion_errors:
        details = next(iter(info.conversion_errors.values()))
        reason = details.splitlines()[-2]
        reason = f"{reason} is missing" if "KeyError" in details else reason
        problems.append(
            f"{_list_keys(info.conversion_errors)} cannot be built from the tensors in its files ({reason})"
        )
    if problems:
        missing = info.missing_keys - info.conversion_errors.keys()
        raise _mismatch_failure(name, [*_describe_problems(missing, info.unexpected_keys), *problems]) from error


def _is_part_of(source: str | Path, model: Any, options: Mapping[str, Any]) -> bool:
    """Return True if the files are those of a larger model, of which transformers has loaded the one for text."""
    stored = options.get("config")
    if stored is None:
        names = ("trust_remote_code", "local_files_only", "revision")
        stored = AutoConfig.from_pretrained(source, **{name: options[name] for name in names if name in options})
    return type(model.config) is type(stored.get_text_config()) is not type(stored)


def _language_model_keys(model: Any, options: Mapping[str, Any]) -> set[str]:
    """Return the keys of the language model of the same architecture, whose head a classifier does not have."""
    trusts = options.get("trust_remote_code", False)
    try:
        with torch.device("meta"):
            return set(AutoModelForCausalLM.from_config(model.config, trust_remote_code=trusts).state_dict())
    except ValueError:  # there is none
        return set()


def _quantized_sizes(model: torch.nn.Module) -> Sizes:
    """Return the stored and the needed size of each quantized weight where they differ.

    transformers does not compare these.
    """
    sizes: Sizes = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear4bit | Linear8bitLt):
            continue
        state = getattr(module.weight, "quant_state", None)
        stored = tuple(module.weight.shape if state is None else state.shape)
        if stored != (needed := (module.out_features, module.in_features)):
            sizes[f"{name}.weight"] = stored, needed
    return sizes


def _without_nested_state(model: torch.nn.Module) -> list[str]:
    """Return the 4-bit weights whose scales are quantized, and lack the scales of these.

    bitsandbytes would use them as they are.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    # A weight that the files lack has none.
    states = {f"{name}.weight": getattr(layer.weight, "quant_state", None) for name, layer in layers.items()}
    return [key for key, state in states.items() if state and not (state.nested or state.absmax.is_floating_point())]


def _sizes_in(error: RuntimeError) -> Sizes:
    """Return the stored and the needed size of each tensor that an error of `load_state_dict` names."""
    return {
        key: (tuple(map(int, stored.split(","))), tuple(map(int, needed.split(","))))
        for key, stored, needed in _SIZE_MISMATCH.findall(str(error))
    }


def _base_name(key: str, adapter: str) -> str:
    """Return the name of a tensor without the modules that peft puts around it."""
    name = key.removeprefix("base_model.model.")
    for wrapper in (f".modules_to_save.{adapter}", ".original_module", f".{adapter}"):
        name = name.replace(wrapper, "")
    return name


def _describe_problems(missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    clauses = (missing, "missing"), (unexpected, "unexpected")
    return [
        f"{len(keys)} tensor{' is' if len(keys) == 1 else 's are'} {what} ({_list_keys(keys)})"
        for keys, what in clauses
        if keys
    ]


def _wrong_sizes(sizes: Sizes) -> list[str]:
    keys = sorted(sizes, key=dot_natural_key)
    clauses = [
        f"{key} has the size {_format_shape(sizes[key][0])} instead of {_format_shape(sizes[key][1])}" for key in keys
    ]
    more = len(clauses) - _NAMES_LISTED
    return clauses if more <= 0 else [*clauses[:_NAMES_LISTED], f"{more} more have another size"]


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _list_keys(keys: Collection[str]) -> str:
    """Return the first names and the number of the others."""
    names = sorted(keys, key=dot_natural_key)
    more = len(names) - _NAMES_LISTED
    return ", ".join(names[:_NAMES_LISTED]) + (f" and {more} more" if more > 0 else "")


def _mismatch_failure(
    name: str, problems: Collection[str], missing: Collection[str] = (), unexpected: Collection[str] = ()
) -> TrainingFailure:
    advice = "Copy or download the model again, or correct its config.json or the names in its files."
    # Such as `model.` or `module.`, which wrappers add to every name.
    key = min(unexpected, key=len, default="")
    prefixes = {key.removesuffix(needed) for needed in missing if key.endswith(f".{needed}")}
    if len(prefixes) == 1 and {stored.removeprefix(*prefixes) for stored in unexpected} <= set(missing):
        advice = f"All names in its files start with `{prefixes.pop()}`: save the model again without that prefix."
    return TrainingFailure(
        "config_error",
        f"{name} cannot be used: its weights are not those that its config.json describes: {'; '.join(problems)}. "
        f"{advice}",
    )


def _adapter_mismatch(name: str, problems: Collection[str], sizes: Collection[str] = ()) -> TrainingFailure:
    advice = "Name the model that it was trained on in its adapter_config.json, or use another adapter."
    if sizes and all(_VOCABULARY.search(key) for key in sizes):
        advice = (
            "It was trained on a model with another number of token embeddings: resize those of the base "
            "(`resize_token_embeddings`), merge the adapter into it, and use the merged model as the base model."
        )
    return TrainingFailure(
        "config_error", f"{name} cannot be used: it does not fit its base model: {'; '.join(problems)}. {advice}"
    )
