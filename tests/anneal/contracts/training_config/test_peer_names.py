"""Names of transformers, TRL, Axolotl and LLaMA-Factory are answered with ours, and nothing with an absurd one."""

import pytest
from pydantic import BaseModel

from anneal.contracts.methods import OPTION_GROUPS
from anneal.contracts.schemas.runs.placement import ResourceRequest
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig
from anneal.contracts.training_config.peer_names import ADVICE, FIELDS, RESOURCES
from anneal.contracts.training_config.validation import config_errors

LENGTH = [{"type": "length", "max": 20}]
GROUPS: dict[str, type[BaseModel]] = {**OPTION_GROUPS, "extra": TrainerOptions}


def said(**fields: object) -> str:
    (problem,) = config_errors({"base_model": "tiny", **fields}, has_eval_dataset=False)
    assert problem.code in ("unknown_field", "unknown_value")
    return problem.message


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("num_train_epochs", "use `epochs`"), ("per_device_train_batch_size", "use `batch_size`"),
        ("lr", "use `learning_rate`"), ("fsdp", "use `resources.sharding`"), ("micro_batch_size", "use `batch_size`"),
        ("sequence_len", "use `max_seq_length`"), ("cutoff_len", "use `max_seq_length`"),
        ("lora_rank", "use `lora_r`"), ("lora_target", "use `target_modules`"), ("val_size", "use `eval_split`"),
        ("max_grad_norm", "use `extra.max_grad_norm`"), ("max_rewinds", "use `extra.max_rewinds`"),
        ("template", "use `chat_template`"), ("devices", "use `resources.devices`, beside `config`"),
        ("bf16", "use `dtype`"), ("fp16", "use `dtype`"), ("bf16_full_eval", "use `dtype`"),
        ("use_liger_kernel", "`kernels-liger`"), ("layer_offloading", "`resources.sharding`"),
        ("warmup_steps", "`warmup_ratio`"), ("beta", "use `dpo.beta`"),
        ("reward_funcs", "use `rlhf.rewards`"), ("learning_rat", "perhaps `learning_rate`"),
        ("offload_optimizer", "`paged_adamw_8bit` as `optim`"),
        ("offload_param", "`resources.sharding`"), ("enable_routing_replay", "to the experts that they had"),
        ("Learning-Rate", "perhaps `learning_rate`"), ("dataset_id", "beside `config`"),
        ("min_iterations", "use `min_steps`"), ("exit_iteration", "use `stop_at_step`"),
        ("eval_interval", "use `eval_steps`"), ("optimizer", "use `optim`"), ("scheduler", "use `lr_scheduler_type`"),
        ("learning_rate_multiplier", "`learning_rate`, the rate itself"), ("betas", "`extra.adam_beta1`"),
    ],
)  # fmt: skip
def test_the_names_of_others_lead_to_ours(name: str, ours: str) -> None:
    assert ours in said(**{name: 1})


NAMES: dict[str, str] = {
    "ArcticTraining": "type code model tokenizer data logger wandb scheduler optimizer deepspeed epochs seed "
    "checkpoint loss_log_interval train_log_iter_interval gradient_accumulation_steps micro_batch_size "
    "sequence_parallel_size activation_checkpoint_cpu_offload tiled_mlp_compute train_iters eval_interval "
    "eval_log_iter_interval exit_iteration exit_iteration_this_run min_iterations overfit_first_batch mem_profiler "
    "mem_profiler_dir mem_profiler_max_entries kill_switch_path step_timer skip_validation train_log_metrics_path",
    "torchtune": "tokenizer checkpointer optimizer batch_size clip_grad_norm compile enable_activation_checkpointing "
    "enable_activation_offloading metric_logger log_every_n_steps optimizer_in_bwd lora_attn_modules packed "
    "num_warmup_steps max_seq_len device dataset run_val_every_n_steps fsdp_cpu_offload keep_last_n_checkpoints",
    "transformers and TRL": "num_train_epochs per_device_train_batch_size per_device_eval_batch_size eval_strategy "
    "warmup_steps log_level logging_dir save_strategy save_only_model bf16 fp16 tf32 dataloader_num_workers run_name "
    "load_best_model_at_end deepspeed fsdp label_smoothing_factor report_to project hub_model_id push_to_hub "
    "gradient_checkpointing_kwargs use_liger_kernel dataset_text_field dataset_num_proc completion_only_loss "
    "assistant_only_loss loss_type activation_offloading max_prompt_length ref_model beta use_vllm reward_funcs "
    "num_generations temperature peft_config",
    "Axolotl": "base_model_config tokenizer_config datasets val_set_size sequence_len sample_packing adapter lora_r "
    "lora_target_modules peft_layers_to_transform peft_init_lora_weights wandb_project wandb_entity wandb_name "
    "num_epochs saves_per_epoch evals_per_epoch lr_scheduler special_tokens dataset_prepared_path train_on_inputs "
    "early_stopping_patience flash_attention rl hub_model_id output_dir loraplus_lr_ratio",
    "LLaMA-Factory": "stage do_train finetuning_type lora_target template cutoff_len max_samples overwrite_cache "
    "preprocessing_num_workers plot_loss val_size pref_beta pref_loss reward_model quantization_bit flash_attn "
    "rope_scaling enable_liger_kernel mask_history neat_packing pissa_init pissa_convert use_swanlab "
    "adapter_name_or_path additional_target train_on_prompt",
    "Unsloth": "full_finetuning use_gradient_checkpointing random_state loftq_config bias r max_lora_rank "
    "fast_inference gpu_memory_utilization",
    "OpenAI": "n_epochs learning_rate_multiplier training_file validation_file suffix integrations eval_interval",
}
"""Names of fields of other trainers, by trainer."""


