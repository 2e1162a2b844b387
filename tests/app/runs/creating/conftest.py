"""Emptied service with the base model `tiny`, and a dataset."""

import pytest
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import make_dataset, make_model
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    make_model(emptied_api.settings)
    return emptied_api


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)
