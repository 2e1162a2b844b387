"""Conflicts of configuration fields with each other, the data, or the machine.

Bounds of single fields: `fields.py`. All checks together: `validation.py`.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, OPTION_GROUPS, DpoOptions, GkdOptions, KtoOptions, RlhfOptions
from anneal.contracts.training_config.field_traits import (
    ADAPTER_ONLY,
    FOUR_BIT_ONLY,
    NEEDS_EVAL_DATA,
    NEEDS_SAMPLES,
    SUPERVISED_ONLY,
)
from anneal.contracts.training_config.fields import DType, TrainingConfig
from anneal.contracts.training_config.optimizers import (
    ADAM_OPTIONS,
    OPTIMIZERS,
    SCHEDULERS,
    SHARDED_OPTIMIZERS,
    STOCHASTIC_OPTIMIZERS,
    OptimizerOptions,
    SchedulerOptions,
)
from anneal.contracts.training_config.padding import SEPARATES_TEXTS

INSTALL_GGUF_CONVERTER = (
    "run `git clone https://github.com/ggml-org/llama.cpp` and `pip install sentencepiece` on the workers, and set "
    "ANNEAL_GGUF_CONVERTER to the path of the clone's `convert_hf_to_gguf.py`"
)
INSTALL_GGUF_QUANTIZER = (
    "run `cmake -B build && cmake --build build --target llama-quantize` in the clone of llama.cpp on the workers, or "
    "set ANNEAL_GGUF_QUANTIZER to the path of `llama-quantize`"
)
_OF_WANDB = ("wandb_project", "wandb_entity", "wandb_name", "wandb_group")
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
"""Losses of `dpo` that allow for reversed pairs."""


class DeviceCapabilities(BaseModel):
    """Capabilities of a run's device."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = False
    flash_attention: bool = Field(default=False, description="True if `flash_attention_2` is available.")
    flash_attention_3: bool = Field(default=False, description="True if `flash_attention_3` is available.")


def field_error(field: str, code: str, message: str) -> FieldError:
    """Create an error for a field; the message follows the field's name and has no final period."""
    return FieldError(field=field, code=code, message=f"`{field}` {message}.")


def default_dtype(machine: DeviceCapabilities) -> DType:
    """Return the data type in which a device computes if `dtype` is not set."""
    if machine.kind == "cpu":
        return "float32"
    return "bfloat16" if machine.bf16 else "float16"


def wants_adapter(config: TrainingConfig) -> bool:
    """Return True if an adapter is trained rather than all weights."""
    return METHODS[config.method].trains_adapter(config.lora_r)


