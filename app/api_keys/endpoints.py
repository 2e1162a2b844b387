"""Endpoints `/v1/keys`, for keys with the scope `admin`."""

from fastapi import APIRouter, Response

from anneal.contracts.schemas.administration.api_keys import KeyCreate, KeyCreated, KeyEdit, KeyView
from anneal.contracts.schemas.page import Page
from app.api.authorization import AdminOnly, CurrentCaller
from app.api.dependencies import Session
from app.api.pagination import PageQuery
from app.api_keys import service

router = APIRouter(prefix="/keys", tags=["keys"], dependencies=[AdminOnly])


@router.post("", status_code=201)
async def create_key(body: KeyCreate, session: Session, caller: CurrentCaller, response: Response) -> KeyCreated:
    """Create a key. The response is the only one that contains it; a repeated request creates another key."""
    row, key = await service.create_key(session, body, caller.key_id)
    response.headers["Location"] = f"/v1/keys/{row.id}"
    response.headers["Cache-Control"] = "no-store"
    return KeyCreated(**KeyView.model_validate(row).model_dump(), key=key)


@router.get("")
async def list_keys(session: Session, paging: PageQuery) -> Page[KeyView]:
    """List keys, newest first, including revoked and expired ones."""
    rows, has_more = await service.list_keys(session, paging)
    return Page(data=[KeyView.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{key_id}")
async def get_key(key_id: str, session: Session) -> KeyView:
    """Get the name, the scopes and the state of a key."""
    return KeyView.model_validate(await service.get_key(session, key_id))


@router.patch("/{key_id}")
async def edit_key(key_id: str, body: KeyEdit, session: Session) -> KeyView:
    """Change the name, quota (`max_devices`) or budget (`max_device_hours`) of a key. Null removes the limit."""
    return KeyView.model_validate(await service.edit_key(session, key_id, body))


@router.delete(
    "/{key_id}", status_code=204, responses={409: {"description": "It is the last valid key with scope `admin`."}}
)
async def revoke_key(key_id: str, session: Session) -> None:
    """Revoke a key: within 30 seconds it is rejected and its streams are closed. It stays in the list."""
    await service.revoke_key(session, key_id)
