"""Answers over OpenAI's API: what its client gets, and what becomes of questions when runs and workers vanish."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest
from redis import Redis
from sqlalchemy import Engine, text

from app.infra.ids import new_id
from app.infra.question_streams import PIECES, REPLY, alive_key, questions_stream
from app.openai import questions
from app.runs.state import machine
from tests.factories import Trainer, count_runs
from tests.openai.conftest import client_of
from tests.openai.serving import prepare_models, serving, serving_runs, trained
from tests.rows import add_run, events_of, run_row
from tests.server import ApiServer
from tests.waiting import eventually

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at runs more often than every second."""
    monkeypatch.setattr(questions, "_WATCH_SECONDS", 0.1)


@pytest.fixture
def client(emptied_api: ApiServer, engine: Engine) -> Iterator[openai.OpenAI]:
    """A client without retries of its own, of a service with a worker and a base model."""
    prepare_models(emptied_api, engine)
    with client_of(emptied_api, max_retries=0) as client:
        yield client


Ask = Callable[..., "Future[Any]"]


@pytest.fixture
def ask(client: openai.OpenAI) -> Iterator[Ask]:
    """Asks in a thread; returns the future answer."""
    with ThreadPoolExecutor(16) as pool:

        def ask(model: str = "tiny", **options: Any) -> "Future[Any]":
            call = client.completions if "prompt" in options else client.chat.completions
            more = options if "prompt" in options else {"messages": HELLO, **options}
            return pool.submit(lambda: call.create(model=model, **more))

        yield ask


def chunks_of(answer: "Future[Any]") -> list[Any]:
    return list(answer.result(timeout=30))


def refused(answer: "Future[Any]") -> tuple[int, str]:
    """Status and code of the error of an answer."""
    error = answer.exception(timeout=30)
    assert isinstance(error, openai.APIStatusError), error
    body: Any = error.body
    assert body["message"].endswith((".", "!")), body
    return error.status_code, body["code"]


