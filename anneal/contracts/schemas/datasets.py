"""Wire models of datasets."""

from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import DatasetFormat, Timestamp
from anneal.contracts.schemas.short_repr import ShortRepr

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


_STATISTICS: JsonDict = {
    "tokenizer": "Qwen/Qwen3-0.6B",
    "rows": 4210,
    "sequences": 4210,
    "total": 731277,
    "mean": 173.7,
    "min": 12,
    "p50": 151,
    "p95": 402,
    "max": 2210,
}


class TokenStatistics(BaseModel):
    """Token counts of the sequences, without special tokens and chat template."""

    model_config = ConfigDict(json_schema_extra={"example": _STATISTICS})

    tokenizer: str
    rows: int
    sequences: int | None = Field(
        default=None,
        description="Number of sequences that the model reads: one per row, or two per preference pair (the prompt "
        "with each answer). Null: counted by an earlier version per row, with the prompt of a pair counted once.",
    )
    total: int
    mean: float
    min: int
    p50: int
    p95: int
    max: int


_SOURCE: JsonDict = {
    "file_format": "jsonl", "delimiter": None, "gzip": False, "layout": None,
    "requested_format": None, "requested_columns": None,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
}  # fmt: skip


class DatasetSource(BaseModel):
    """Recognized type of the uploaded file, or of the last file of an import."""

    model_config = ConfigDict(json_schema_extra={"example": _SOURCE})

    file_format: Literal["jsonl", "json", "csv", "tsv", "parquet"]
    delimiter: str | None = Field(description="Delimiter of the cells of a CSV or TSV file; null for other types.")
    gzip: bool = Field(description="True if the file was compressed.")
    sha256: str | None = Field(
        default=None, description="SHA-256 of the uploaded file, or of all files of an import together."
    )
    layout: Literal["sharegpt", "alpaca"] | None = Field(
        description="Layout of the first row if its columns were converted to `messages`; null: stored as they were."
    )
    requested_format: DatasetFormat | None = Field(
        default=None, description="Format that the request named; null: it was detected."
    )
    requested_columns: dict[str, str] | None = Field(
        default=None, description="`columns` of the request: those of the format, and their names in the file."
    )
    original_bytes: int | None = Field(
        default=None,
        exclude_if=lambda original_bytes: original_bytes is None,
        description="Size of the uploaded file, which `POST /openai/v1/files` keeps beside the rows if they differ. "
        "Absent for every other dataset.",
    )


class MixSource(BaseModel):
    """Source of a mix."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    dataset_id: str = Field(max_length=100, description="ID of the dataset.")
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Share of the source's rows, relative to the other weights. Set it for all sources or for none: "
        "without weights the sources follow each other, each row once.",
    )
    weight_column: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Column with the number of times that a row is used: 0, false or null leaves it out, 1 or true "
        "uses it once, 2 twice, and 0.5 with a probability of one half. At most 1,000.",
    )


class DatasetMix(BaseModel):
    """Dataset to make of rows of other datasets."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "chats and code",
                "sources": [
                    {"dataset_id": _SUMMARY["id"], "weight": 0.7},
                    {"dataset_id": _SUMMARY["id"], "weight": 0.3},
                ],
                "stopping_strategy": "first_exhausted",
                "seed": 42,
            }
        },
    )

    name: str = Field(min_length=1, max_length=200)
    sources: list[MixSource] = Field(min_length=1, max_length=64, description="Datasets of one format.")
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = Field(
        default="first_exhausted",
        description="End of a mix with weights: once one source has no more rows, or once every row of every source "
        "has been used, where the other sources start again.",
    )
    seed: int = Field(default=42, ge=0, le=2**32 - 1, description="Seed of the order.")

    @model_validator(mode="after")
    def _has_weights_for_all_or_none(self) -> Self:
        if len({source.weight is None for source in self.sources}) > 1:
            raise PydanticCustomError("missing_weights", "set `weight` for all sources or for none")
        return self


class UsedSource(MixSource):
    """Source of a mix, with what it contributed."""

    name: str
    rows: int
    """Rows of the mix that are from this source."""


class MixRecipe(BaseModel):
    """How a mix was made."""

    mixed_from: list[UsedSource]
    stopping_strategy: Literal["first_exhausted", "all_exhausted"]
    seed: int


