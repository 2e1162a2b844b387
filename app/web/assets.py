"""Files of the dashboard, read once at start: the shell, and assets under a path that contains their digest."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
PREFIX = "/assets"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Only files of this server, nothing inline, and no text that becomes markup or code."""

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_COMPRESSED = (".css", ".html", ".js", ".svg", ".txt")


@dataclass(frozen=True)
class Asset:
    """File with its media type, also compressed with gzip; `zipped` is None where that would save nothing."""

    body: bytes
    media_type: str
    zipped: bytes | None


@dataclass(frozen=True)
class Assets:
    """All assets by path below `/assets/{digest}/`, and the shell, which refers to them."""

    digest: str
    files: dict[str, Asset]
    shell: Asset


@cache
def load_assets() -> Assets:
    """Read the files of the package. The digest changes with every file, so browsers may cache them forever."""
    paths = sorted(path for path in STATIC.rglob("*") if path.is_file() and path.suffix in _MEDIA_TYPES)
    bodies = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
    hashed = hashlib.sha256()
    for name, body in bodies.items():
        hashed.update(f"{name}\0{len(body)}\0".encode() + body)
    digest = hashed.hexdigest()[:16]
    shell = bodies.pop("index.html").replace(b"{assets}", f"{PREFIX}/{digest}".encode())
    files = {name: _build_asset(name, body) for name, body in bodies.items()}
    return Assets(digest, files, _build_asset("index.html", shell))


def _build_asset(name: str, body: bytes) -> Asset:
    suffix = Path(name).suffix
    zipped = gzip.compress(body, mtime=0) if suffix in _COMPRESSED else None
    return Asset(body, _MEDIA_TYPES[suffix], zipped)