def method_conflicts(config: TrainingConfig, user_set_fields: set[str]) -> list[FieldError]:
    """Return conflicts of fields with the method or each other; `user_set_fields` are the fields that the user set."""
    conflicts = []
    method = METHODS[config.method]
    if config.load_in_8bit and config.load_in_4bit and "load_in_4bit" in user_set_fields:
        conflicts.append(field_error("load_in_8bit", "conflict", "and `load_in_4bit` cannot both be true; choose one"))
    for name in ("load_in_4bit", "load_in_8bit"):
        if not (getattr(config, name) and name in user_set_fields):
            continue
        if method.adapter == "forbidden":
            message = f"cannot be used with method `{method.name}`, which trains all weights; leave it out"
            conflicts.append(field_error(name, "conflict", message))
        elif method.quantization == "forbidden":
            message = f"cannot be used with method `{method.name}`; use method `{method.smaller}`"
            conflicts.append(field_error(name, "conflict", message))
        elif config.lora_r is None:
            conflicts.append(
                field_error(
                    name, "conflict", "needs an adapter, because quantized weights cannot be trained; set `lora_r`"
                )
            )
    if method.adapter == "required" and config.lora_r is None:
        message = f"cannot be null with method `{method.name}`; use method `full` or `sft`"
        conflicts.append(field_error("lora_r", "conflict", message))
    unquantized = "load_in_4bit" in user_set_fields and not config.load_in_4bit and not config.load_in_8bit
    if method.quantization == "required" and unquantized:
        message = f"is false, but method `{method.name}` needs a 4-bit or 8-bit base model; use `lora`"
        conflicts.append(field_error("load_in_4bit", "conflict", message))
    if not wants_adapter(config):
        conflicts += [
            field_error(name, "conflict", "applies only to adapters, and this run trains all weights; leave it out")
            for name in ADAPTER_ONLY
            if name in user_set_fields and getattr(config, name) is not None
        ]
    elif config.target_modules and "lm_head" in config.target_modules:
        conflicts.append(
            field_error(
                "target_modules", "conflict", "cannot contain `lm_head`; add it to `modules_to_save` to train it"
            )
        )
    four_bit = config.load_in_4bit and not config.load_in_8bit and wants_adapter(config)
    if not four_bit or method.quantization == "forbidden":
        conflicts += [
            field_error(name, "conflict", "applies only to a 4-bit base model, and this run has none; leave it out")
            for name in FOUR_BIT_ONLY
            if name in user_set_fields
        ]
    compute = config.bnb_4bit_compute_dtype
    if "bnb_4bit_compute_dtype" in user_set_fields and config.dtype not in (None, compute):
        message = f"is `{compute}`, but 4-bit layers compute in `dtype`, which is `{config.dtype}`; leave it out"
        conflicts.append(field_error("bnb_4bit_compute_dtype", "conflict", message))
    if config.dtype == "float32" and (config.attn_implementation or "").startswith("flash_attention"):
        message = f"is `{config.attn_implementation}`, which computes in 16 bits, but `dtype` is `float32`; use `sdpa`"
        conflicts.append(field_error("attn_implementation", "conflict", message))
    if config.activation_offload and method.generates:
        message = f"cannot be used with method `{method.name}`, whose trainer does not support it; leave it out"
        conflicts.append(field_error("activation_offload", "conflict", message))
    if config.torch_compile and (method.generates or method.has_teacher):
        message = f"cannot be used with method `{method.name}`, which also generates with the layers; leave it out"
        conflicts.append(field_error("torch_compile", "conflict", message))
    conflicts += _objective_conflicts(config, user_set_fields)
    conflicts += _sample_conflicts(config, user_set_fields)
    if "wandb" not in config.report_to:
        message = "has no effect unless `report_to` contains `wandb`; add that, or leave this out"
        conflicts += [field_error(name, "conflict", message) for name in _OF_WANDB if name in user_set_fields]
    conflicts += gguf_conflicts(config)
    for group in OPTION_GROUPS:
        if method.name != group and any(name.split(".")[0] == group for name in user_set_fields):
            message = f"applies only to method `{group}`, and the method is `{method.name}`"
            conflicts.append(field_error(group, "conflict", message))
    if config.lr_scheduler_type == "constant" and "warmup_ratio" in user_set_fields and config.warmup_ratio > 0:
        conflicts.append(
            field_error("warmup_ratio", "conflict", "has no effect with `constant`; use `constant_with_warmup`")
        )
    conflicts += _optimizer_conflicts(config, user_set_fields)
    conflicts += _weights_dtype_conflicts(config, user_set_fields)
    conflicts += _scheduler_conflicts(config)
    if config.max_steps is not None and config.min_steps is not None and config.min_steps > config.max_steps:
        conflicts.append(field_error("min_steps", "conflict", "cannot be above `max_steps`"))
    if "extra.memory_profile_entries" in user_set_fields and config.extra.get("memory_profile") is not True:
        message = "has no effect unless `extra.memory_profile` is true; set that, or leave this out"
        conflicts.append(field_error("extra.memory_profile_entries", "conflict", message))
    if config.extra.get("prune_fraction") is not None and wants_adapter(config):
        message = "prunes a whole model, and this run trains an adapter; use method `full`, or `sft` with `lora_r` null"
        conflicts.append(field_error("extra.prune_fraction", "conflict", message))
    if config.extra.get("collator") is not None and method.generates:
        message = f"cannot be used with method `{method.name}`, whose batches are prompts as text; leave it out"
        conflicts.append(field_error("extra.collator", "conflict", message))
    if config.revision is not None and config.base_model.startswith("run_"):
        conflicts.append(
            field_error("revision", "conflict", "applies only to hub models, and `base_model` is a run; leave it out")
        )
    return conflicts


