"""Parts that several wire models of runs share: identifiers of examples, names, configurations."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, StringConstraints
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from app.contracts.training_config.fields import TrainingConfig

RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"
OTHER_RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3c7"
DATASET_ID = "ds_01k3x9m6q2v8s4t0w7y5z1a3b7"
CHECKPOINT_ID = "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8"
EXPERIMENT_ID = "exp_01k3x9m6q2v8s4t0w7y5z1a3b9"
CONFIG: JsonDict = {"base_model": "my-model", "method": "qlora", "lora_r": 16, "epochs": 1}


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
