"""Idempotency keys of requests."""

import hashlib
from dataclasses import dataclass

from anneal.contracts.errors import FieldError
from app.api.errors import ApiError, invalid


@dataclass(frozen=True)
class Idempotency:
    """Idempotency key of a request, with a digest of the request."""

    key: str
    digest: str

    @classmethod
    def from_header(cls, key: str | None, call: str, body: bytes) -> "Idempotency | None":
        """Create it from the `Idempotency-Key` header, the call's path and the raw body; None without a header."""
        if key is None:
            return None
        if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
            message = "must be 1 to 255 printable ASCII characters"
            raise invalid([FieldError(field="Idempotency-Key", code="invalid", message=message)])
        return cls(key, request_digest(call, body))


def request_digest(call: str, body: bytes) -> str:
    """Return the digest by which requests are compared, of the call's path and the body."""
    return hashlib.sha256(call.encode() + b"\0" + body).hexdigest()


def idempotency_key_reused(created: str) -> ApiError:
    """Build a 422 for an idempotency key that was used before with a different request."""
    return ApiError(
        422,
        "idempotency_key_reused",
        f"This Idempotency-Key was used before with a different request, which created {created}; use a new key.",
    )
