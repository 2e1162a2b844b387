"""Answers of an engine like vLLM in place of serving runs: what clients get, and what becomes of its failures."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, text

from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.openai import external_engine, questions
from app.openai.external_engine import ExternalEngine
from app.runs.creating.serving import ServedModel
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.openai.conftest import client_of
from tests.openai.serving import serving, serving_runs
from tests.openai.vllm_server import LONG, RANK, VllmServer, error_body, vllm_server
from tests.ports import free_port
from tests.rows import add_worker, events_of
from tests.server import ApiServer, ThreadServer

HELLO: Any = [{"role": "user", "content": "hello"}]
KEY = "sk-of-the-engine"
CHAT, TEXT, LOAD = "/v1/chat/completions", "/v1/completions", "/v1/load_lora_adapter"
LORA = {"base_model": "tiny", "method": "lora", "lora_r": 8, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def running_vllm() -> Iterator[VllmServer]:
    with vllm_server(KEY) as server:
        yield server


@pytest.fixture(scope="module")
def api(shared_api: ApiServer, running_vllm: VllmServer) -> Iterator[ThreadServer]:
    """An API of the database of the file's, with the engine."""
    engine_settings = {"engine_url": f"{running_vllm.url}/v1/", "engine_api_key": KEY}
    with ThreadServer(shared_api.settings.model_copy(update=engine_settings)) as api:
        yield api


