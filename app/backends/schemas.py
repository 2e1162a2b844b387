"""Wire models of backends."""

from pydantic import ConfigDict

from app.backends.base import BackendCapabilities


class BackendRead(BackendCapabilities):
    """Backend and its capabilities."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "example": {
                "id": "celery",
                "name": "celery",
                "supports_local": True,
                "supports_remote": True,
                "supports_distributed": False,
                "supported_methods": ["full", "lora", "qlora", "dpo", "reward", "rlhf", "sft"],
                "max_model_size_b": None,
                "supported_quantization": ["4bit", "8bit"],
                "supports_streaming_logs": True,
            }
        },
    )

    id: str
