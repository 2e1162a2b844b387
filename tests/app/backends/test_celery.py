"""The `celery` backend: real training on our own workers."""

from sqlalchemy import Engine

from app.backends.celery import CeleryBackend
from tests.app.backends.conformance import Conformance
from tests.rows import add_worker


class TestCeleryBackend(Conformance):
    name = "celery"
    config = {"base_model": "org/model"}
    wrong_config = {"epochs": -1, "extra": {"unheard_of": 1}}

    async def test_asks_the_workers_that_are_online_what_they_can_honor(
        self, backend: CeleryBackend, engine: Engine
    ) -> None:
        requested = {**self.config, "optim": "paged_adamw_32bit"}
        assert await backend.validate_config(requested) == []
        add_worker(engine, backends=["celery"])
        (problem,) = await backend.validate_config(requested)
        assert (problem.field, problem.code) == ("optim", "not_on_this_machine")