@pytest.fixture
def vllm(
    emptied_api: ApiServer, running_vllm: VllmServer, api: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VllmServer]:
    """The engine as after a start, and a base model that it serves; its models are listed for each question."""
    api.application.state.external_engine.forget_models()
    monkeypatch.setattr(external_engine, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(external_engine, "_FAILED_SECONDS", 0.0)
    running_vllm.reset()
    running_vllm.key = KEY
    make_model(emptied_api.settings, "tiny")
    yield running_vllm
    running_vllm.goes_on.set()


@pytest.fixture
def client(api: ApiServer, vllm: VllmServer) -> Iterator[openai.OpenAI]:
    with client_of(api, max_retries=0) as client:
        yield client


@pytest.fixture
def adapter(api: ApiServer, engine: Engine, vllm: VllmServer) -> str:
    """A completed run whose output is an adapter on `tiny`."""
    run_id, _ = trained(api, engine, LORA)
    return run_id


def trained(api: ApiServer, engine: Engine, config: dict[str, Any]) -> tuple[str, str]:
    """A completed run with an output and a checkpoint; their ids."""
    run_id: str = make_run(api.client, make_dataset(engine, "chat", ["messages"]), config=config, backend="celery")[
        "id"
    ]
    trainer, storage = Trainer(engine, run_id).begin(), Storage(api.settings)
    checkpoint_id = trainer.checkpoint(20)
    shutil.copytree(trainer.complete().write_output(storage), storage.checkpoint_dir(run_id, trainer.attempt, 20))
    return run_id, checkpoint_id


def say_hello(client: openai.OpenAI, model: str = "tiny", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=HELLO, **options)


def refusal(client: openai.OpenAI, model: str = "tiny", **options: Any) -> openai.APIStatusError:
    """The error of a question."""
    with pytest.raises(openai.APIStatusError) as refused:
        say_hello(client, model, **options)
    body: Any = refused.value.body
    assert body["message"].endswith("."), body
    return refused.value


def status_and_code(error: openai.APIStatusError) -> tuple[int, str | None]:
    return error.status_code, error.code


class TestAnswer:
    def test_base_model_that_the_engine_serves_is_answered_without_a_serving_run(
        self, client: openai.OpenAI, engine: Engine, vllm: VllmServer
    ) -> None:
        answer = say_hello(client, n=2, stop=["x"], seed=3, top_p=0.9, max_completion_tokens=9)
        assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11
        }  # fmt: skip
        assert answer.model == "tiny" and answer.id.startswith("chatcmpl-") and "engine" not in answer.id
        assert vllm.bodies_of(CHAT) == [
            {
                "model": "tiny", "messages": HELLO, "n": 2, "stop": ["x"], "seed": 3, "temperature": 1.0, "top_p": 0.9,
                "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
            }
        ]  # fmt: skip
        assert serving_runs(engine) == []

    def test_streamed_answer_comes_piece_by_piece_with_ids_and_names_of_this_service(
        self, client: openai.OpenAI, vllm: VllmServer
    ) -> None:
        # Line ends to many readers of lines, which a token may have.
        vllm.texts = ("a", "\u2028\x85 b", "c")
        vllm.goes_on.clear()
        stream = say_hello(client, stream=True, stream_options={"include_usage": True})
        first = next(stream)
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "a")
        vllm.goes_on.set()
        *chunks, usage = list(stream)
        assert [it.choices[0].delta.content for it in chunks] == ["\u2028\x85 b", "c"]
        assert [it.choices[0].finish_reason for it in chunks] == [None, "stop"]
        assert usage.usage.total_tokens == 9 and {it.id for it in chunks} == {first.id} and "engine" not in first.id
        assert {it.model for it in [first, *chunks, usage]} == {"tiny"}

    def test_text_is_continued_and_tools_are_called(self, client: openai.OpenAI, vllm: VllmServer) -> None:
        for prompt in ("one", [1, 2]):
            answer = client.completions.create(model="tiny", prompt=prompt)
            assert (answer.choices[0].text, answer.object) == ("Hello", "text_completion")
        assert [(body["prompt"], body["max_tokens"]) for body in vllm.bodies_of(TEXT)] == [("one", 16), ([1, 2], 16)]
        calls = [{"index": 0, "id": "x", "type": "function", "function": {"name": "add", "arguments": ""}}]
        parts = [{"index": 0, "function": {"arguments": it}} for it in ('{"a":', " 1}")]
        second = [{"index": 1, "id": "y", "function": {"name": "sub", "arguments": "{}"}}]
        vllm.deltas = [{"tool_calls": it} for it in (calls, parts[:1], parts[1:], second)]
        vllm.finish_reason = "tool_calls"
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        choice = say_hello(client, tools=tools).choices[0]
        functions = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert functions == [("add", '{"a": 1}'), ("sub", "{}")] and choice.finish_reason == "tool_calls"
        assert vllm.bodies_of(CHAT)[-1]["tools"] == tools

    def test_role_that_most_chat_templates_do_not_know_becomes_system(
        self, client: openai.OpenAI, vllm: VllmServer
    ) -> None:
        messages: Any = [{"role": "developer", "content": "be kind"}, *HELLO]
        client.chat.completions.create(model="tiny", messages=messages)
        assert [message["role"] for message in vllm.bodies_of(CHAT)[0]["messages"]] == ["system", "user"]

    def test_comments_keep_a_stream_alive_while_the_engine_is_silent(
        self, api: ApiServer, vllm: VllmServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.05)
        vllm.goes_on.clear()
        vllm.pauses_at_start = True
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        with api.client.stream("POST", "/openai/v1/chat/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith(": ")
            vllm.goes_on.set()
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"

    @pytest.mark.parametrize("streams", [False, True])
    def test_request_to_the_engine_is_closed_with_that_of_a_client_that_goes_away(
        self, api: ApiServer, vllm: VllmServer, streams: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.1)
        vllm.goes_on.clear()
        with client_of(api, max_retries=0, timeout=1.0) as client:
            if streams:
                stream = say_hello(client, stream=True)
                next(stream)
                stream.close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    say_hello(client)
            assert vllm.abandoned.wait(30)

    def test_nothing_is_sent_for_a_parameter_that_is_not_supported_or_a_key_that_only_reads(
        self, api: ApiServer, client: openai.OpenAI, vllm: VllmServer
    ) -> None:
        error = refusal(client, logprobs=True)
        assert (error.code, error.param) == ("unsupported_parameter", "logprobs")
        with client_of(api, api.key_with(["read"])) as reader, pytest.raises(openai.PermissionDeniedError):
            say_hello(reader)
        assert vllm.bodies == []


class TestAdapter:
    def test_output_and_checkpoint_are_loaded_from_the_storage_at_the_first_question(
        self, api: ApiServer, client: openai.OpenAI, engine: Engine, vllm: VllmServer
    ) -> None:
        run_id, checkpoint_id = trained(api, engine, LORA)
        for model in (run_id, checkpoint_id, run_id):
            answer = say_hello(client, model)
            assert (answer.choices[0].message.content, answer.model) == ("Hello", model)
        storage = Storage(api.settings)
        assert vllm.bodies_of(LOAD) == [
            {"lora_name": run_id, "lora_path": str(storage.output_dir(run_id, 1))},
            {"lora_name": checkpoint_id, "lora_path": str(storage.checkpoint_dir(run_id, 1, 20))},
        ]
        assert [body["model"] for body in vllm.bodies_of(CHAT)] == [run_id, checkpoint_id, run_id]
        assert serving_runs(engine) == []

    def test_engine_that_was_started_again_loads_it_again(
        self, client: openai.OpenAI, adapter: str, vllm: VllmServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        say_hello(client, adapter)
        monkeypatch.setattr(external_engine, "FRESH_SECONDS", 60.0)
        say_hello(client, adapter)
        vllm.adapters.clear()
        assert say_hello(client, adapter).choices[0].message.content == "Hello"
        assert len(vllm.bodies_of(LOAD)) == 2 and list(vllm.adapters) == [adapter]

    def test_adapter_is_not_loaded_onto_another_base_model_with_which_the_engine_was_started_again(
        self, client: openai.OpenAI, adapter: str, vllm: VllmServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(external_engine, "FRESH_SECONDS", 60.0)
        for _ in range(2):
            say_hello(client, adapter)
        vllm.adapters.clear()
        vllm.bases = ["other"]
        assert status_and_code(refusal(client, adapter)) == (503, "engine_unavailable")
        assert len(vllm.bodies_of(LOAD)) == 1

    def test_questions_at_once_load_it_once(self, client: openai.OpenAI, adapter: str, vllm: VllmServer) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: say_hello(client, adapter), range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {"Hello"}
        assert len(vllm.bodies_of(LOAD)) == 1

    def test_adapter_that_another_process_loads_at_the_same_time_answers(
        self, client: openai.OpenAI, adapter: str, vllm: VllmServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(external_engine, "FRESH_SECONDS", 60.0)
        say_hello(client)
        vllm.adapters[adapter] = "/loaded/by/another/process"
        assert say_hello(client, adapter).choices[0].message.content == "Hello"
        assert len(vllm.bodies_of(LOAD)) == 1

    def test_engine_sees_the_storage_where_the_operator_says(
        self, api: ApiServer, engine: Engine, vllm: VllmServer, adapter: str, tmp_path: Path
    ) -> None:
        mounted = tmp_path / "mounted"
        mounted.symlink_to(api.settings.storage_root)
        settings = api.settings.model_copy(update={"engine_storage": mounted})
        with ThreadServer(settings) as other, client_of(other, max_retries=0) as client:
            assert say_hello(client, adapter).choices[0].message.content == "Hello"
        assert vllm.bodies_of(LOAD)[0]["lora_path"] == str(mounted / "runs" / adapter / "a1" / "output")

    @pytest.mark.parametrize(
        ("status", "message", "advice"),
        [
            (404, "Loading lora {name} failed: No adapter found for {path}", "ANNEAL_ENGINE_STORAGE"),
            (500, RANK, "`--max-lora-rank`"),
            (500, "LoRA is not enabled. Use --enable-lora to enable LoRA. {path}", "ANNEAL_STORAGE/runs/"),
        ],
    )
    def test_adapter_that_the_engine_does_not_load_is_refused_with_what_the_operator_has_to_do(
        self, api: ApiServer, client: openai.OpenAI, adapter: str, vllm: VllmServer,
        status: int, message: str, advice: str,
    ) -> None:  # fmt: skip
        path = Storage(api.settings).output_dir(adapter, 1)
        vllm.refuse(LOAD, status, message.format(name=adapter, path=path))
        error = refusal(client, adapter)
        assert status_and_code(error) == (503, "adapter_not_loaded") and advice in error.message
        assert str(api.settings.storage_root) not in error.message
        assert error.response.headers["x-should-retry"] == "false"

    def test_engine_that_loads_no_adapters_is_named_with_the_setting_that_allows_it(
        self, client: openai.OpenAI, adapter: str, vllm: VllmServer
    ) -> None:
        vllm.loads_adapters = False
        error = refusal(client, adapter)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in error.message and error.code == "adapter_not_loaded"
        assert say_hello(client).choices[0].message.content == "Hello"


class TestServingRun:
    def test_model_that_the_engine_does_not_serve_has_a_serving_run_that_says_why(
        self, api: ApiServer, client: openai.OpenAI, engine: Engine, vllm: VllmServer
    ) -> None:
        add_worker(engine, backends=["celery"], memory_mb=[100_000], heartbeat_at=text("now() + interval '10 min'"))
        make_model(api.settings, "other")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(say_hello, client, "other")
            with serving(api, engine) as process:
                process.write(process.next_question(), "x")
                assert answer.result(timeout=30).choices[0].message.content == "x"
        (run,) = serving_runs(engine)
        expected = "a question to its model has come, and the engine does not serve other"
        assert events_of(engine, run.id)[0].data["reason"] == expected
        assert vllm.bodies_of(CHAT) == []

    @pytest.mark.parametrize(
        ("config", "is_checkpoint", "reason"),
        [
            ({"base_model": "tiny", "method": "full"}, False, "the engine does not serve run_"),
            ({"base_model": "tiny", "method": "full"}, True, "is no adapter that an engine loads"),
            (LORA | {"use_dora": True}, False, "was trained with `use_dora`"),
            (LORA | {"modules_to_save": ["lm_head"]}, True, "was trained with `modules_to_save`"),
            (LORA | {"chat_template": "{{ messages }}"}, False, "was trained with `chat_template`"),
        ],
    )
    def test_weights_that_no_engine_loads_as_trained_need_a_serving_run_and_the_error_says_so(
        self,
        api: ApiServer,
        client: openai.OpenAI,
        engine: Engine,
        vllm: VllmServer,
        config: dict[str, Any],
        is_checkpoint: bool,
        reason: str,
    ) -> None:
        model = trained(api, engine, config)[is_checkpoint]
        with engine.begin() as connection:
            connection.execute(text("UPDATE workers SET state = 'offline'"))
        error = refusal(client, model)
        assert status_and_code(error) == (503, "no_worker") and reason in error.message
        assert vllm.bodies_of(LOAD) == vllm.bodies_of(CHAT) == []

    def test_output_that_the_engine_serves_under_its_id_needs_none(
        self, api: ApiServer, client: openai.OpenAI, engine: Engine, vllm: VllmServer
    ) -> None:
        run_id, _ = trained(api, engine, {"base_model": "tiny", "method": "full"})
        vllm.bases.append(run_id)
        assert say_hello(client, run_id).choices[0].message.content == "Hello"
        assert vllm.bodies_of(CHAT)[0]["model"] == run_id

    async def test_revision_is_part_of_the_name_that_the_engine_has_to_serve(
        self, api: ThreadServer, vllm: VllmServer
    ) -> None:
        connection = ExternalEngine(api.settings, Storage(api.settings))
        model = ServedModel({"base_model": "ada/tiny", "revision": "v2"})
        vllm.bases.append("ada/tiny")
        assert await connection.reason_not_to_answer(model) == "the engine does not serve ada/tiny@v2"
        vllm.bases.append("ada/tiny@v2")
        assert await connection.reason_not_to_answer(model) is None
        await connection.close()

    async def test_adapter_in_an_object_store_needs_one_unless_the_operator_says_where_the_engine_sees_the_store(
        self, api: ApiServer, vllm: VllmServer, tmp_path: Path
    ) -> None:
        settings = api.settings.model_copy(update={"storage": f"file://{tmp_path}", "cache": tmp_path / "cache"})
        storage, run_id = Storage.shared(settings), new_id("run")
        model = ServedModel({"base_model": "tiny"}, adapter=run_id, adapter_folder=storage.output_dir(run_id, 1))
        reason = f"{run_id} is in an object store, and ANNEAL_ENGINE_STORAGE is not set"
        for folder, expected in ((None, reason), (Path("/mnt/bucket"), None)):
            connection = ExternalEngine(settings.model_copy(update={"engine_storage": folder}), storage)
            assert await connection.reason_not_to_answer(model) == expected
            await connection.close()

    def test_model_that_does_not_exist_is_not_found(self, client: openai.OpenAI, vllm: VllmServer) -> None:
        assert status_and_code(refusal(client, "nowhere")) == (404, "model_not_found")
        vllm.adapters["of-the-operator"] = "/elsewhere"
        assert status_and_code(refusal(client, "of-the-operator")) == (404, "model_not_found")


class TestFailure:
    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize(
        ("status", "message", "param", "expected", "words"),
        [
            (400, LONG, "input_tokens", (400, "context_length_exceeded"), LONG),
            (400, "n must be 1 when using greedy sampling, got 2.", None, (400, "invalid_prompt"), "greedy sampling"),
            (401, "Unauthorized", None, (503, "engine_unavailable"), "ANNEAL_ENGINE_API_KEY"),
            (503, "Server is starting", None, (503, "engine_unavailable"), "starting"),
            (500, f"EngineCore has died; key {KEY}, redis://:pass@host", None, (503, "engine_failed"), "has died"),
        ],
    )
    def test_error_of_the_engine_has_openai_s_form_and_no_secret(
        self, client: openai.OpenAI, vllm: VllmServer, streams: bool, status: int, message: str, param: str | None,
        expected: tuple[int, str], words: str,
    ) -> None:  # fmt: skip
        vllm.refuse(CHAT, status, message, param)
        error = refusal(client, stream=streams)
        assert status_and_code(error) == expected and words in error.message
        assert KEY not in error.message and "pass" not in error.message

    def test_engine_that_cannot_be_reached_is_unavailable_and_nothing_else_answers(
        self, api: ApiServer, engine: Engine, vllm: VllmServer
    ) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        settings = api.settings.model_copy(update={"engine_url": url})
        with ThreadServer(settings) as other, client_of(other, max_retries=0) as client:
            error = refusal(client)
        assert status_and_code(error) == (503, "engine_unavailable") and url not in error.message
        assert error.response.headers["x-should-retry"] == "true" and error.response.headers["retry-after"] == "5"
        assert serving_runs(engine) == []

    def test_engine_that_refuses_the_key_or_is_no_engine_is_unavailable(
        self, client: openai.OpenAI, vllm: VllmServer
    ) -> None:
        vllm.key = "another"
        assert "ANNEAL_ENGINE_API_KEY" in refusal(client).message
        vllm.key = None
        vllm.refusals["/v1/models"] = (200, {"models": []})
        assert "in another form" in refusal(client).message

    @pytest.mark.parametrize("has_begun", [False, True])
    def test_answer_does_not_wait_for_ever_for_an_engine_that_is_silent(
        self, api: ApiServer, vllm: VllmServer, has_begun: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(external_engine, "SILENCE_SECONDS", 0.3)
        vllm.goes_on.clear()
        vllm.pauses_at_start, vllm.sends_comments = not has_begun, False
        with ThreadServer(api.settings) as other, client_of(other, max_retries=0) as client:
            error = refusal(client)
        assert status_and_code(error) == (503, "answer_interrupted" if has_begun else "engine_unavailable")
        assert has_begun or "not responded in time" in error.message

    @pytest.mark.parametrize("kind", ["cut", "failure", "abort", "no chunk"])
    def test_answer_that_breaks_off_ends_with_an_error(
        self, client: openai.OpenAI, vllm: VllmServer, kind: str
    ) -> None:
        vllm.texts = ("a", "b", "c")
        vllm.is_cut = kind == "cut"
        vllm.failure = {
            "failure": error_body(500, "Internal server error"),
            "no chunk": {"choices": "none"},
        }.get(kind)
        vllm.finish_reason = "abort" if kind == "abort" else "stop"
        code = "engine_failed" if kind == "failure" else "answer_interrupted"
        assert status_and_code(refusal(client)) == (503, code)
        stream = say_hello(client, stream=True)
        assert next(stream).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError) as broken:
            list(stream)
        assert broken.value.code == code

    def test_key_with_too_many_open_answers_is_refused(
        self, client: openai.OpenAI, vllm: VllmServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(external_engine, "MOST_OPEN", 4)
        vllm.goes_on.clear()
        stream = say_hello(client, stream=True)
        assert status_and_code(refusal(client)) == (429, "too_many_questions")
        vllm.goes_on.set()
        list(stream)
        assert say_hello(client).choices[0].message.content == "Hello"


class TestSettings:
    def test_invalid_ones_are_refused_without_showing_a_key(self) -> None:
        for invalid in (
            {"engine_url": "vllm:8000"},
            {"engine_url": "http://hunter2@vllm:8000"},
            {"engine_url": "http://vllm?key=hunter2"},
            {"engine_api_key": "hunter2\r\nX-Other: 1"},
            {"engine_storage": "storage"},
        ):
            with pytest.raises(ValidationError) as refused:
                Settings(**invalid)
            (error,) = refused.value.errors()
            assert "hunter2" not in error["msg"] and error["loc"] == tuple(invalid)
        assert "hunter2" not in repr(Settings(engine_url="http://vllm:8000/v1", engine_api_key="hunter2"))
