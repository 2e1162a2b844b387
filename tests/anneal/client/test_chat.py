"""Questions of the Python client: whole and streamed answers, and errors before and in the middle of one."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler

import pytest
from sqlalchemy import Engine

from anneal.client.client import Anneal, AsyncAnneal
from anneal.client.errors import AnnealError
from app.infra.db import sync_engine
from app.openai import questions
from tests.http_server import serving as serving_http
from tests.openai.serving import prepare_models, serving, serving_runs
from tests.server import ApiServer


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def api(emptied_api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """A service with a worker and the base model `tiny`."""
    monkeypatch.setattr(questions, "_WATCH_SECONDS", 0.1)
    prepare_models(emptied_api, engine)
    return emptied_api


@pytest.fixture
def client(api: ApiServer) -> Iterator[Anneal]:
    with Anneal(api.url, api.key) as client:
        yield client


def test_answer_is_returned_whole_with_each_choice_its_tool_calls_and_the_usage(
    api: ApiServer, engine: Engine, client: Anneal
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: client.chat("tiny", "hello", temperature=0, n=2))
        with serving(api, engine) as process:
            question = process.next_question()
            assert question["messages"] == [{"role": "user", "content": "hello"}]
            assert (question["temperature"], question["n"]) == (0.0, 2)
            process.write(question, "", choice=1, end="tool_calls", tool_calls=[{"name": "add", "arguments": "{}"}])
            process.write(question, "Hel", "lo", end="length")
            completion = answer.result(30)
    first, second = completion.choices
    assert (completion.text, first.finish_reason, first.message.tool_calls) == ("Hello", "length", None)
    assert second.finish_reason == "tool_calls" and second.message.tool_calls is not None
    assert [call.function.name for call in second.message.tool_calls] == ["add"]
    assert (completion.model, completion.usage.total_tokens) == ("tiny", 10)


def test_stream_yields_text_as_it_is_written_and_closing_it_ends_the_answer(
    api: ApiServer, engine: Engine, client: Anneal
) -> None:
    run_ids: list[str] = []
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    with (
        closing(client.stream_chat("tiny", chat, on_serving_run=run_ids.append)) as chunks,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(next, chunks)
        with serving(api, engine) as process:
            question = process.next_question()
            assert question["messages"] == chat
            process.write(question, "Hel", end=None)
            assert first.result(30).text == "Hel"
            process.write(question, "lo", end=None)
            assert next(chunks).text == "lo"
            chunks.close()
            assert process.next_cancelled() == question["id"]
    assert run_ids == [serving_runs(engine)[0].id]


async def test_async_client_answers_whole_and_streamed(api: ApiServer, engine: Engine) -> None:
    def write_answers() -> None:
        with serving(api, engine) as process:
            for _ in range(2):
                process.write(process.next_question(), "Hel", "lo")

    async with AsyncAnneal(api.url, api.key) as client:
        writing = asyncio.create_task(asyncio.to_thread(write_answers))
        assert (await client.chat("tiny", "hello")).text == "Hello"
        assert [chunk.text async for chunk in client.stream_chat("tiny", "hello")] == ["Hel", "lo", ""]
        await writing


def test_error_says_what_to_do_whether_it_comes_before_or_within_the_answer(
    api: ApiServer, engine: Engine, client: Anneal
) -> None:
    with pytest.raises(AnnealError, match=r"`client\.models\.list\(\)`") as refused:
        client.chat("../tiny", "hello")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(AnnealError, match="`temperature`") as refused:
        client.chat("tiny", "hello", temperature=3)
    assert refused.value.status == 400
    received: list[str] = []

    def read_all() -> None:
        received.extend(chunk.text for chunk in client.stream_chat("tiny", "hello"))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all)
        with serving(api, engine) as process:
            question = process.next_question()
            process.write(question, "Hel", end=None)
            process.fail(question, "out_of_memory", "The device is full: ask for less.")
            error = reading.exception(30)
    assert isinstance(error, AnnealError) and (error.code, error.status) == ("out_of_memory", None)
    assert str(error) == "The device is full: ask for less."


def test_error_that_a_repetition_does_not_end_is_raised_at_once(api: ApiServer, engine: Engine, client: Anneal) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: client.chat("tiny", "hello"))
        with serving(api, engine) as process:
            process.next_question()
            process.trainer.fail()
            error = answer.exception(30)
    assert isinstance(error, AnnealError) and (error.status, error.code) == (503, "serving_failed")
    assert len(serving_runs(engine)) == 1


class Truncating(BaseHTTPRequestHandler):
    """Sends the first part of an answer, and then nothing more."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = b'data: {"id": "x", "created": 1, "model": "tiny", "choices": []}\n\n'
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(chunk)))
        self.end_headers()
        self.wfile.write(chunk)

    def log_message(self, *_: object) -> None:
        """Write nothing to standard error."""


def test_answer_without_its_end_is_an_error_and_never_a_shorter_answer() -> None:
    with (
        serving_http(Truncating) as url,
        Anneal(url, "key", patience=0) as client,
        pytest.raises(AnnealError, match="ended before its last part"),
    ):
        client.chat("tiny", "hello")
