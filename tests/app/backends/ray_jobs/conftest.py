"""A Ray server, and the loop that submits jobs to it when a test says so."""

from collections.abc import AsyncIterator, Iterator

import pytest

from app.backends.ray_jobs import RayJobs
from app.config import Settings
from tests.app.backends.ray_jobs.waiting_runs import loop_of
from tests.app.ray_server import RayServer, ray_server


@pytest.fixture
def ray() -> Iterator[RayServer]:
    with ray_server() as server:
        yield server


@pytest.fixture
def settings(settings: Settings, ray: RayServer) -> Settings:
    return settings.model_copy(update={"ray_url": ray.url, "ray_token": "sesame"})


@pytest.fixture
async def jobs(settings: Settings) -> AsyncIterator[RayJobs]:
    async for running_jobs in loop_of(settings):
        yield running_jobs
