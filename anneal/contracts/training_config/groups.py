"""Groups of the fields of a training configuration, in the order of a form."""

from typing import Any

from anneal.contracts.methods import METHODS, OPTION_GROUPS
from anneal.contracts.training_config.fields import TrainingConfig

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "base_model", "revision", "tokenizer", "method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type",
        "bnb_4bit_compute_dtype", "dtype", "weights_dtype", "attn_implementation",
    ),
    "Data": ("max_seq_length", "packing", "truncation_mode", "loss_on", "chat_template", "overfit_first_batch", "seed"),
    "Adapter": (
        "lora_r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "init_lora_weights",
        "use_rslora", "use_dora", "modules_to_save", "trainable_token_indices",
    ),
    "Objective": tuple(OPTION_GROUPS),
    "Length": ("epochs", "max_steps", "min_steps", "time_limit_seconds", "stop_at_step", "early_stopping_patience"),
    "Optimization": (
        "learning_rate", "lr_scheduler_type", "warmup_ratio", "optim", "weight_decay", "batch_size",
        "gradient_accumulation_steps", "neftune_noise_alpha",
    ),
    "Memory and speed": ("gradient_checkpointing", "activation_offload", "torch_compile"),
    "Evaluation and samples": (
        "eval_steps", "eval_split", "max_eval_rows", "sample_steps", "sample_prompts", "sample_max_new_tokens",
        "sample_temperature",
    ),
    "Checkpoints and output": ("save_steps", "save_total_limit", "export", "output", "gguf", "push_to_hub"),
    "Errors": ("on_non_finite", "on_spike", "on_out_of_memory"),
    "Logging": ("logging_steps", "report_to", "wandb_project", "wandb_entity", "wandb_name", "wandb_group"),
    "Extra": ("extra",),
}  # fmt: skip


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a training configuration.

    `x-groups` has its fields by group, in order; `x-method-defaults` the defaults that depend on the method, with an
    adapter and without.
    """
    adapter = TrainingConfig.model_fields["lora_r"].default
    of_methods = {
        name.value: {"adapter": method.default_fields(adapter), "full": method.default_fields(None)}
        for name, method in METHODS.items()
    }
    more = {"x-groups": {name: list(fields) for name, fields in GROUPS.items()}, "x-method-defaults": of_methods}
    return TrainingConfig.model_json_schema() | more
