"""Creates runs that evaluate a base model, the output of a run or a checkpoint, without training."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anneal.contracts.methods import METHODS, Method, RlhfOptions, TrainingMethod, method_of
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import EvaluationCreate
from anneal.contracts.training_config.field_traits import NOT_IN_PROBE, SUPERVISED_ONLY
from anneal.contracts.training_config.raw_config import GROUPS, named_fields
from app.api.errors import invalid
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction
from app.runs.creating.inference import (
    Changes,
    Inference,
    config_error,
    create_inference,
    merge_config,
    model_error,
    required_changes,
)
from app.tables.datasets import Dataset
from app.tables.runs import Run

_ASKED = frozenset({"loss_on", "max_eval_rows", "seed", "extra.eval_batch_size", "extra.metrics"})
"""Fields that the request may set for weights that a run has trained, beside the options of the method."""
_UNUSED = (NOT_IN_PROBE - _ASKED) | {"optim"}
"""Fields about training and its records, which an evaluation does not read."""
_OF_OTHER_DATA = frozenset(
    {*SUPERVISED_ONLY, "truncation_mode", "batch_size", "gradient_accumulation_steps", "activation_offload",
     "torch_compile", "extra.collator"}
)  # fmt: skip
"""Fields that depend on the data of the method; a run keeps its own only for data of that method."""


async def create_evaluation(
    transaction: RunTransaction, settings: Settings, storage: Storage, request: EvaluationCreate
) -> Run:
    """Create a run that evaluates a model, or raise 422 with all errors; the same idempotency key returns the same run.

    The data determine the loss. On data that its method trains on, a run is evaluated with its own configuration, so
    the result is that of an evaluation during its training.
    """
    return await create_inference(transaction, settings, storage, _Evaluation(request))


class _Evaluation(Inference):
    """Evaluation of a model on a dataset."""

    task = RunTask.evaluate
    noun = "evaluation"
    reason = "evaluates"
    added = {"eval_steps": 1}  # a configuration with evaluation data must say how often to evaluate

    request: EvaluationCreate

    def base_config(self, dataset: Dataset | None) -> dict[str, Any]:
        """Return the configuration; unless the request names a method, the data determine the loss."""
        overrides = self.request.config
        refused = [
            config_error(name, "conflict", "is about training, and an evaluation does not train; leave it out")
            for name in sorted(named_fields(overrides) & _UNUSED)
        ]
        if "base_model" in overrides:
            refused.append(config_error("base_model", "conflict", "is `model`, beside `config`; leave it out"))
        if refused:
            raise invalid(refused)
        config: dict[str, Any] = {"method": TrainingMethod.full.value, **overrides, "base_model": self.request.model}
        if "method" not in overrides and dataset is not None and dataset.format not in method_of(config).formats:
            method = _loss_on(dataset)
            config = merge_config({**_data_options(method, dataset), "method": method.name.value}, overrides)
            config["base_model"] = self.request.model
        if METHODS[method_of(config).name].adapter == "optional":
            config.setdefault("lora_r", None)
        return config

    def changes_of(self, run: Run, dataset: Dataset | None, *, has_output: bool) -> Changes:
        own = method_of(run.config)
        fits = dataset is None or dataset.format in own.formats
        if not fits and own.has_reward_head:
            message = f"run {run.id} has trained a reward model, which writes no text: evaluate it on preference pairs"
            raise model_error("reward_model_needs_pairs", message)
        method = own if dataset is None else _loss_on(dataset)
        options = {} if dataset is None else _data_options(method, dataset)
        changes = required_changes(run, method, has_output=has_output, keeps_method=fits, of_method=options)
        of_other_data = set() if fits else {*_OF_OTHER_DATA, own.name.value} - changes.values.keys()
        return replace(changes, dropped=changes.dropped | of_other_data | _UNUSED)

    def overrides(self, run: Run, changes: Changes) -> Mapping[str, Any]:
        overrides = self.request.config
        method = changes.values.get("method", run.config["method"])
        refused = sorted(name for name in named_fields(overrides) - _ASKED if not name.startswith(f"{method}."))
        if refused:
            allowed = ", ".join(f"`{name}`" for name in sorted(_ASKED))
            options = f" and `{method}`, which has the options of the loss on these data," if method in GROUPS else ""
            why = f"is that of run {run.id}, which has trained these weights; leave it out: only {allowed}{options} "
            why += "can be set"
            raise invalid([config_error(name, "not_changeable", why) for name in refused])
        return overrides


def _loss_on(dataset: Dataset) -> Method:
    """Return the method whose loss is computed on a dataset for the weights of any method that writes text."""
    return next(
        method
        for method in METHODS.values()
        if dataset.format in method.formats and method.adapter == "optional" and not method.has_reward_head
    )


def _data_options(method: Method, dataset: Dataset) -> dict[str, Any]:
    """Return the options without which a method has no loss on a dataset."""
    if not method.generates:
        return {}
    options = {"batch_size": RlhfOptions().num_generations}
    if "answer" in dataset.columns:
        return {**options, method.name.value: {"rewards": [{"type": "exact_match"}]}}
    return options
