"""Registry of the available backends, by name."""

from collections.abc import Mapping

from app.backends.base import Rules
from app.backends.celery import CeleryBackend
from app.backends.fake import FakeBackend
from app.errors import not_found

BACKENDS: Mapping[str, type[CeleryBackend]] = {
    kind.rules.capabilities.name: kind for kind in (CeleryBackend, FakeBackend)
}
RULES: Mapping[str, Rules] = {name: kind.rules for name, kind in BACKENDS.items()}


def rules(name: str) -> Rules:
    """Return the rules of a backend; raise 404 `backend_not_found` for an unknown name."""
    if name not in RULES:
        raise not_found("backend", name)
    return RULES[name]
