"""Endpoints `/v1/session` and `/v1/stream-tickets`: what browsers use in the place of an API key."""

from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy import select

from anneal.contracts.schemas.administration.api_keys import (
    LinkRead,
    SessionCreate,
    SessionRead,
    TicketCreate,
    TicketRead,
)
from app.api.authorization import Caller, CurrentCaller
from app.api.dependencies import Session
from app.api.errors import ApiError, not_found
from app.api.rate_limit import RateLimit
from app.api_keys import cookies, tokens
from app.api_keys.middleware import KEY, is_surely_wrong, wrong_credentials
from app.api_keys.verifier import KeyVerifier
from app.audit.log import AuditedCall
from app.tables.administration.api_keys import ApiKey
from app.tables.runs import Run

router = APIRouter(tags=["session"])

_BURST = 200
_SECONDS_EACH = 0.5
own_calls = RateLimit(_BURST, _SECONDS_EACH)


async def _limit_own_calls(caller: CurrentCaller) -> None:
    """Limit calls that store rows although the key may change nothing."""
    if own_calls.is_exhausted(caller.key_id):
        raise ApiError(
            429,
            "too_many_calls",
            "This key creates links and tickets, or ends sessions, too often; wait a second, and reuse a ticket: it is "
            "valid for ten minutes.",
            headers={"Retry-After": "1"},
        )
    own_calls.count_attempt(caller.key_id)


_OwnCallLimit = Depends(_limit_own_calls)


@router.post(
    "/session",
    status_code=201,
    responses={
        401: {"description": "The key or the link is not valid."},
        429: {"description": "Too many failures from this address; `Retry-After` says when to try again."},
    },
)
async def create_session(body: SessionCreate, request: Request, response: Response, session: Session) -> SessionRead:
    """Sign a browser in, with a key or with a link that works once: sets the cookie of a session of 30 days.

    The session may do what the key may, and ends with the key.
    """
    auth: KeyVerifier = request.app.state.auth
    caller = await _signing_in(auth, body, request, session)
    token, ends = await tokens.create_token(session, "session", caller.key_id)
    # Behind a proxy that terminates TLS this server sees plain HTTP; browsers send the scheme of their page.
    is_secure = request.headers.get("origin", "").startswith("https://") or request.url.scheme == "https"
    response.set_cookie(
        cookies.name_of(request.headers, is_secure=is_secure),
        token,
        max_age=int(tokens.LASTS["session"].total_seconds()),
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )
    request.scope["state"]["caller"] = caller
    AuditedCall(request.scope).write_entry(session, 201, caller.key_id)
    return SessionRead(
        credential="session",
        key_id=caller.key_id,
        name=caller.name,
        scopes=sorted(caller.scopes),
        expires_at=ends,
    )


async def _signing_in(auth: KeyVerifier, body: SessionCreate, request: Request, session: Session) -> Caller:
    if body.link is not None:
        key_id = await tokens.redeem_link(session, body.link)
        caller = None if key_id is None else await tokens.caller_of(session, key_id)
        if caller is None:
            detail = "This link was used, or has expired; `anneal open` on the server creates another one."
            raise wrong_credentials(auth.failures, request.scope, "invalid_link", detail)
        return caller
    key = body.key or ""
    is_wrong = KEY.fullmatch(key) is None or await is_surely_wrong(auth, request.scope, ApiKey, key)
    caller = None if is_wrong else await auth.verify_key(key)
    if caller is None:
        raise wrong_credentials(auth.failures, request.scope)
    return caller


@router.get("/session")
async def get_session(caller: CurrentCaller) -> SessionRead:
    """Get the caller: the name and the scopes of its key, and the end of its session."""
    return SessionRead(
        credential=caller.credential,
        key_id=caller.key_id,
        name=caller.name,
        scopes=sorted(caller.scopes),
        expires_at=caller.expires_at,
    )


@router.delete("/session", status_code=204, dependencies=[_OwnCallLimit])
async def delete_session(request: Request, response: Response, session: Session) -> None:
    """Sign out: end the session and delete its cookie. With a key in the place of a session it does nothing."""
    token = cookies.session_of(request.headers)
    if token is None:
        return
    await tokens.end_session(session, token)
    request.app.state.auth.forget_session(token)
    for is_secure in (True, False):
        name = cookies.name_of(request.headers, is_secure=is_secure)
        response.delete_cookie(name, secure=is_secure, httponly=True, samesite="strict")


@router.post("/session/links", status_code=201, dependencies=[_OwnCallLimit])
async def create_link(request: Request, response: Response, caller: CurrentCaller, session: Session) -> LinkRead:
    """Create a link that signs a browser in as this caller. It works once, within ten minutes."""
    token, ends = await tokens.create_token(session, "link", caller.key_id)
    response.headers["Cache-Control"] = "no-store"
    return LinkRead(url=f"{request.url.scheme}://{request.headers['host']}/login#{token}", expires_at=ends)


@router.post(
    "/stream-tickets",
    status_code=201,
    responses={404: {"description": "The run does not exist."}},
    dependencies=[_OwnCallLimit],
)
async def create_ticket(caller: CurrentCaller, session: Session, body: TicketCreate | None = None) -> TicketRead:
    """Create a ticket that opens event streams for ten minutes, as `?ticket=…`.

    It is for pages on other origins (`ANNEAL_ALLOWED_ORIGINS`), whose EventSource sends neither a key nor a cookie:
    their own server creates tickets with a key and hands them out.
    """
    run_id = None
    if body is not None and body.run_id is not None:
        run_id = await session.scalar(select(Run.id).where(Run.id == body.run_id))
        if run_id is None:
            raise not_found("run", body.run_id)
    token, ends = await tokens.create_token(session, "ticket", caller.key_id, run_id)
    return TicketRead(ticket=token, run_id=run_id, expires_at=ends)
