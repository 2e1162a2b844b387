"""Creates runs in which a base model, the output of a run or a checkpoint answers the rows of a dataset."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, TrainingMethod, method_of
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import MODEL_FIELDS, PredictionCreate
from anneal.contracts.training_config.field_traits import ADAPTER_ONLY, FOUR_BIT_ONLY, TRAITS
from app.api.errors import invalid
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction
from app.runs.creating.inference import (
    Changes,
    Inference,
    config_error,
    create_inference,
    model_error,
    required_changes,
)
from app.tables.datasets import Dataset
from app.tables.runs import Run

_OF_BASE = ("revision", "tokenizer")
"""Fields about the model that the request cannot set for weights that a run has trained."""
_KEPT = frozenset(
    {*MODEL_FIELDS, *ADAPTER_ONLY, *FOUR_BIT_ONLY, "base_model", "method", "load_in_4bit", "load_in_8bit",
     "weights_dtype", "extra", "extra.model_factory", "extra.tokenizer"}
) - {"output"}  # fmt: skip
"""Fields of a run that determine its model; a prediction reads no others."""


async def create_prediction(
    transaction: RunTransaction, settings: Settings, storage: Storage, request: PredictionCreate
) -> Run:
    """Create a run that answers rows, or raise 422 with all errors; the same idempotency key returns the same run."""
    resources = request.resources
    message = "a model answers on one device; leave it out"
    several = [
        FieldError(field=f"resources.{name}", code="not_supported", message=message)
        for name, value in (
            ("devices", resources.devices), ("hosts", resources.hosts),
            ("sequence_parallel", resources.sequence_parallel), ("expert_parallel", resources.expert_parallel),
        )
        if value != 1
    ]  # fmt: skip
    if several:
        raise invalid(several)
    return await create_inference(transaction, settings, storage, _Prediction(request))


def answering_changes(run: Run, *, has_output: bool) -> Changes:
    """Return how the configuration of a run changes when its weights write text; raise 422 if they cannot."""
    own = method_of(run.config)
    if own.has_reward_head:
        raise model_error("reward_model", f"run {run.id} has trained a reward model, which writes no text")
    supervised = METHODS[TrainingMethod.sft]
    changes = required_changes(run, supervised, has_output=has_output, keeps_method=own.is_supervised, of_method={})
    return replace(changes, dropped=changes.dropped | (TRAITS.keys() - _KEPT))


class _Prediction(Inference):
    """Answers of a model to the rows of a dataset."""

    task = RunTask.predict
    noun = "prediction"
    reason = "predicts with"

    request: PredictionCreate

    def base_config(self, dataset: Dataset | None) -> dict[str, Any]:
        return {"method": TrainingMethod.full.value, **self._config(), "base_model": self.request.model}

    def changes_of(self, run: Run, dataset: Dataset | None, *, has_output: bool) -> Changes:
        return answering_changes(run, has_output=has_output)

    def overrides(self, run: Run, changes: Changes) -> Mapping[str, Any]:
        overrides = self._config()
        why = f"is that of run {run.id}, which has trained these weights; leave it out"
        if refused := [config_error(name, "not_changeable", why) for name in _OF_BASE if name in overrides]:
            raise invalid(refused)
        return overrides

    def _config(self) -> dict[str, Any]:
        """Return what the request sets, as fields of a training configuration."""
        config = self.request.config
        of_model = config.model_dump(mode="json", include={*MODEL_FIELDS} & config.model_fields_set)
        options = config.model_dump(mode="json", exclude={*MODEL_FIELDS})
        # Any length that the model takes.
        return {"max_seq_length": None, **of_model, "extra": {"predict": options}}
