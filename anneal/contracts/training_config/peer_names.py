"""Names of other trainers for fields of the configuration.

They are those of transformers, TRL and peft, Axolotl, LLaMA-Factory, Unsloth, torchtune, ArcticTraining and OpenAI.

An unknown field with such a name is answered with ours. `FIELDS` has those with the same meaning, `ADVICE` a remedy for
the others.
"""

import difflib
from collections.abc import Iterable, Mapping

_OURS = {
    "base_model": "model model_name model_id model_name_or_path pretrained_model_name_or_path base_model_name "
    "name_or_path base_model_config pretrained_model model_type_or_path",
    "revision": "model_revision",
    "method": "finetuning_type train_type training_method rl full_finetuning type training_type rlhf_type",
    "lora_r": "r rank lora_rank lora_dim peft_lora_r max_lora_rank peft_r",
    "lora_alpha": "alpha peft_lora_alpha",
    "lora_dropout": "dropout peft_lora_dropout",
    "target_modules": "lora_target lora_target_modules lora_modules peft_target_modules lora_attn_modules "
    "lora_trainable_modules peft_lora_target_modules",
    "modules_to_save": "lora_modules_to_save additional_target",
    "use_rslora": "peft_use_rslora rslora",
    "use_dora": "peft_use_dora dora",
    "learning_rate": "lr max_lr peak_lr peak_learning_rate",
    "batch_size": "micro_batch_size per_device_batch_size per_device_train_batch_size train_batch_size "
    "train_micro_batch_size_per_gpu mbs per_gpu_train_batch_size local_batch_size micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches",
    "epochs": "epoch n_epochs num_epochs num_train_epochs max_epochs train_epochs total_epochs n_train_epochs",
    "max_steps": "num_steps train_steps num_train_steps total_steps max_train_steps training_steps train_iters "
    "num_iters max_iters",
    "optim": "optimizer optimizer_type optimizer_name optim_name",
    "lr_scheduler_type": "lr_scheduler scheduler scheduler_type lr_schedule lr_scheduler_name decay_style",
    "neftune_noise_alpha": "neftune_alpha neftune_noise noisy_embedding_alpha",
    "dtype": "torch_dtype compute_dtype precision mixed_precision model_dtype",
    "weights_dtype": "pure_bf16 bf16_master_weights bf16_master_weights_and_grads",
    "load_in_4bit": "use_4bit quantize_4bit",
    "load_in_8bit": "use_8bit quantize_8bit",
    "bnb_4bit_compute_dtype": "bnb_compute_dtype compute_dtype",
    "bnb_4bit_quant_type": "quant_type quantization_type",
    "gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing disable_gradient_checkpointing "
    "enable_activation_checkpointing disable_activation_checkpoint recompute gradient_checkpointing_kwargs "
    "activation_checkpoint recompute_granularity",
    "activation_offload": "activation_offloading offload_activations enable_activation_offloading "
    "activation_checkpoint_cpu_offload unsloth_gradient_checkpointing",
    "attn_implementation": "flash_attn flash_attention flash_attention_2 use_flash_attention attention sdp_attention",
    "torch_compile": "compile use_compile torch_compile_backend torch_compile_mode",
    "max_seq_length": "max_length max_seq_len seq_len seq_length sequence_len sequence_length max_sequence_length "
    "cutoff_len block_size model_max_length context_length max_tokens max_token_len tokens_max_length "
    "max_prompt_and_completion_length",
    "packing": "sample_packing pack_sequences neat_packing use_packing packed pack_samples eval_packing "
    "eval_sample_packing always_max_length",
    "truncation_mode": "truncation_side",
    "loss_on": "train_on_inputs train_on_prompt train_on_input completion_only_loss assistant_only_loss "
    "mask_prompt mask_history only_train_on_completion mask_inputs roles_to_train train_on_eos masking_strategy",
    "chat_template": "template chat_template_jinja chat_template_path",
    "seed": "random_seed random_state data_seed",
    "save_steps": "save_strategy saves_per_epoch checkpoint_steps checkpointing_steps save_interval "
    "save_every_n_steps save_every_n_epochs save_freq save_every checkpoint_interval n_checkpoints save_iters",
    "save_total_limit": "max_checkpoints keep_checkpoints keep_last_n_checkpoints max_to_keep checkpoints_total_limit",
    "logging_steps": "log_steps logging_strategy log_every log_every_n_steps loss_log_interval "
    "train_log_iter_interval log_interval log_freq logging_interval",
    "eval_steps": "eval_strategy evaluation_strategy evals_per_epoch evaluation_steps eval_every eval_interval "
    "run_val_every_n_steps n_evals eval_freq eval_iters_interval test_freq",
    "eval_split": "val_size val_set_size test_size validation_split validation_size eval_size train_eval_split",
    "max_eval_rows": "max_eval_samples eval_max_samples eval_sample_limit eval_samples eval_iters",
    "early_stopping_patience": "early_stopping early_stopping_steps patience",
    "report_to": "loggers log_with use_wandb use_mlflow use_tensorboard tracker trackers wandb use_swanlab "
    "metric_logger integrations logging_backend use_comet use_clearml",
    "push_to_hub": "hub_model_id hub_repo_id hub_repo push_to_hub_model_id",
    "min_steps": "min_iterations min_train_steps",
    "stop_at_step": "exit_iteration stop_step",
    "time_limit_seconds": "max_time time_limit max_train_time exit_duration",
    "layers_to_transform": "peft_layers_to_transform lora_layers_to_transform lora_layers num_layers_to_transform",
    "init_lora_weights": "peft_init_lora_weights lora_init init_weights pissa_init loftq_config init_lora",
    "trainable_token_indices": "peft_trainable_token_indices trainable_tokens lora_trainable_tokens",
    "tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_config tokenizer_id",
    "wandb_project": "wandb_project_name project",
    "wandb_entity": "wandb_team",
    "wandb_name": "wandb_run_name",
    "wandb_group": "wandb_run_group",
    "overfit_first_batch": "overfit_batches overfit_one_batch",
    "rlhf.beta": "kl_coef kl_coeff init_kl_coef kl_beta kl_loss_coef",
    "rlhf.algorithm": "adv_estimator advantage_estimator",
    "sample_prompts": "eval_prompts generation_prompts",
    "on_spike": "skip_loss_spikes",
    "extra.max_grad_norm": "max_grad_norm gradient_clipping gradient_clip clip_grad grad_clip max_norm "
    "clip_grad_norm max_gradient_norm",
    "extra.adam_beta1": "adam_beta1 beta1",
    "extra.adam_beta2": "adam_beta2 beta2",
    "extra.adam_epsilon": "adam_epsilon adam_eps eps",
    "extra.optim_args": "optim_args optimizer_args optimizer_kwargs",
    "extra.lr_scheduler_kwargs": "lr_scheduler_kwargs scheduler_kwargs lr_scheduler_args",
    "extra.packing_strategy": "packing_strategy",
    "extra.tiled_mlp": "tiled_mlp tiled_mlp_compute",
    "extra.padding_free": "padding_free remove_padding use_remove_padding use_padding_free",
    "extra.eval_on_start": "eval_on_start",
    "extra.eval_log_steps": "eval_log_steps eval_log_iter_interval",
    "extra.wall_clock_breakdown": "wall_clock_breakdown step_timer",
    "extra.memory_profile": "mem_profiler",
    "extra.memory_profile_entries": "mem_profiler_max_entries",
    "extra.eval_batch_size": "eval_batch_size per_device_eval_batch_size per_gpu_eval_batch_size micro_batch_size_eval",
    "extra.callbacks": "callbacks callback",
    "extra.collator": "data_collator",
    "extra.double_quant": "double_quant double_quantization bnb_4bit_use_double_quant use_double_quant",
    "dpo.loss_type": "pref_loss dpo_loss dpo_loss_type loss_type rl_loss_type",
    "dpo.beta": "pref_beta dpo_beta rl_beta beta",
    "dpo.label_smoothing": "dpo_label_smoothing label_smoothing",
    "kto.desirable_weight": "desirable_weight kto_chosen_weight kto_desirable_weight",
    "kto.undesirable_weight": "undesirable_weight kto_rejected_weight kto_undesirable_weight",
    "orpo.beta": "orpo_beta orpo_alpha",
    "gkd.teacher": "teacher teacher_model teacher_model_name_or_path teacher_model_path",
    "gkd.lmbda": "lmbda on_policy_fraction",
    "gkd.seq_kd": "seq_kd",
    "simpo.beta": "simpo_beta",
    "simpo.gamma": "simpo_gamma",
    "rlhf.rewards": "rewards reward_funcs reward_functions reward_model reward_models reward_weights reward_func "
    "reward_funcs_file",
    "rlhf.num_generations": "num_generations group_size n_generations num_samples_per_prompt rollout_n",
    "rlhf.max_completion_length": "max_completion_length max_new_tokens max_response_length max_output_tokens "
    "max_gen_len",
    "rlhf.temperature": "temperature sampling_temperature",
}

