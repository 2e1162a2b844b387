"""Middleware that refuses calls that would store something while the disk of the embedded database has no room."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import disk_full, problem_response
from app.infra.files.disk_space import DatabaseReserve

_STORES_NOTHING = {"GET", "HEAD", "OPTIONS", "DELETE"}
"""Methods that are answered without room: a deletion makes some."""
_NEEDED_WITHOUT_ROOM = re.compile(
    r"/v1/(?:session(?:/links)?|stream-tickets|runs/(?:validate|estimate|stop|delete)|runs/[^/]+/stop)"
    r"|/openai/v1/fine_tuning/jobs/[^/]+/(?:cancel|pause)"
)
"""Calls that an operator needs to look at the service, and to stop what fills the disk."""


class DiskGuardMiddleware:
    """Middleware before the audit log, in which a refused call would need room too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _STORES_NOTHING:
            reserve: DatabaseReserve | None = scope["app"].state.database_reserve
            shortage = reserve.describe_shortage() if reserve is not None else None
            if shortage is not None and not _NEEDED_WITHOUT_ROOM.fullmatch(scope["path"]):
                await problem_response(scope, disk_full(_shortage_sentence(shortage)))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _shortage_sentence(shortage: str) -> str:
    return (
        f"Nothing was stored, because {shortage}: delete runs or datasets that are no longer needed, or free some "
        "space there, and try again. Runs can still be stopped."
    )