class DatasetSummary(ShortRepr):
    """Dataset in a list."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _SUMMARY})

    id: str
    name: str
    format: DatasetFormat
    rows: int
    bytes: int
    sha256: str
    columns: list[str]
    created_at: Timestamp
    created_by: str | None


class DatasetView(DatasetSummary):
    """Dataset with its first rows; long texts are shortened."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {**_SUMMARY, "preview": [_ROW], "source": _SOURCE, "token_statistics": _STATISTICS}
        }
    )

    preview: list[dict[str, Any]]
    source: DatasetSource | MixRecipe
    token_statistics: TokenStatistics | None
    """Null if no tokenizer was named."""


class DatasetRow(BaseModel):
    """Row of a dataset."""

    line: int = Field(description="Number of the row, from 1.")
    row: dict[str, Any] = Field(description="Its columns; long texts and lists are cut.")


class DatasetRows(BaseModel):
    """Page of the rows of a dataset."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"data": [{"line": 1, "row": _ROW}], "has_more": True, "next": "1.64"}}
    )

    data: list[DatasetRow]
    has_more: bool
    next: str | None = Field(description="`after` of the next page; null on the last one.")


class HubImport(BaseModel):
    """Import of a dataset from the Hugging Face Hub."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "hub": "openai/gsm8k",
                "subset": "main",
                "split": "train",
                "columns": {"prompt": "question", "completion": "answer"},
            }
        },
    )

    hub: str = Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$")
    """`owner/name`."""
    split: str = Field(default="train", max_length=100, pattern=r"^\w[\w.-]*$")
    subset: str | None = Field(default=None, max_length=100, pattern=r"^\w[\w.-]*$")
    """Required if the dataset has several subsets."""
    revision: str | None = Field(default=None, max_length=100, pattern=r"^\w[\w./-]*$")
    """Branch, tag or commit; defaults to the main branch."""
    name: str | None = Field(default=None, min_length=1, max_length=200)
    format: DatasetFormat | None = None
    columns: dict[str, str] | None = None
    tokenizer: str | None = Field(default=None, min_length=1, max_length=300)


_COLUMNS_HELP = (
    'JSON object that maps Anneal\'s column names to those of the file, such as `{"prompt": "question", "completion": '
    '"answer"}`. Rows are stored with Anneal\'s names; other columns are unchanged. Must come before the part `file`.'
)
_TOKENIZER_HELP = (
    "Count the tokens of the rows with the tokenizer of this model: a folder below the models root, the id of a "
    "completed run, or a name on the Hugging Face Hub. Must come before the part `file`."
)
_FILE_HELP = (
    'JSONL (one object per line), JSON (an array of objects, or `{"data": […]}`), CSV (a header; commas, semicolons or '
    "tabs; UTF-8), TSV or Parquet, each also compressed with gzip. Always stored as JSONL; the original is not kept. "
    "In tables and Parquet an empty or null cell means no value, and a `messages` cell may contain JSON."
)
UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "additionalProperties": False,
                "properties": {
                    "name": {
                        "type": "string",
                        "maxLength": 200,
                        "description": "Name of the dataset; defaults to the file name.",
                    },
                    "format": {
                        "type": "string",
                        "enum": list(get_args(DatasetFormat)),
                        "description": "Dataset format; by default detected from the columns.",
                    },
                    "file_format": {
                        "type": "string",
                        "enum": ["jsonl", "json", "csv", "tsv", "parquet"],
                        "description": "File type; by default detected from the file's name and first bytes. "
                        "Must come before the part `file`.",
                    },
                    "columns": {"type": "string", "description": _COLUMNS_HELP},
                    "tokenizer": {"type": "string", "maxLength": 300, "description": _TOKENIZER_HELP},
                    "file": {"type": "string", "format": "binary", "description": _FILE_HELP},
                },
            },
            "example": {
                "name": "docstrings",
                "format": "chat",
                "file": '{"messages": [{"role": "user", "content": "What does len do?"}, '
                '{"role": "assistant", "content": "It counts the items of a container."}]}\n',
            },
        },
        "application/json": {"schema": HubImport.model_json_schema()},
    },
}
"""OpenAPI request body of `POST /v1/datasets`, which FastAPI cannot infer because the body is streamed."""