class TestAnswer:
    def test_first_question_creates_a_serving_run_that_answers_and_that_further_ones_share(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        first = [ask(temperature=0, stop=["x"], max_completion_tokens=9, seed=3), ask(max_tokens=4)]
        with serving(emptied_api, engine) as process:
            for _ in first:
                process.write(process.next_question(), "Hel", "lo")
            whole = first[0].result(timeout=30)
            assert whole.choices[0].message.content == "Hello" and whole.choices[0].finish_reason == "stop"
            assert whole.usage.model_dump(exclude_none=True) == {
                "prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9
            }  # fmt: skip
            assert (whole.object, whole.model) == ("chat.completion", "tiny") and whole.id.startswith("chatcmpl-")
            further = ask()
            process.write(process.next_question(), "again", end="length")
            assert further.result(timeout=30).choices[0].finish_reason == "length"
        (run,) = serving_runs(engine)
        assert (run.priority, run.dataset_id, run.base_run_id, run.backend) == (-1001, None, None, "celery")
        shown = emptied_api.client.get("/v1/runs", params={"task": "serve"}).json()["data"]
        assert [(it["id"], it["task"], it["base_model"], it["dataset_id"]) for it in shown] == [
            (run.id, "serve", "tiny", None)
        ]
        assert emptied_api.client.get(f"/v1/runs/{run.id}").json()["status"] == "running"
        assert emptied_api.client.get("/v1/runs", params={"sort": "best"}).json()["data"] == []
        assert events_of(engine, run.id)[0].data["reason"] == "a question to its model has come"
        with engine.connect() as connection:
            audited = connection.execute(
                text("SELECT route, resource FROM audit_log WHERE route LIKE '/openai%'")
            ).all()
        assert [tuple(row) for row in audited] == [("/openai/v1/chat/completions", run.id)]

    def test_question_reaches_the_process_as_it_was_asked(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        answer = ask(messages=parts, tools=tools, temperature=0.5, top_p=0.9, stop="x", seed=3, n=2, max_tokens=5)
        with serving(emptied_api, engine) as process:
            question = process.next_question()
            assert question.pop("created_at") > 0 and question.pop("id")
            assert question == {
                "messages": [{"role": "user", "content": "ab"}], "tools": tools, "temperature": 0.5, "top_p": 0.9,
                "stop": ["x"], "seed": 3, "n": 2, "max_tokens": 5, "folder": None,
            }  # fmt: skip
            process.relay.publish([])
            again = ask(messages=parts, tools=tools, n=2)
            question = process.next_question()
            process.write(question, "b", choice=1, end="tool_calls", tool_calls=[{"name": "add", "arguments": "{}"}])
            process.write(question, "a")
            first, second = again.result(timeout=30).choices
            assert (first.message.content, first.message.tool_calls) == ("a", None)
            assert (second.finish_reason, second.message.tool_calls[0].function.name) == ("tool_calls", "add")
            process.trainer.fail()
            assert refused(answer) == (503, "serving_failed")

    def test_streamed_answer_comes_piece_by_piece_with_its_usage(
        self, emptied_api: ApiServer, engine: Engine, client: openai.OpenAI, ask: Ask
    ) -> None:
        streaming = ask(stream=True, stream_options={"include_usage": True}, n=2)
        with serving(emptied_api, engine) as process:
            question = process.next_question()
            process.write(question, "a", end=None)
            stream = streaming.result(timeout=30)
            assert next(stream).choices[0].delta.content == "a"
            process.write(question, "x", choice=1)
            process.write(question, "b")
            *chunks, usage = list(stream)
        shown = [(it.choices[0].index, it.choices[0].delta.content, it.choices[0].finish_reason) for it in chunks]
        assert shown == [(1, "x", "stop"), (0, "b", "stop")]
        assert {it.usage for it in chunks} == {None} and not usage.choices and usage.usage.completion_tokens == 3

    def test_text_is_continued_as_a_text_or_as_tokens(self, emptied_api: ApiServer, engine: Engine, ask: Ask) -> None:
        answer = ask(prompt="one")
        with serving(emptied_api, engine) as process:
            many = list(range(11_000))
            for sent, received in (("one", "one"), (["two"], "two"), ([1, 2], [1, 2]), (many, many)):
                answer = answer if sent == "one" else ask(prompt=sent)
                question = process.next_question()
                assert (question["prompt"], question["max_tokens"]) == (received, 16)
                process.write(question, "x", "y")
                whole = answer.result(timeout=30)
                assert (whole.object, whole.choices[0].text, whole.usage.total_tokens) == (
                    "text_completion",
                    "xy",
                    9,
                )
            answer = ask(prompt="one", stream=True)
            process.write(process.next_question(), "x", "y")
            chunks = chunks_of(answer)
        assert [(it.object, it.choices[0].text, it.choices[0].finish_reason) for it in chunks] == [
            ("text_completion", "x", None), ("text_completion", "y", "stop")
        ]  # fmt: skip

    def test_comments_keep_a_stream_alive_until_the_model_is_loaded(
        self, emptied_api: ApiServer, engine: Engine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.05)
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        with emptied_api.client.stream("POST", "/openai/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert next(lines) == ": the model is not ready yet"
            assert answer.headers["x-anneal-run"] == serving_runs(engine)[0].id
            with serving(emptied_api, engine) as process:
                process.write(process.next_question(), "a")
                data = [line for line in lines if line.startswith("data: ")]
        assert len(data) == 2 and data[-1] == "data: [DONE]"


class TestModel:
    def test_adapters_on_one_base_share_its_serving_run_and_models_that_are_none_beside_others_have_their_own(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        lora = {"base_model": "tiny", "method": "lora", "lora_r": 8, "learning_rate": 1e-3}
        models = []
        for name, config in (
            ("first", lora),
            ("second", lora | {"lora_r": 4}),
            ("whole", {"base_model": "tiny", "method": "full"}),
            ("tokens", lora | {"trainable_token_indices": [3]}),
        ):
            models.append(trained(emptied_api, engine, config, name))
        (first, saved), (second, _), (whole, whole_saved), (tokens, tokens_saved) = models
        answer = ask(first)
        with serving(emptied_api, engine) as process:
            for model, adapter in ((None, first), (second, second), ("first", first), (saved, saved), ("tiny", None)):
                answer = ask(model) if model else answer
                question = process.next_question()
                assert (question.get("adapter"), question["folder"]) == (adapter, adapter and f"/adapters/{adapter}")
                process.write(question, "x")
                answer.result(timeout=30)
            expected = {
                whole: (whole, whole, None, None),
                whole_saved: ("tiny", None, whole_saved, whole),
                tokens: ("tiny", tokens, None, None),
                tokens_saved: ("tiny", None, tokens_saved, tokens),
            }
            for number, model in enumerate((whole_saved, *expected), start=1):
                answer = ask(model)
                run = eventually(
                    lambda count=number: serving_runs(engine)[count:], what="a serving run of the whole model"
                )[-1]
                weights = (run.base_model, run.base_run_id, run.resume_checkpoint_id, run.parent_run_id)
                assert weights == expected[model]
                assert emptied_api.client.post(f"/v1/runs/{run.id}/stop").status_code == 202
                assert refused(answer) == (503, "serving_stopped")

    def test_model_that_does_not_exist_or_cannot_answer_is_refused_and_nothing_is_created(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        judge, _ = trained(
            emptied_api, engine, {"base_model": "tiny", "method": "reward", "lora_r": 8}, "judge", "preference"
        )
        live = add_run(engine, backend="celery", config={"base_model": "tiny", "lora_r": 8}).id
        before = count_runs(engine)
        for model, status, code in (
            ("nowhere", 404, "model_not_found"),
            (new_id("run"), 404, "model_not_found"),
            (new_id("ckpt"), 404, "model_not_found"),
            (live, 400, "run_without_output"),
            (judge, 400, "reward_model"),
            (add_run(engine).id, 400, "not_a_model"),
            ("../tiny", 404, "model_not_found"),
        ):
            assert refused(ask(model)) == (status, code), model
        assert count_runs(engine) == before + 1

    def test_without_a_worker_that_could_take_it_the_reason_comes_at_once(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE workers SET state = 'offline'"))
        for stream in (False, True):
            assert refused(ask(stream=stream)) == (503, "no_worker")
        assert serving_runs(engine) == []

    def test_key_of_a_reader_asks_nothing(self, emptied_api: ApiServer, engine: Engine, client: openai.OpenAI) -> None:
        with (
            client_of(emptied_api, emptied_api.key_with(["read"])) as reader,
            pytest.raises(openai.PermissionDeniedError),
        ):
            reader.chat.completions.create(model="tiny", messages=HELLO)
        assert serving_runs(engine) == []


class TestParameters:
    @pytest.mark.parametrize(
        ("options", "code", "param"),
        [
            ({"frequency_penalty": 0.5}, "unsupported_parameter", "frequency_penalty"),
            ({"logprobs": True}, "unsupported_parameter", "logprobs"),
            ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
            ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
            ({"user": "me"}, "unsupported_parameter", "user"),
            ({"extra_body": {"top_k": 4}}, "unknown_parameter", "top_k"),
            ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid", "max_tokens"),
            ({"temperature": 3}, "less_than_equal", "temperature"),
            ({"n": 0}, "greater_than_equal", "n"),
            ({"stop": ["a"] * 5}, "invalid_request", None),
            ({"messages": []}, "too_short", "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "literal_error", "messages.0.role"),
            ({"prompt": ["a", "b"]}, "invalid", "prompt"),
            ({"prompt": [*range(11_000), *["x"] * 1000]}, "invalid_request", None),
        ],
    )
    def test_unsupported_or_invalid_one_is_refused_by_name(
        self, ask: Ask, options: dict[str, Any], code: str, param: str | None
    ) -> None:
        error = ask(**options).exception(timeout=30)
        assert isinstance(error, openai.BadRequestError)
        assert error.code == code and (param is None or error.param == param), error.body

    def test_default_of_an_unsupported_one_changes_nothing(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        answer = ask(
            frequency_penalty=0, logit_bias={}, tool_choice="auto", response_format={"type": "text"}, user=None
        )
        with serving(emptied_api, engine) as process:
            process.write(process.next_question(), "x")
            assert answer.result(timeout=30).choices


class TestEnd:
    def test_error_of_the_model_is_that_of_the_answer(self, emptied_api: ApiServer, engine: Engine, ask: Ask) -> None:
        answer = ask()
        with serving(emptied_api, engine) as process:
            process.fail(process.next_question(), "context_length_exceeded")
            assert refused(answer) == (400, "context_length_exceeded")
            answer = ask(stream=True)
            question = process.next_question()
            process.write(question, "a", end=None)
            stream = answer.result(timeout=30)
            next(stream)
            process.fail(question, "internal")
            with pytest.raises(openai.APIError, match="It cannot be answered"):
                next(stream)

    def test_piece_of_a_worker_of_another_version_ends_the_answer_with_an_error(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        answer = ask()
        with serving(emptied_api, engine) as process, Redis.from_url(emptied_api.settings.redis_url or "") as redis:
            piece = {"question_id": process.next_question()["id"], "text": "x", "is_new": True}
            replies = emptied_api.application.state.questions._replies  # type: ignore[attr-defined]
            redis.xadd(replies, {PIECES: json.dumps([piece])})
            assert refused(answer) == (503, "serving_failed")
            assert process.next_cancelled() == piece["question_id"]

    def test_more_questions_than_a_run_may_have_open_are_refused(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        open_questions = emptied_api.application.state.questions  # type: ignore[attr-defined]
        before, open_questions.most_open = open_questions.most_open, 1
        try:
            first = ask()
            with serving(emptied_api, engine) as process:
                question = process.next_question()
                error = ask().exception(timeout=30)
                assert isinstance(error, openai.RateLimitError) and error.response.headers["retry-after"] == "5"
                process.write(question, "x")
                first.result(timeout=30)
                later = ask()
                process.write(process.next_question(), "x")
                later.result(timeout=30)
        finally:
            open_questions.most_open = before

    def test_key_has_a_part_of_the_answers_of_a_model_and_another_key_is_answered(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(emptied_api.application.state.questions, "most_open", 12)  # type: ignore[attr-defined]
        other = emptied_api.client.post("/v1/keys", json={"name": "other", "scopes": ["read", "write"]}).json()
        ask(n=2)
        with serving(emptied_api, engine) as process, client_of(emptied_api, other["key"], max_retries=0) as client:
            first = process.next_question()
            assert refused(ask(n=2)) == (429, "too_many_questions")
            last = ask()
            second = process.next_question()
            assert refused(ask()) == (429, "too_many_questions")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(lambda: client.chat.completions.create(model="tiny", messages=HELLO))
                process.write(process.next_question(), "x")
                assert answer.result(timeout=30).choices
            process.write(second, "x")
            last.result(timeout=30)
            for choice in range(2):
                process.write(first, "x", choice=choice)

    @pytest.mark.parametrize("streams", [False, True])
    def test_question_to_a_run_that_stays_behind_others_ends_with_what_to_do(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask, streams: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "_PENDING_SECONDS", 0.3)
        answer = ask(stream=streams)
        error = answer.exception(timeout=30)
        assert isinstance(error, openai.APIStatusError) and "`anneal runs list`" in str(error), error
        assert refused(answer) == (503, "serving_waits") and error.response.headers["retry-after"] == "5"

    def test_question_that_the_worker_of_a_running_run_does_not_take_ends(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "_UNSERVED_SECONDS", 0.3)
        answer = ask()
        (run,) = eventually(lambda: serving_runs(engine), what="a serving run")
        Trainer(engine, run.id).begin(total=None)
        assert refused(answer) == (503, "serving_lost")

    @pytest.mark.parametrize("streams", [False, True])
    def test_client_that_goes_away_frees_its_place(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask, streams: bool
    ) -> None:
        first = ask()
        with serving(emptied_api, engine) as process:
            process.write(process.next_question(), "x")
            first.result(timeout=30)
            if streams:
                answer = ask(stream=True)
                question = process.next_question()
                process.write(question, "a", end=None)
                stream = answer.result(timeout=30)
                next(stream)
                stream.close()
            else:
                with (
                    client_of(emptied_api, max_retries=0, timeout=1.0) as client,
                    pytest.raises(openai.APITimeoutError),
                ):
                    client.chat.completions.create(model="tiny", messages=HELLO)
                question = process.next_question()
                process.write(question, "a", end=None)
            assert process.next_cancelled() == question["id"]

    def test_question_that_nobody_takes_is_forgotten_with_its_client(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.2)
        with client_of(emptied_api, max_retries=0, timeout=1.0) as client, pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="tiny", messages=HELLO)
        (run,) = serving_runs(engine)
        with Redis.from_url(emptied_api.settings.redis_url or "") as redis:
            eventually(lambda: redis.xlen(questions_stream(run.id)) == 0, what="the question is removed")

    def test_stop_of_the_run_ends_its_questions_and_the_next_one_starts_another_run(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        answer = ask()
        with serving(emptied_api, engine) as process:
            process.next_question()
            run_id = process.trainer.run_id
            assert emptied_api.client.post(f"/v1/runs/{run_id}/stop").status_code == 202
            assert refused(answer) == (503, "serving_stopped")
            process.trainer.cancel()
        answer = ask()
        with serving(emptied_api, engine) as process:
            assert process.trainer.run_id != run_id
            process.write(process.next_question(), "x")
            answer.result(timeout=30)


class TestSharing:
    def test_serving_run_belongs_to_no_key_and_keeps_its_priority(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE api_keys SET max_devices = 0"))
        answer = ask()
        (run,) = eventually(lambda: serving_runs(engine), what="a serving run")
        refusal = emptied_api.client.patch(f"/v1/runs/{run.id}", json={"priority": 9, "name": "x"})
        assert (refusal.status_code, refusal.json()["code"]) == (409, "priority_is_fixed")
        assert emptied_api.client.patch(f"/v1/runs/{run.id}", json={"name": "x"}).json()["priority"] == -1001
        with serving(emptied_api, engine) as process:  # claimed in spite of the quota of the key that asks
            process.write(process.next_question(), "x")
            answer.result(timeout=30)
        assert run.created_by is None
        usage = emptied_api.client.get("/v1/usage")
        assert usage.status_code == 200, usage.text


class TestLoss:
    def test_question_to_a_run_that_has_just_ended_is_asked_again(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        answer = ask()
        (run,) = eventually(lambda: serving_runs(engine), what="a serving run")
        trainer = Trainer(engine, run.id).begin(total=None)
        trainer._do(machine.complete(run.id, trainer.lease_epoch, None, "idle"))
        with serving(emptied_api, engine) as process:
            assert process.trainer.run_id != run.id
            process.write(process.next_question(), "x")
            assert answer.result(timeout=30).choices[0].message.content == "x"

    def test_attempt_that_is_lost_costs_begun_answers_alone(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        begun, waiting = ask(seed=1), None
        with serving(emptied_api, engine) as process:
            process.write(process.next_question(), "a", end=None)
            waiting = ask(seed=2)
            assert process.next_question()["seed"] == 2
            run_id, epoch = process.trainer.run_id, process.trainer.lease_epoch
        process.trainer._do(machine.retry(run_id, epoch, "lost", 0.0))
        assert refused(begun) == (503, "answer_interrupted")
        with serving(emptied_api, engine, run_id) as process:
            question = process.next_question()
            assert question["seed"] == 2
            process.write(question, "x")
            assert waiting.result(timeout=30).choices[0].message.content == "x"
        assert run_row(engine, run_id).attempt == 2

    def test_worker_that_is_gone_without_a_word_is_noticed_before_its_lease_ends(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        answer = ask(stream=True)
        with serving(emptied_api, engine) as process:
            process.write(process.next_question(), "a", end=None)
            stream = answer.result(timeout=30)
            next(stream)
            # A worker that was killed renews its sign of life no more.
            over = threading.Event()
            with Redis.from_url(emptied_api.settings.redis_url or "") as redis, ThreadPoolExecutor(1) as pool:
                key = alive_key(process.trainer.run_id)
                pool.submit(lambda: [redis.delete(key) for _ in iter(lambda: over.wait(0.005), True)])
                try:
                    with pytest.raises(openai.APIError, match="was lost before its end"):
                        next(stream)
                finally:
                    over.set()

    def test_answers_arrive_in_a_new_stream_whose_ids_are_smaller_since_a_clock_was_set_back(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        asking = emptied_api.application.state.questions  # type: ignore[attr-defined]
        answer = ask()
        with (
            serving(emptied_api, engine) as process,
            Redis.from_url(emptied_api.settings.redis_url or "", decode_responses=True) as redis,
        ):
            question = process.next_question()
            redis.xadd(asking._replies, {REPLY: ""}, id="99999999999999-0")  # those that follow have greater ones
            process.write(question, "x")
            answer.result(timeout=30)
            eventually(lambda: not asking._has_open.is_set(), what="the reader sleeps")
            redis.delete(asking._replies)  # as it expires
            answer = ask()
            process.write(process.next_question(), "again")
            assert answer.result(timeout=30).choices[0].message.content == "again"

    def test_redis_that_is_lost_costs_begun_answers_alone(
        self, emptied_api: ApiServer, engine: Engine, ask: Ask
    ) -> None:
        begun = ask(seed=1)
        with serving(emptied_api, engine) as process:
            process.write(process.next_question(), "a", end=None)
            waiting = ask(seed=2)
            assert process.next_question()["seed"] == 2
            with Redis.from_url(emptied_api.settings.redis_url or "") as redis:
                for connection in redis.client_list():
                    if (
                        "xread" in connection["cmd"]
                        and int(connection["db"]) == redis.connection_pool.connection_kwargs["db"]
                    ):
                        redis.client_kill(connection["addr"])
            assert refused(begun) == (503, "answer_interrupted")
            question = process.next_question()
            assert question["seed"] == 2
            process.write(question, "x")
            assert waiting.result(timeout=30).choices[0].message.content == "x"
