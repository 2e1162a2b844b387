"""Endpoints `/v1/backends`."""

from fastapi import APIRouter

from app.api.errors import not_found
from app.contracts.backends import BACKEND_RULES, BackendRead, BackendRules
from app.contracts.schemas.page import Page

router = APIRouter(prefix="/backends", tags=["backends"])


@router.get("")
async def list_backends() -> Page[BackendRead]:
    """List the backends on which runs can execute."""
    return Page(data=[_read(rules) for rules in BACKEND_RULES.values()], has_more=False)


@router.get("/{name}")
async def get_backend(name: str) -> BackendRead:
    """Get a backend and its capabilities."""
    if name not in BACKEND_RULES:
        raise not_found("backend", name)
    return _read(BACKEND_RULES[name])


def _read(rules: BackendRules) -> BackendRead:
    return BackendRead(id=rules.capabilities.name, **rules.capabilities.model_dump())
