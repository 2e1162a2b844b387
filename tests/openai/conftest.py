"""The official Python client on the API of a test."""

import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.server import ApiServer

# The client reads them; they must not come from the shell.
for _name in [name for name in os.environ if name.startswith("OPENAI_")]:
    del os.environ[_name]


def client_of(api: ApiServer, key: str | None = None, url: str | None = None, **options: Any) -> openai.OpenAI:
    """A client as users create it, but without the proxies of the environment."""
    http = openai.DefaultHttpxClient(trust_env=False)
    base_url = f"{url or api.url}/openai/v1"
    return openai.OpenAI(base_url=base_url, api_key=key or api.key, http_client=http, **options)


def async_client_of(api: ApiServer) -> openai.AsyncOpenAI:
    """Do the same for the asynchronous client."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{api.url}/openai/v1", api_key=api.key, http_client=http)


@pytest.fixture
def client(emptied_api: ApiServer) -> Iterator[openai.OpenAI]:
    with client_of(emptied_api) as client:
        yield client


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    """Engine for the database of the file's API."""
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()
