"""Endpoints `/v1/backends`."""

import asyncio
from typing import Any

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRead, BackendRules
from anneal.contracts.schemas.page import Page
from anneal.contracts.training_config import groups
from app.api.dependencies import CurrentSettings, Session, release_connection
from app.api.errors import not_found
from app.config import Settings
from app.estimator.model_sizes import largest_model
from app.runs.creating.estimates.devices import online_devices
from app.runs.creating.validation.backends import shown_backends, unavailable_reason
from app.workers.online import read_online_workers

router = APIRouter(tags=["backends"])


@router.get(
    "/config-schema",
    responses={
        200: {
            "description": "A JSON schema of draft 2020-12.",
            "content": {"application/json": {"example": {"type": "object", "properties": {}, "x-groups": {}}}},
        }
    },
)
async def get_config_schema() -> dict[str, Any]:
    """Get the JSON schema of a training configuration, for forms.

    `x-groups` has its fields by group, and `x-method-defaults` the defaults that depend on the method, with an adapter
    and without (`full`).
    """
    return groups.config_schema()


@router.get("/backends")
async def list_backends(session: Session, settings: CurrentSettings) -> Page[BackendRead]:
    """List the backends on which runs can execute."""
    return Page(
        data=[await _read_backend(session, settings, rules) for rules in shown_backends(settings).values()],
        has_more=False,
    )


@router.get("/backends/{name}")
async def get_backend(name: str, session: Session, settings: CurrentSettings) -> BackendRead:
    """Get a backend and its capabilities."""
    if (rules := shown_backends(settings).get(name)) is None:
        raise not_found("backend", name)
    return await _read_backend(session, settings, rules)


async def _read_backend(session: AsyncSession, settings: Settings, rules: BackendRules) -> BackendRead:
    name, largest = rules.capabilities.name, None
    devices = online_devices(await read_online_workers(session, settings, name)) if rules.loads_model else []
    if devices and (memory := devices[0].memory_mb) is not None:
        await release_connection(session)
        largest = await asyncio.to_thread(largest_model, devices[0].kind, memory)
    return BackendRead(
        id=name,
        **rules.capabilities.model_dump(exclude={"max_model_size_b"}),
        max_model_size_b=largest,
        unavailable_reason=unavailable_reason(settings, rules),
    )
