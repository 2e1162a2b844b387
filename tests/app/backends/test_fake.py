"""The `fake` backend: the same promises, without a model and with options of its own."""

from sqlalchemy import Engine

from app.backends.celery import CeleryBackend
from tests.app.backends.conformance import Conformance
from tests.rows import add_worker


class TestFakeBackend(Conformance):
    name = "fake"
    config = {"base_model": "any-name-will-do", "extra": {"steps": 5, "step_seconds": 0}}
    wrong_config = {"epochs": -1, "extra": {"steps": 0, "max_grad_norm": 1.0}}

    async def test_does_not_care_about_devices(self, backend: CeleryBackend, engine: Engine) -> None:
        add_worker(engine, backends=["fake"])
        assert await backend.validate_config({**self.config, "optim": "paged_adamw_32bit"}) == []