FIELDS: Mapping[str, str] = {theirs: ours for ours, names in _OURS.items() for theirs in names.split()}
"""Our dotted field by the name that others use."""

_OUR_RESOURCES = {
    "devices": "devices device gpus n_gpu n_gpus num_gpus num_devices world_size nproc_per_node num_processes",
    "hosts": "hosts nodes nnodes num_nodes num_hosts num_machines",
    "kind": "kind device_type",
    "gpu": "gpu gpu_type gpu_name accelerator",
    "memory_mb": "memory_mb memory gpu_memory vram",
    "labels": "labels",
    "sharding": "sharding deepspeed deepspeed_config fsdp fsdp_config",
    "sequence_parallel": "sequence_parallel sequence_parallel_degree sequence_parallel_size context_parallel_size",
    "expert_parallel": "expert_parallel expert_parallel_degree expert_parallel_size expert_model_parallel_size",
}

RESOURCES: Mapping[str, str] = {name: ours for ours, names in _OUR_RESOURCES.items() for name in names.split()}
"""Our field of `resources` by its own name and those that others use; in the configuration it is in the wrong place."""

OFFLOADED_OPTIMIZER = (
    "use a paged optimizer, such as `paged_adamw_8bit` as `optim`: its state moves to the memory of the machine when "
    "that of the GPU is full"
)
"""Advice about torchao's `CPUOffloadOptimizer`, which copies gradients before they are clipped and checked."""
_REMEDIES = {
    "the service starts a process for each of `resources.devices`, beside `config`; leave it out": "accelerator_config "
    "ddp ddp_backend ddp_find_unused_parameters ddp_timeout local_rank",
    "a model is divided by `resources.sharding`, beside `config`; leave it out": "tensor_parallel_size "
    "tensor_parallel_degree",
    "use `dtype`, or leave it out: `bfloat16` is the default where the device supports it": "bf16 "
    "fp16 bf16_full_eval fp16_full_eval",
    "leave it out, or set `dtype` to `float32` for the highest precision": "tf32",
    "the service chooses where a run writes; leave it out, and download the result": "output_dir "
    "logging_dir run_dir checkpoint_dir save_dir overwrite_output_dir",
    "name the dataset as `dataset_id`, beside `config`": "dataset dataset_id dataset_name dataset_dir train_file "
    "data training_file sources dataset_path",
    "mix the datasets with POST /v1/datasets/mix, and name the mix as `dataset_id`, beside `config`": "datasets "
    "interleave_probs mix_strategy dataset_mixer dataset_mixture train_datasets",
    "name the dataset as `eval_dataset_id`, beside `config`, and further ones in `extra_eval_datasets`, or set "
    "`eval_split`": "eval_dataset eval_dataset_id eval_datasets extra_eval_datasets test_datasets validation_file "
    "eval_sources",
    "use `warmup_ratio`, the fraction of steps with a rising rate": "warmup_steps warmup num_warmup_steps",
    "use `method`, and `lora_r` null to train all weights": "adapter stage trainer trainer_type task",
    "use `load_in_4bit` or `load_in_8bit`": "quantization quantization_bit quantization_config",
    "the best checkpoint is always kept; leave it out": "load_best_model_at_end metric_for_best_model "
    "greater_is_better",
    "resume a run with POST /v1/runs/{id}/resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "use `name`, beside `config`": "run_name experiment_name project_name",
    "store it with `anneal secrets set`": "hub_token hf_token use_auth_token token wandb_api_key api_key",
    "the service decides this itself; leave it out": "do_train do_eval do_predict remove_unused_columns "
    "disable_tqdm dataloader_num_workers dataloader_pin_memory dataset_num_proc preprocessing_num_workers "
    "group_by_length pad_to_multiple_of use_cpu no_cuda",
    OFFLOADED_OPTIMIZER: "cpu_offload optim_cpu_offload optimizer_cpu_offload offload_optimizer optimizer_offload",
    "divide the weights with `resources.sharding`, beside `config`, or use method `qlora`": "param_offload "
    "offload_param offload_params parameter_offload cpu_offload_params fsdp_offload_params layer_offloading",
    "recomputation sends tokens to the experts that they had in the forward pass; leave it out": "routing_replay "
    "enable_routing_replay router_replay",
    "workers use Liger's kernels where their operator has installed the extra `kernels-liger`; leave it out": "liger "
    "use_liger use_liger_kernel enable_liger_kernel liger_kernel_config",
    "the operator installs code for single steps as plugins (`extra.data_source`, `extra.callbacks` and others); leave "
    "it out": "code plugins custom_code recipe",
    "stop a run with POST /v1/runs/{id}/stop; leave it out": "kill_switch_path",
    "resume with `stop_after_steps`, beside `config`": "exit_iteration_this_run",
    "set `save_steps`, `save_total_limit` and `output`": "checkpoint checkpointer checkpoint_config "
    "checkpoint_dir_config save_strategy_config",
    "set `extra.adam_beta1` and `extra.adam_beta2`": "betas adam_betas",
    "set `lora_r`, `lora_alpha`, `target_modules` and the other fields of the adapter": "peft_config "
    "peft lora lora_config peft_type",
    "POST /v1/runs validates every request; leave it out": "skip_validation",
    "the service keeps the log of every run; leave it out": "logger log_level logging log_file log_level_replica "
    "log_peak_memory_stats log_on_each_node",
    "the profile is part of the output; leave it out": "mem_profiler_dir profiler_dir",
    "the metrics are in `metrics.jsonl` of the output; leave it out": "train_log_metrics_path plot_loss",
    "set `learning_rate`, the rate itself": "learning_rate_multiplier lr_multiplier",
    "use `name`, beside `config`, or `push_to_hub`": "suffix model_suffix",
    "the service keeps tokens and models itself; leave it out": "dataset_prepared_path cache_dir use_data_cache "
    "overwrite_cache cache_processed_data data_cache_dir",
    "upload the rows without those that are not to be trained": "max_samples max_train_samples num_train_samples",
    "columns of a dataset are named when it is uploaded, with `columns`; leave it out": "dataset_text_field "
    "text_column prompt_column response_column field_messages dataset_kwargs",
    "the reference is the base model; leave it out": "ref_model ref_model_init_kwargs reference_model ref_policy "
    "sync_ref_model reference_free",
    "use method `orpo`, which also learns the better answers": "cpo_alpha pref_ftx sft_weight",
    "set `dpo.loss_type` or `dpo.label_smoothing`": "f_divergence_type use_weighting ld_alpha rpo_alpha",
    "completions are generated by the trainer; leave it out": "use_vllm vllm_mode vllm_gpu_memory_utilization "
    "vllm_server_host fast_inference gpu_memory_utilization rollout",
    "set `resources.sharding` beside `config`, or leave it out": "fsdp_cpu_offload custom_sharded_layers "
    "data_parallel_shard_dim fsdp_version zero_stage ds_config",
    "the service chooses what a checkpoint contains, so that runs can be resumed; leave it out": "save_only_model "
    "save_adapter_weights_only enable_async_checkpointing save_safetensors",
    "add the tokens to the tokenizer and to the embeddings of the base model before you train": "special_tokens "
    "tokens added_tokens new_tokens resize_vocab resize_token_embeddings_to_32x",
    "set `init_lora_weights`; outputs of `pissa` and `olora` are converted by the service": "pissa_convert pissa_iter",
    "use `base_model` with the id of the run, whose adapter is merged into its base": "adapter_name_or_path "
    "lora_model_dir from_checkpoint",
    "is not supported by the trainers of the service; leave it out": "loraplus_lr_ratio use_badam use_galore "
    "galore_target galore_rank use_apollo apollo_target apollo_rank optim_target_modules "
    "shift_attn rope_scaling lora_bias bias rank_pattern alpha_pattern optimizer_in_bwd embedding_lr lr_groups "
    "unfrozen_parameters freeze_trainable_layers label_smoothing_factor",
    "use `max_seq_length`, which includes the prompt": "max_prompt_length",
    "the operator of the worker decides this; leave it out": "trust_remote_code",
}

ADVICE: Mapping[str, str] = {theirs: remedy for remedy, names in _REMEDIES.items() for theirs in names.split()}
"""Advice by names that have no counterpart here, or another meaning."""

_SIMILAR = 0.75


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the rest of a sentence that names the field which was probably meant; empty if there is none.

    `known` are the fields that are valid at that place.
    """
    if name in ADVICE:
        return f": {ADVICE[name]}"
    if name in RESOURCES:
        return f"; use `resources.{RESOURCES[name]}`, beside `config`"
    if name in FIELDS:
        return f"; use `{FIELDS[name]}`"
    spelled = name.lower().replace("-", "_")
    near = difflib.get_close_matches(spelled, known, n=1, cutoff=_SIMILAR)
    return f"; perhaps `{near[0]}`" if near else ""