def _optimizer_conflicts(config: TrainingConfig, user_set_fields: set[str]) -> list[FieldError]:
    """Return options that the optimizer does not read."""
    optimizer = OPTIMIZERS[config.optim]
    unread = [f"extra.{name}" for name in ADAM_OPTIONS if name not in optimizer.adam_options]
    options = _set_options(config, "optim_args", OptimizerOptions)
    conflicts = [
        field_error(name, "conflict", f"has no effect with `{config.optim}`; leave it out")
        for name in (*unread, *(f"extra.optim_args.{name}" for name in options if name not in optimizer.options))
        if name in user_set_fields or name.startswith("extra.optim_args.")
    ]
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        message = "needs `momentum` above 0 and no `dampening`; set those, or leave it out"
        conflicts.append(field_error("extra.optim_args.nesterov", "conflict", message))
    return conflicts


def _weights_dtype_conflicts(config: TrainingConfig, user_set_fields: set[str]) -> list[FieldError]:
    """Return the reasons why the weights cannot be trained in bfloat16."""
    if config.weights_dtype == "float32":
        return []
    if wants_adapter(config):
        message = (
            "applies to runs that train all weights, and this run trains an adapter, whose weights have 32 bits; leave "
            "it out"
        )
        return [field_error("weights_dtype", "conflict", message)]
    conflicts = []
    names = " or ".join(f"`{name}`" for name in STOCHASTIC_OPTIMIZERS)
    if config.extra.get("optimizer") is not None:
        message = f"is `bfloat16`, which needs `optim` {names}, not the plugin `extra.optimizer`"
        conflicts.append(field_error("weights_dtype", "conflict", message))
    elif "optim" in user_set_fields and not OPTIMIZERS[config.optim].rounds_stochastically:
        message = f"is `{config.optim}`, which would round small updates of weights in bfloat16 to nothing; use {names}"
        conflicts.append(field_error("optim", "conflict", message))
    if config.dtype is not None and config.dtype != "bfloat16":
        message = f"is `{config.dtype}`, but weights in bfloat16 compute in bfloat16; leave it out"
        conflicts.append(field_error("dtype", "conflict", message))
    return conflicts


def _scheduler_conflicts(config: TrainingConfig) -> list[FieldError]:
    """Return options that the learning-rate schedule does not read, and those that it lacks."""
    name, group = config.lr_scheduler_type, "extra.lr_scheduler_kwargs"
    options = _set_options(config, "lr_scheduler_kwargs", SchedulerOptions)
    read = SCHEDULERS[name]
    conflicts = [
        field_error(f"{group}.{option}", "conflict", f"has no effect with `{name}`; leave it out")
        for option in options
        if option not in read
    ]
    if "min_lr" in read and ("min_lr" in options) == ("min_lr_rate" in options):
        conflicts.append(field_error(group, "missing", f"must have either `min_lr` or `min_lr_rate` with `{name}`"))
    if "num_decay_steps" in read and "num_decay_steps" not in options:
        conflicts.append(field_error(group, "missing", f"must have `num_decay_steps` with `{name}`"))
    # A rate that is not above the final one would rise; by default, the polynomial schedule decays to 1e-7.
    last = {"min_lr": 0.0, "lr_end": 1e-7}
    for option, default in last.items():
        end = options.get(option, default)
        if option in read and isinstance(end, int | float) and config.learning_rate <= end:
            message = f"must be above {end:g} with `{name}`, which decays to that"
            conflicts.append(field_error("learning_rate", "conflict", message))
    return conflicts


