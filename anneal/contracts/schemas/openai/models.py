"""Wire models of models in the OpenAI-compatible API."""

from typing import Literal

from pydantic import ConfigDict, Field

from anneal.contracts.schemas.openai.lists import Listed


class ModelObject(Listed):
    """Model that a job can train and that can answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"id": "my-model", "object": "model", "created": 1767323045, "owned_by": "system"}
        }
    )

    id: str = Field(
        description="Name of a base model, as in `config.base_model` of a run; `run_…`, the output of a run; or "
        "`ckpt_…`, a checkpoint."
    )
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time in seconds; of a base model that of its files, 0 if they are not here.")
    owned_by: str = Field(description="ID of the API key that created it; `system` for a base model.")
