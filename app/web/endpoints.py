"""Pages of the dashboard: one static shell without data for every address, and its assets. All data is in `/v1`."""

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.authorization import is_for_people
from app.api.errors import ApiError
from app.web import assets

router = APIRouter(include_in_schema=False)

PAGES = (
    "/",
    "/runs/{run_id}",
    "/compare",
    "/experiments",
    "/experiments/{experiment_id}",
    "/datasets",
    "/datasets/{dataset_id}",
    "/webhooks",
    "/webhooks/{webhook_id}",
    "/workers",
    "/try",
    "/new",
    "/login",
)
_FOREVER = "public, max-age=31536000, immutable"


async def shell(request: Request) -> Response:
    """Serve the shell; its script shows the page of the address."""
    headers = {"Content-Security-Policy": assets.CONTENT_SECURITY_POLICY, "Cache-Control": "no-cache"}
    return _asset_response(request, assets.load_assets().shell, headers)


def with_page_for_people(not_found: ASGIApp) -> ASGIApp:
    """Show browsers a page at addresses that do not exist; programs, and calls of the API, get the error."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if not is_for_people(scope):
            return await not_found(scope, receive, send)
        response = await shell(Request(scope))
        response.status_code = 404
        await response(scope, receive, send)

    return respond


for _path in PAGES:
    router.add_api_route(_path, shell, methods=["GET", "HEAD"])


@router.api_route("/assets/{digest}/{path:path}", methods=["GET", "HEAD"])
async def asset(request: Request, digest: str, path: str) -> Response:
    """Serve an asset of this version; a page of another version reloads."""
    loaded = assets.load_assets()
    file = loaded.files.get(path) if digest == loaded.digest else None
    if file is None:
        raise ApiError(404, "asset_not_found", "This version has no such asset; reload the page.")
    return _asset_response(request, file, {"Cache-Control": _FOREVER})


@router.api_route("/favicon.ico", methods=["GET", "HEAD"])
async def icon(request: Request) -> Response:
    """Serve the icon to browsers that ask for it without having seen a page."""
    return _asset_response(request, assets.load_assets().files["icon.svg"], {"Cache-Control": "public, max-age=86400"})


def _asset_response(request: Request, file: assets.Asset, headers: dict[str, str]) -> Response:
    headers["Vary"] = "Accept-Encoding"
    body = file.body
    if file.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = file.zipped, "gzip"
    return Response(body, media_type=file.media_type, headers=headers)