def _set_options(config: TrainingConfig, group: str, model: type[BaseModel]) -> dict[str, Any]:
    """Return the known options of a group of `extra` that are set; the group may be malformed."""
    options = config.extra.get(group)
    known = options.items() if isinstance(options, Mapping) else ()
    return {name: value for name, value in known if name in model.model_fields and value is not None}


def _objective_conflicts(config: TrainingConfig, user_set_fields: set[str]) -> list[FieldError]:
    """Return fields that apply to another objective than that of the method."""
    conflicts = []
    method = METHODS[config.method]
    if not method.is_supervised:
        message = f"applies only to supervised methods, and the method is `{method.name}`; leave it out"
        conflicts += [
            field_error(name, "conflict", message)
            for name in SUPERVISED_ONLY
            # Null, false and `all` turn a feature off; fields of `extra` have no such value.
            if name in user_set_fields and getattr(config, name, True) not in (None, False, "all")
        ]
    if not method.truncates and "truncation_mode" in user_set_fields:
        skips = f"skips {method.row_noun} that are too long"
        message = f"has no effect with method `{method.name}`, which {skips}; leave it out"
        conflicts.append(field_error("truncation_mode", "conflict", message))
    if config.batch_size < method.min_batch_size:
        message = (
            f"is {config.batch_size}, but method `{method.name}` compares the rows of a micro-batch with each other; "
            f"set it to {method.min_batch_size} or more"
        )
        conflicts.append(field_error("batch_size", "conflict", message))
    if method.options is DpoOptions:
        conflicts += _dpo_conflicts(config.dpo, user_set_fields)
    if method.options is KtoOptions and config.truncation_mode == "keep_end":
        message = f"is `keep_end`, but method `{method.name}` always keeps the start; leave it out"
        conflicts.append(field_error("truncation_mode", "conflict", message))
    if config.generation is not None:
        conflicts += _generation_conflicts(config, config.generation, user_set_fields)
    if method.options is GkdOptions:
        conflicts += _distillation_conflicts(config, config.gkd)
    if method.generates and config.on_spike != "ignore":
        loss = "whose loss does not measure how well a step went"
        message = f"cannot be used with method `{method.name}`, {loss}; leave it out"
        conflicts.append(field_error("on_spike", "conflict", message))
    if "extra.spike_threshold" in user_set_fields and config.on_spike == "ignore":
        conflicts.append(field_error("extra.spike_threshold", "conflict", "has no effect while `on_spike` is `ignore`"))
    return conflicts


def _sample_conflicts(config: TrainingConfig, user_set_fields: set[str]) -> list[FieldError]:
    if config.sample_steps is None:
        message = "has no effect without `sample_steps`, the steps between two samples; set that, or leave this out"
        return [field_error(name, "conflict", message) for name in NEEDS_SAMPLES if name in user_set_fields]
    if METHODS[config.method].has_reward_head:
        message = f"cannot be used with method `{config.method}`, whose model generates no text; leave it out"
        return [field_error("sample_steps", "conflict", message)]
    if not config.sample_prompts:
        return [field_error("sample_prompts", "missing", "must be set with `sample_steps`: the prompts to complete")]
    return []


def gguf_conflicts(config: TrainingConfig) -> list[FieldError]:
    """Return the reason why the output cannot be a GGUF file."""
    if config.gguf is None:
        return []
    if METHODS[config.method].has_reward_head:
        message = (
            f"cannot be used with method `{config.method}`: llama.cpp runs models that generate text; leave it out"
        )
    elif wants_adapter(config) and config.output == "adapter":
        message = "needs the whole model; set `output` to `merged`, which merges the adapter into its base model"
    else:
        return []
    return [field_error("gguf", "conflict", message)]


def _dpo_conflicts(dpo: DpoOptions, user_set_fields: set[str]) -> list[FieldError]:
    if dpo.loss_type == "exo_pair" and dpo.label_smoothing == 0:
        message = "is `exo_pair`, which takes the logarithm of `dpo.label_smoothing`; set that above 0"
        return [field_error("dpo.loss_type", "conflict", message)]
    if "dpo.label_smoothing" in user_set_fields and dpo.loss_type not in _SMOOTHED:
        losses = ", ".join(f"`{loss}`" for loss in _SMOOTHED)
        return [
            field_error("dpo.label_smoothing", "conflict", f"has no effect with `{dpo.loss_type}`, only with {losses}")
        ]
    return []


