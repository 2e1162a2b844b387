"""Names of transformers, TRL, Axolotl and LLaMA-Factory are answered with ours, and nothing with an absurd one."""

import pytest
from pydantic import BaseModel

from app.contracts.methods import OPTION_GROUPS
from app.contracts.schemas.runs.placement import ResourceRequest
from app.contracts.training_config.fields import TrainerOptions, TrainingConfig
from app.contracts.training_config.peer_names import ADVICE, FIELDS, RESOURCES
from app.contracts.training_config.validation import config_errors

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
    ],
)  # fmt: skip
def test_the_names_of_others_lead_to_ours(name: str, ours: str) -> None:
    assert ours in said(**{name: 1})


@pytest.mark.parametrize("name", ["gizmo", "x", "frobnicate_level", "wandb_watch", "chat_history_path"])
def test_a_name_that_is_nothing_gets_no_absurd_hint(name: str) -> None:
    assert said(**{name: 1}) == f"`{name}` is not a field of the configuration."


def test_hints_in_groups_name_the_group() -> None:
    assert "perhaps `dpo.loss_type`" in said(method="dpo", dpo={"los_type": "sigmoid"})
    assert "move it out of `extra`" in said(extra={"learning_rate": 1e-4})
    assert "perhaps `max_rewinds`" in said(extra={"max_rewind": 1})


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
