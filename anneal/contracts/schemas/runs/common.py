"""Parts that several wire models of runs share: identifiers of examples, names, configurations."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, StringConstraints
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from anneal.contracts.training_config.fields import TrainingConfig

RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"
OTHER_RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3c7"
DATASET_ID = "ds_01k3x9m6q2v8s4t0w7y5z1a3b7"
CHECKPOINT_ID = "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8"
EXPERIMENT_ID = "exp_01k3x9m6q2v8s4t0w7y5z1a3b9"
CONFIG: JsonDict = {"base_model": "my-model", "method": "qlora", "lora_r": 16, "epochs": 1}
FACTS: JsonDict = {
    "parameters_total": 135_000_000, "parameters_trainable": 460_800, "total_steps": 200, "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3", "attention": "varlen",
    "kernels": {"norms": "liger-kernel 0.8.5", "lora": "fused", "dropout": "Triton", "head": "two products"},
    "step_plan": {
        "batch_size": 2, "gradient_accumulation_steps": 2, "recomputed_layers": 10, "layers": 36, "fits": True,
        "needed_bytes": 44_238_163_968, "usable_bytes": 75_913_545_318, "step_seconds": 1.46,
        "alternatives": [{"rows": 4, "recomputed": 30, "needed_bytes": 73_443_950_592, "step_seconds": 1.61}],
        "passes": [{"rows": 2, "recomputed": 10, "tokens": 8192, "peak_bytes": 44_206_706_688, "seconds": 0.74}],
        "seconds": 6.2,
    },
}  # fmt: skip
"""Run facts of examples: some of those that a trainer reports."""


Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A name or tag."""


class _DocumentedAs:
    """Documents a value with the schema of `model`; the service validates it itself, to report all errors at once."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self._model.__pydantic_core_schema__)


Config = Annotated[dict[str, Any], _DocumentedAs(TrainingConfig)]


class Body(BaseModel):
    """A request body: unknown fields, implicit conversions and NaN are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
