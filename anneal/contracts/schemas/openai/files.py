"""Wire models of files in the OpenAI-compatible API."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.schemas.openai.lists import Listed

FILE_ID = "file-01k3x9m6q2v8s4t0w7y5z1a3b7"
_FILE: JsonDict = {
    "id": FILE_ID, "object": "file", "bytes": 3145728, "created_at": 1767323045, "filename": "docstrings.jsonl",
    "purpose": "fine-tune", "status": "processed", "expires_at": None, "status_details": None,
}  # fmt: skip


class FileObject(Listed):
    """File with the rows of a dataset, or with the metrics of a job."""

    model_config = ConfigDict(json_schema_extra={"example": _FILE})

    id: str = Field(
        description="`file-` with the characters that follow `ds_` in the id of the dataset; `file-results-` with "
        "those that follow `ftjob-` in the id of a job whose metrics it has."
    )
    object: Literal["file"] = "file"
    bytes: int = Field(description="Size of its content.")
    created_at: int = Field(description="Unix time in seconds.")
    filename: str = Field(description="Name of the dataset, or `step_metrics.csv`.")
    purpose: Literal["fine-tune", "fine-tune-results"] = "fine-tune"
    status: Literal["processed"] = Field(default="processed", description="Every stored file has been validated.")
    expires_at: int | None = Field(default=None, description="Always null: files do not expire.")
    status_details: str | None = None


class FileDeleted(BaseModel):
    """Deleted file."""

    model_config = ConfigDict(json_schema_extra={"example": {"id": FILE_ID, "object": "file", "deleted": True}})

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "additionalProperties": False,
                "properties": {
                    "purpose": {"type": "string", "enum": ["fine-tune"]},
                    "file": {
                        "type": "string",
                        "format": "binary",
                        "description": "Rows in any format and file type of `POST /v1/datasets`, such as chats or "
                        "preference pairs of OpenAI as JSONL. Its content is returned byte for byte.",
                    },
                },
            },
            "example": {
                "purpose": "fine-tune",
                "file": '{"messages": [{"role": "user", "content": "What does len do?"}, '
                '{"role": "assistant", "content": "It counts the items of a container."}]}\n',
            },
        }
    },
}
"""OpenAPI request body of `POST /openai/v1/files`, which FastAPI cannot infer because the body is streamed."""
