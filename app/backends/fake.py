"""Backend for simulated runs: real processes and events without training, for tests and trials without torch."""

from app.backends.celery import CeleryBackend
from app.contracts.backends import BACKEND_RULES


class FakeBackend(CeleryBackend):
    """Backend with the same workers but a simulated trainer: any model name is valid, `extra` controls the behavior."""

    rules = BACKEND_RULES["fake"]
