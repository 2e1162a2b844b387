"""Wire models of base models."""

from pydantic import BaseModel, ConfigDict, Field


class ModelRead(BaseModel):
    """Base model on this server."""

    model_config = ConfigDict(
        protected_namespaces=(),
        json_schema_extra={
            "example": {
                "id": "Qwen/Qwen3-0.6B",
                "is_adapter": False,
                "architecture": "Qwen3ForCausalLM",
                "parameters": 596049920,
                "dtype": "bfloat16",
                "bytes": 1503300328,
                "has_chat_template": True,
                "max_seq_length": 40960,
            }
        },
    )

    id: str = Field(description="Name to use as `base_model`: the path below a models root, or an absolute path.")
    is_adapter: bool = Field(description="True if the folder has an adapter, which needs its own base model.")
    architecture: str | None = Field(description="Class of transformers in its config.json; null if it names none.")
    parameters: int | None = Field(
        description="Number of parameters; null for an adapter and for families that the estimator does not know."
    )
    dtype: str | None = Field(description="Type of its weights in its config.json, such as `bfloat16`.")
    bytes: int = Field(description="Size of its safetensors weights in bytes; 0 if there are none.")
    has_chat_template: bool = Field(description="True if its tokenizer has a chat template.")
    max_seq_length: int | None = Field(description="Maximum sequence length in tokens; null if its files do not say.")
