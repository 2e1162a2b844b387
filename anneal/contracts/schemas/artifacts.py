"""Wire models of artifacts."""

from pydantic import BaseModel, ConfigDict, Field


class Artifact(BaseModel):
    """File of a run's output."""

    model_config = ConfigDict(json_schema_extra={"example": {"path": "adapter_model.safetensors", "bytes": 1048576}})

    path: str
    """Path below the output folder, separated by `/`, as used in `GET …/artifacts/{path}`."""
    bytes: int


class Artifacts(BaseModel):
    """All files of a run's output, sorted by path."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "data": [
                    {"path": "README.md", "bytes": 2048},
                    {"path": "adapter_model.safetensors", "bytes": 1048576},
                ],
                "has_more": False,
                "left_out": 0,
            }
        }
    )

    data: list[Artifact]
    has_more: bool = False
    left_out: int = Field(
        default=0,
        description="Files that are neither listed nor sent, because their paths have control characters, a backslash, "
        "or bytes that are not UTF-8.",
    )
