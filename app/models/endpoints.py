"""Endpoint `/v1/models`."""

import asyncio

from fastapi import APIRouter

from anneal.contracts.schemas.models import ModelRead
from anneal.contracts.schemas.page import Page
from app.api.dependencies import CurrentSettings, CurrentStorage
from app.models.catalog import list_models

router = APIRouter(prefix="/models", tags=["models"])


@router.get("")
async def list_base_models(settings: CurrentSettings, storage: CurrentStorage) -> Page[ModelRead]:
    """List the base models below the models roots of this server, by name; at most 1000.

    Models of the hub are not listed: `base_model` names them as `owner/model`.
    """
    return Page(data=await asyncio.to_thread(list_models, settings, storage), has_more=False)
