"""Registry of the available backends, by name."""

from collections.abc import Mapping

from app.api.errors import not_found
from app.backends.celery import CeleryBackend
from app.backends.fake import FakeBackend
from app.contracts.backends import BACKEND_RULES, BackendRules

BACKENDS: Mapping[str, type[CeleryBackend]] = {
    kind.rules.capabilities.name: kind for kind in (CeleryBackend, FakeBackend)
}


def rules(name: str) -> BackendRules:
    """Return the rules of a backend; raise 404 `backend_not_found` for an unknown name."""
    if name not in BACKEND_RULES:
        raise not_found("backend", name)
    return BACKEND_RULES[name]