def _distillation_conflicts(config: TrainingConfig, gkd: GkdOptions) -> list[FieldError]:
    conflicts = []
    if gkd.teacher is None:
        message = "must be set with method `gkd`: the model whose probabilities are learned"
        conflicts.append(field_error("gkd.teacher", "missing", message))
    if config.max_seq_length is not None and gkd.max_completion_length >= config.max_seq_length:
        message = (
            f"must be below `max_seq_length` ({config.max_seq_length}), which includes the prompt; lower the one or "
            "raise the other"
        )
        conflicts.append(field_error("gkd.max_completion_length", "conflict", message))
    return conflicts


def _generation_conflicts(config: TrainingConfig, options: RlhfOptions, user_set_fields: set[str]) -> list[FieldError]:
    conflicts = []
    group = config.method.value
    if all(reward.weight == 0 for reward in options.rewards):
        message = "needs at least one reward with a non-zero weight: without one there is nothing to learn"
        conflicts.append(field_error(f"{group}.rewards", "needs_rewards", message))
    if config.max_seq_length is not None and options.max_completion_length >= config.max_seq_length:
        message = (
            f"must be below `max_seq_length` ({config.max_seq_length}), which includes the prompt; lower the one or "
            "raise the other"
        )
        conflicts.append(field_error(f"{group}.max_completion_length", "conflict", message))
    together = config.batch_size * config.gradient_accumulation_steps
    if together % options.num_generations:
        message = (
            f"is {options.num_generations}, which does not divide `batch_size` x `gradient_accumulation_steps` = "
            f"{together} completions of a device per step; set {_nearest_values(config, options)}"
        )
        conflicts.append(field_error(f"{group}.num_generations", "conflict", message))
    evaluated = config.extra.get("eval_batch_size")
    if (
        isinstance(evaluated, int)
        and "extra.eval_batch_size" in user_set_fields
        and evaluated % options.num_generations
    ):
        message = f"must be a multiple of `{group}.num_generations` ({options.num_generations})"
        conflicts.append(field_error("extra.eval_batch_size", "conflict", message))
    return conflicts


