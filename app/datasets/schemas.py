"""Data sets on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

from app.runs.schemas import Moment

_SUMMARY: JsonDict = {
    "id": "ds_01k3x9m6q2v8s4t0w7y5z1a3b7",
    "name": "docstrings.jsonl",
    "format": "chat",
    "rows": 4210,
    "bytes": 3145728,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "columns": ["messages"],
    "created_at": "2026-01-02T03:04:05.678Z",
    "created_by": "key_01k3x9m6q2v8s4t0w7y5z1a3b5",
}
_ROW: JsonDict = {
    "messages": [
        {"role": "user", "content": "What does len do?"},
        {"role": "assistant", "content": "It counts the items of a container."},
    ]
}


class DatasetSummary(BaseModel):
    """A data set in a list."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _SUMMARY})

    id: str
    name: str
    format: Literal["chat", "prompt_completion", "text"]
    rows: int
    bytes: int
    sha256: str
    columns: list[str]
    created_at: Moment
    created_by: str | None


class DatasetView(DatasetSummary):
    """A data set with its first rows, long texts shortened."""

    model_config = ConfigDict(json_schema_extra={"example": {**_SUMMARY, "preview": [_ROW], "token_statistics": None}})

    preview: list[dict[str, Any]]
    token_statistics: dict[str, Any] | None
    """Null until a tokenizer can be named."""


UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string", "maxLength": 200, "description": "Else the file's own."},
                    "format": {
                        "type": "string",
                        "enum": ["chat", "prompt_completion", "text"],
                        "description": "Else told by the columns of the first row.",
                    },
                    "file": {
                        "type": "string",
                        "format": "binary",
                        "description": "JSONL: one JSON object a line, UTF-8.",
                    },
                },
            },
            "example": {
                "name": "docstrings",
                "format": "chat",
                "file": '{"messages": [{"role": "user", "content": "What does len do?"}, '
                '{"role": "assistant", "content": "It counts the items of a container."}]}\n',
            },
        }
    },
}
"""The multipart body of an upload, which FastAPI cannot know: it is read as a stream."""
