"""Base of test classes that take the API of their file in place of one with a database of its own."""

import shutil
from collections.abc import Iterator

import pytest

from app.config import Settings
from tests.server import ApiServer


class OnSharedApi:
    """For tests whose requests are refused, or that leave nothing that the others mind; models are removed."""

    @pytest.fixture
    def settings(self, shared_api: ApiServer) -> Iterator[Settings]:
        yield shared_api.settings
        shutil.rmtree(shared_api.settings.models_folder, ignore_errors=True)

    @pytest.fixture
    def api(self, shared_api: ApiServer) -> ApiServer:
        return shared_api
