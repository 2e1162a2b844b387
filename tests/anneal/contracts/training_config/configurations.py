"""Machines, and configurations as they are checked and resolved for them."""

from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from anneal.contracts.training_config.validation import config_errors

CPU = DeviceCapabilities(kind="cpu", bf16=True)
GPU = DeviceCapabilities(kind="cuda", bf16=True, flash_attention=False)
OLD_GPU = DeviceCapabilities(kind="cuda", bf16=False)


def codes(config: Any, **data: Any) -> set[tuple[str, str]]:
    facts = {"has_eval_dataset": False, "dataset_format": None, "machine": None} | data
    if isinstance(config, dict):
        config = {"base_model": "tiny", **config}
    return {(problem.field, problem.code) for problem in config_errors(config, **facts)}


def effective(machine: DeviceCapabilities | None = CPU, **fields: Any) -> Any:
    config_input = {"base_model": "tiny", **fields}
    return resolve_config(TrainingConfig.model_validate(config_input), given_fields(config_input), machine)
