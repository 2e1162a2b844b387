"""Where a run is to send what it makes: experiment trackers and the hub, as far as the API knows of them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.runs.conflicts import Problem, problem
from app.secrets import store
from app.secrets.models import Secret


async def destination_problems(session: AsyncSession, settings: Settings, config: Mapping[str, Any]) -> list[Problem]:
    """What of a configuration, as the user wrote it, this server has no place or no token for."""
    found = []
    trackers = config.get("report_to")
    if isinstance(trackers, list) and "mlflow" in trackers and settings.mlflow_tracking_uri is None:
        message = (
            "names `mlflow`, and this server knows no tracking server; its operator sets ANNEAL_MLFLOW_TRACKING_URI "
            "for API and workers"
        )
        found.append(problem("report_to", "tracker_not_set_up", message))
    if config.get("push_to_hub") is None:
        return found
    if not settings.allow_hub:
        message = "needs the hub, which this server does not use; let its operator set ANNEAL_ALLOW_HUB=true"
        found.append(problem("push_to_hub", "hub_not_allowed", message))
    elif not await session.scalar(select(exists().where(Secret.name == store.HF_TOKEN))):
        message = "needs a token with which to write to the hub; an admin sets it with `anneal secrets set hf_token`"
        found.append(problem("push_to_hub", "hub_token_missing", message))
    return found
