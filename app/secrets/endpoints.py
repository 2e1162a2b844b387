"""Endpoints `/v1/secrets`, for keys with the scope `admin`."""

from fastapi import APIRouter

from anneal.contracts.schemas.administration.secrets import SecretList, SecretValue, SecretView
from app.api.authorization import AdminOnly, CurrentCaller
from app.api.dependencies import CurrentSettings, Session
from app.secrets import service

router = APIRouter(prefix="/secrets", tags=["secrets"], dependencies=[AdminOnly])


@router.put("/{name}")
async def set_secret(
    name: str, body: SecretValue, session: Session, settings: CurrentSettings, caller: CurrentCaller
) -> SecretView:
    """Set a token for runs or imports, such as `hf_token`; it replaces an earlier one and cannot be read back."""
    secret = await service.put_secret(session, settings, name, body.value.get_secret_value(), caller.key_id)
    return SecretView.model_validate(secret)


@router.get("")
async def list_secrets(session: Session) -> SecretList:
    """List names of secrets and when they were set, never their values."""
    return SecretList(data=[SecretView.model_validate(secret) for secret in await service.list_all(session)])


@router.delete("/{name}", status_code=204)
async def delete_secret(name: str, session: Session) -> None:
    """Delete a secret; running attempts that have received it keep it until they end."""
    await service.remove_secret(session, name)