def _nearest_values(config: TrainingConfig, options: RlhfOptions) -> str:
    """Describe the nearest values with which a step contains only whole groups."""
    generations, steps = options.num_generations, config.gradient_accumulation_steps
    each = generations // math.gcd(generations, config.batch_size)
    near_steps = [n for n in (steps // each * each, (steps // each + 1) * each) if 1 <= n <= 65_536]
    together = config.batch_size * steps
    divisors = [n for n in range(2, 1025) if together % n == 0]
    near_groups = [n for n in divisors if n < generations][-1:] + [n for n in divisors if n > generations][:1]
    choices = {"gradient_accumulation_steps": near_steps, f"{config.method}.num_generations": near_groups}
    return ", or ".join(f"`{name}` to {' or '.join(map(str, values))}" for name, values in choices.items() if values)


def eval_conflicts(config: TrainingConfig, user_set_fields: set[str], has_eval_dataset: bool) -> list[FieldError]:
    """Return conflicts between the evaluation settings and the evaluation data."""
    conflicts = []
    has_data = has_eval_dataset or config.eval_split > 0
    if has_eval_dataset and config.eval_split > 0:
        conflicts.append(
            field_error("eval_split", "conflict", "and an evaluation dataset cannot both be given; choose one")
        )
    if config.eval_steps is not None and not has_data:
        conflicts.append(
            field_error("eval_steps", "needs_eval_data", "needs an evaluation dataset, or `eval_split` above 0")
        )
    if has_data and config.eval_steps is None:
        conflicts.append(
            field_error(
                "eval_steps",
                "needs_eval_steps",
                "must be set if there is evaluation data: the steps between two evaluations",
            )
        )
    if config.early_stopping_patience is not None and config.eval_steps is None:
        conflicts.append(
            field_error(
                "early_stopping_patience",
                "needs_eval_steps",
                "counts evaluations, and there are none; set `eval_steps`",
            )
        )
    conflicts += [
        field_error(name, "needs_eval_data", "needs evaluation data; set `eval_dataset_id` or `eval_split`")
        for name in NEEDS_EVAL_DATA
        if name in user_set_fields and _field_value(config, name) and not has_data
    ]
    return conflicts


def _field_value(config: TrainingConfig, name: str) -> Any:
    group, _, member = name.rpartition(".")
    return config.extra.get(member) if group == "extra" else getattr(config, name)


def data_conflicts(config: TrainingConfig, user_set_fields: set[str], dataset_format: str | None) -> list[FieldError]:
    """Return fields that conflict with the format of the dataset; None: it is not known yet."""
    if not METHODS[config.method].is_supervised:
        return []
    conflicts = []
    if dataset_format == "tokenized":
        why = "has no effect on rows of token ids ({}); leave it out"
        reasons = {"loss_on": "their `labels` decide", "chat_template": "they are rendered already"}
        conflicts += [
            field_error(name, "conflict", why.format(reason))
            for name, reason in reasons.items()
            if name in user_set_fields and getattr(config, name) is not None
        ]
    elif dataset_format is not None and config.loss_on == "assistant" and dataset_format != "chat":
        conflicts.append(
            field_error(
                "loss_on", "conflict", f"is `assistant`, which needs a dataset of format `chat`, not `{dataset_format}`"
            )
        )
    if dataset_format == "text" and config.loss_on == "completion":
        conflicts.append(
            field_error(
                "loss_on", "conflict", "is `completion`, which a dataset of format `text` does not have; use `all`"
            )
        )
    if config.packing and config.max_seq_length is None:
        conflicts.append(field_error("packing", "conflict", "needs `max_seq_length`, the length of a packed sequence"))
    if "extra.packing_strategy" in user_set_fields and not config.packing:
        conflicts.append(
            field_error("extra.packing_strategy", "conflict", "has no effect without `packing`; leave it out")
        )
    if config.packing and config.extra.get("packing_strategy") == "wrapped" and "truncation_mode" in user_set_fields:
        conflicts.append(
            field_error("truncation_mode", "conflict", "has no effect with `wrapped` packing, which truncates nothing")
        )
    return conflicts + _padding_conflicts(config)


def _padding_conflicts(config: TrainingConfig) -> list[FieldError]:
    """Return conflicts of `extra.padding_free` with other fields of a supervised method."""
    chosen = config.extra.get("padding_free")
    if not isinstance(chosen, bool):
        return []
    why = None
    if config.packing:
        why = "has no effect with `packing`, which needs no padding; leave it out"
    elif chosen and config.attn_implementation not in (None, *SEPARATES_TEXTS):
        why = f"needs an attention that separates texts, not `{config.attn_implementation}`; use `varlen`"
    elif chosen and config.neftune_noise_alpha is not None:
        why = "would change the noise of `neftune_noise_alpha`, which depends on the padded length; leave it out"
    return [] if why is None else [field_error("extra.padding_free", "conflict", why)]


def sharding_obstacles(config: TrainingConfig, user_set_fields: set[str]) -> list[str]:
    """Return the reasons, as clauses, why the model of a run cannot be divided among its devices."""
    method, adapter = METHODS[config.method], wants_adapter(config)
    obstacles = []
    if config.load_in_8bit:
        obstacles.append("`load_in_8bit` cannot be divided; use `load_in_4bit`")
    if adapter and config.init_lora_weights not in ("default", "gaussian", "orthogonal"):
        obstacles.append(f"`init_lora_weights: {config.init_lora_weights}` needs the whole base weights")
    if adapter and config.trainable_token_indices:
        obstacles.append("an adapter with `trainable_token_indices` cannot be divided")
    if config.modules_to_save or (method.has_reward_head and adapter):
        obstacles.append("an adapter with `modules_to_save`, such as that of a reward model, cannot be divided")
    if method.has_reference and not adapter:
        obstacles.append(f"`{config.method}` without an adapter precomputes its reference with the whole model")
    if method.generates or method.has_teacher:
        obstacles.append(f"`{config.method}` generates with the whole model")
    for name in ("metrics", "callbacks", "distributions_steps", "checkpoint_engine", "data_source"):
        if config.extra.get(name):
            obstacles.append(f"`extra.{name}` needs the whole model on one device")
    if config.extra.get("optimizer") is not None:
        obstacles.append("the state of the plugin `extra.optimizer` may not be divisible")
    elif "optim" in user_set_fields and config.optim not in SHARDED_OPTIMIZERS:
        names = ", ".join(f"`{name}`" for name in SHARDED_OPTIMIZERS)
        obstacles.append(f"the state of `{config.optim}` cannot be divided; use one of {names}")
    if config.torch_compile:
        obstacles.append("`torch_compile` compiles layers that are whole on each device")
    if config.weights_dtype != "float32":
        obstacles.append(
            "the state of the optimizers for weights in bfloat16 cannot be divided; leave `weights_dtype` out"
        )
    if config.extra.get("model_factory") is not None:
        obstacles.append("the layers of a model of `extra.model_factory` are not known")
    return obstacles


def machine_conflicts(
    config: TrainingConfig, user_set_fields: set[str], machine: DeviceCapabilities
) -> list[FieldError]:
    """Return requested settings that this machine does not support."""
    conflicts = []
    code = "not_on_this_machine"
    if "optim" in user_set_fields and config.optim.startswith("paged_") and machine.kind != "cuda":
        conflicts.append(
            field_error("optim", code, f"is `{config.optim}`, which needs a GPU; on a CPU use `adamw_torch`")
        )
    if config.use_dora and config.load_in_8bit and machine.kind == "cpu":
        conflicts.append(
            field_error("use_dora", code, "is not supported for an 8-bit base model on a CPU; use `load_in_4bit`")
        )
    attention = config.attn_implementation or ""
    flash = {"flash_attention_2": machine.flash_attention, "flash_attention_3": machine.flash_attention_3}
    if attention in flash and not (machine.kind == "cuda" and flash[attention]):
        conflicts.append(
            field_error("attn_implementation", code, f"is `{attention}`, which needs a GPU with flash-attn; use `sdpa`")
        )
    if config.activation_offload and machine.kind == "cpu":
        message = "needs a GPU: on a CPU, activations are in the memory of the host anyway; leave it out"
        conflicts.append(field_error("activation_offload", code, message))
    if config.dtype == "bfloat16" and machine.kind == "cuda" and not machine.bf16:
        conflicts.append(
            field_error("dtype", code, "is `bfloat16`, which this GPU does not support; use `float16`, or leave it out")
        )
    if config.weights_dtype == "bfloat16" and machine.kind == "cuda" and not machine.bf16:
        conflicts.append(
            field_error("weights_dtype", code, "is `bfloat16`, which this GPU does not support; leave it out")
        )
    if config.dtype == "float16" and machine.kind == "cpu":
        conflicts.append(field_error("dtype", code, "is `float16`, which needs a GPU; use `bfloat16`, or leave it out"))
    compute = config.bnb_4bit_compute_dtype if "bnb_4bit_compute_dtype" in user_set_fields else None
    if compute == "bfloat16" and machine.kind == "cuda" and not machine.bf16:
        conflicts.append(
            field_error("bnb_4bit_compute_dtype", code, "is `bfloat16`, which this GPU does not support; use `float16`")
        )
    if compute == "float16" and machine.kind == "cpu":
        conflicts.append(field_error("bnb_4bit_compute_dtype", code, "is `float16`, which needs a GPU; use `float32`"))
    return conflicts