@pytest.mark.parametrize(("trainer", "names"), NAMES.items(), ids=NAMES)
def test_every_usual_name_of_another_trainer_is_ours_or_gets_a_hint(trainer: str, names: str) -> None:
    unknown = [name for name in names.split() if name not in TrainingConfig.model_fields]
    assert len(unknown) > 5
    assert [name for name in unknown if said(**{name: "text"}).endswith("is not a field of the configuration.")] == []


def test_text_where_a_plugin_has_the_same_name_means_the_option_and_an_object_the_plugin() -> None:
    assert "use `optim`" in said(optimizer="adamw_bnb_8bit")
    assert "use `lr_scheduler_type`" in said(scheduler="cosine")
    assert "use `extra.optimizer`" in said(optimizer={"type": "mine"})


def test_names_of_others_within_a_group_lead_to_ours() -> None:
    assert "use `rlhf.num_generations`" in said(method="rlhf", rlhf={"group_size": 8, "rewards": LENGTH})
    assert "use `dpo.loss_type`" in said(method="dpo", dpo={"pref_loss": "ipo"})


@pytest.mark.parametrize("name", ["gizmo", "x", "frobnicate_level", "watch_gradients", "chat_history_path"])
def test_a_name_that_is_nothing_gets_no_absurd_hint(name: str) -> None:
    assert said(**{name: 1}) == f"`{name}` is not a field of the configuration."


def test_hints_in_groups_name_the_group() -> None:
    assert "perhaps `dpo.loss_type`" in said(method="dpo", dpo={"los_type": "sigmoid"})
    assert "move it out of `extra`" in said(extra={"learning_rate": 1e-4})
    assert "perhaps `max_rewinds`" in said(extra={"max_rewind": 1})
    assert "as plugins (`extra.data_source`, `extra.callbacks`" in said(extra={"recipe": {"type": "mine"}})


def test_a_misspelled_value_names_the_one_that_was_meant() -> None:
    assert said(optim="adamw_torchfused").endswith("perhaps `adamw_torch_fused`.")
    assert said(optim="adamw").endswith("perhaps `adamw_torch`.")
    assert said(optim="adam").endswith("perhaps `adamw_torch`.")
    assert said(optim="").endswith("not ''.")
    assert said(lr_scheduler_type="cosin").endswith("perhaps `cosine`.")


def test_an_offloaded_optimizer_leads_to_the_paged_ones() -> None:
    for name in ("CPUOffloadOptimizer", "adamw_cpu_offload"):
        assert "`paged_adamw_8bit` as `optim`" in said(optim=name)


def test_every_name_leads_to_a_field_and_none_is_a_field() -> None:
    assert len({*FIELDS, *ADVICE, *RESOURCES}) == len(FIELDS) + len(ADVICE) + len(RESOURCES)
    assert set(RESOURCES.values()) == set(ResourceRequest.model_fields) <= set(RESOURCES)
    for theirs in (*FIELDS, *ADVICE, *RESOURCES):
        assert theirs not in TrainingConfig.model_fields, theirs
    for ours in FIELDS.values():
        group, _, name = ours.rpartition(".")
        assert name in (GROUPS[group] if group else TrainingConfig).model_fields, ours
