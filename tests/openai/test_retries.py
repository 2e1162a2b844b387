"""A retry of OpenAI's clients has the key of the request that it repeats, and of no other."""

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from fastapi import Request
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.background import BackgroundTasks

from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.openai.retries import find_idempotency

TIMEOUT = {"x-stainless-read-timeout": "600"}


class Client:
    """Client of OpenAI that sends one request, again and again."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions

    async def send(
        self, retry_count: int, headers: dict[str, str] = TIMEOUT, body_seconds: float = 0.0
    ) -> tuple[str, BackgroundTasks]:
        """Return the key of the request, and the tasks that follow its response."""
        sent = {**headers, "x-stainless-retry-count": str(retry_count)}
        encoded = [(name.encode(), value.encode()) for name, value in sent.items()]
        app = SimpleNamespace(state=SimpleNamespace(sessions=self._sessions))
        request = Request({"type": "http", "headers": encoded, "app": app})
        tasks = BackgroundTasks()
        idempotency = await find_idempotency(request, "key_1", "/call", b"content", tasks, body_seconds)
        assert idempotency is not None
        return idempotency.key, tasks

    async def send_and_answer(self) -> str:
        """Return the key of a new request that is answered."""
        key, tasks = await self.send(0)
        await tasks()
        return key

    async def pass_time(self, seconds: float) -> None:
        """Let the newest request have been sent, and answered, so much earlier."""
        past = f"arrived_at = arrived_at - interval '{seconds} s', answered_at = answered_at - interval '{seconds} s'"
        async with self._sessions() as session, session.begin():
            await session.execute(text(f"UPDATE openai_requests SET {past}"))


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[Client]:
    engine = async_engine(settings.database_url or "", pool_size=1)
    yield Client(session_maker(engine))
    await engine.dispose()


@pytest.mark.parametrize("name", ["x-stainless-read-timeout", "x-stainless-timeout"])
async def test_retry_after_the_timeout_of_the_client_repeats_the_request_whose_answer_was_lost_in_silence(
    client: Client, name: str
) -> None:
    key = await client.send_and_answer()
    for retry_count in (1, 2):
        await client.pass_time(608)
        repeated, tasks = await client.send(retry_count, {name: "600"})
        assert repeated == key
        await tasks()


@pytest.mark.parametrize("timeout", ["60", "1200", "nan", "-300", "1e999", "99999999999", "none", ""])
async def test_retry_long_after_the_answer_is_a_new_request_unless_its_timeout_has_just_passed(
    client: Client, timeout: str
) -> None:
    key = await client.send_and_answer()
    await client.pass_time(300)
    assert (await client.send(1, {"x-stainless-read-timeout": timeout}))[0] != key


@pytest.mark.parametrize(("body_seconds", "is_repeated"), [(290, True), (200, False)])
async def test_retry_counts_from_the_beginning_of_its_body(
    client: Client, body_seconds: float, is_repeated: bool
) -> None:
    key = await client.send_and_answer()
    await client.pass_time(300)
    assert ((await client.send(1, body_seconds=body_seconds))[0] == key) is is_repeated


async def test_request_without_an_answer_is_repeated_for_an_hour(client: Client) -> None:
    key, _ = await client.send(0)
    await client.pass_time(1800)
    assert (await client.send(1))[0] == key
    await client.pass_time(3700)
    assert (await client.send(2))[0] != key


async def test_answer_of_a_request_does_not_count_for_a_later_one_with_its_content(client: Client) -> None:
    _, tasks = await client.send(0)
    later, _ = await client.send(0)
    await tasks()
    await client.pass_time(300)
    assert (await client.send(1))[0] == later
