"""Checks of the destinations of a run's data that the API can make: trackers, the hub, GGUF files, rewards."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.field_types import needs_quantizer
from anneal.contracts.training_config.rules import INSTALL_GGUF_CONVERTER, INSTALL_GGUF_QUANTIZER, field_error
from app.config import Settings, wandb_mode
from app.runs.creating.validation.reward_hosts import reward_host_problems
from app.secrets import store
from app.tables.administration.secrets import Secret
from app.tables.workers import Worker
from app.workers.queries import online_conditions


async def destination_problems(
    session: AsyncSession, settings: Settings, config: Mapping[str, Any]
) -> list[FieldError]:
    """Return errors for destinations in a user's configuration that this server lacks a setting or a token for."""
    problems = []
    trackers = config.get("report_to")
    if isinstance(trackers, list) and "mlflow" in trackers and settings.mlflow_tracking_uri is None:
        message = (
            "contains `mlflow`, and no tracking server is configured; ask the operator to set "
            "ANNEAL_MLFLOW_TRACKING_URI for API and workers"
        )
        problems.append(field_error("report_to", "tracker_not_set_up", message))
    needs_key = isinstance(trackers, list) and "wandb" in trackers and wandb_mode() == "online"
    if needs_key and not await session.scalar(select(exists().where(Secret.name == store.WANDB_API_KEY))):
        message = "contains `wandb`, and no key is set; ask an admin to set it with `anneal secrets set wandb_api_key`"
        problems.append(field_error("report_to", "tracker_not_set_up", message))
    if isinstance(gguf_type := config.get("gguf"), str):
        problems += await gguf_problems(session, settings, gguf_type)
    pushes = config.get("push_to_hub") is not None
    if pushes and not settings.allow_hub:
        message = "needs the hub, which is disabled on this server; ask its operator to set ANNEAL_ALLOW_HUB=true"
        problems.append(field_error("push_to_hub", "hub_not_allowed", message))
    elif pushes and not await session.scalar(select(exists().where(Secret.name == store.HF_TOKEN))):
        message = "needs a hub token with write access; ask an admin to set it with `anneal secrets set hf_token`"
        problems.append(field_error("push_to_hub", "hub_token_missing", message))
    problems += await reward_host_problems(session, settings, config)
    return problems


async def gguf_problems(session: AsyncSession, settings: Settings, gguf_type: str) -> list[FieldError]:
    """Return an error if workers are online and none of them can write GGUF files of a type.

    A run waits for the first worker.
    """
    programs = select(Worker.gguf, Worker.gguf_quantizer).where(*online_conditions(settings, "celery"))
    workers = (await session.execute(programs)).all()
    if workers and not any(worker.gguf for worker in workers):
        message = (
            "needs the converter of llama.cpp, which no online worker has; ask the operator to "
            f"{INSTALL_GGUF_CONVERTER}{f'; then {INSTALL_GGUF_QUANTIZER}' if needs_quantizer(gguf_type) else ''}"
        )
        return [field_error("gguf", "gguf_converter_missing", message)]
    if workers and needs_quantizer(gguf_type) and not any(worker.gguf_quantizer for worker in workers):
        message = (
            f"is `{gguf_type[:20]}`, which needs the quantizer of llama.cpp, and no online worker has it; use `Q8_0` "
            f"or `F16`, or ask the operator to {INSTALL_GGUF_QUANTIZER}"
        )
        return [field_error("gguf", "gguf_quantizer_missing", message)]
    return []
