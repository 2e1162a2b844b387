"""Rewards that a service gives: within limits, repeated after failures, only from allowed hosts, never 0 in silence."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from anneal.contracts.rewards import HttpReward, RewardHost
from tests.ports import free_port
from tests.worker.training.reward_services.service import Reply, RewardService, length_scores, reward_service
from worker.training.failures import Stopped, TrainingFailure
from worker.training.reward_services import service_client
from worker.training.reward_services.scoring_service import ScoringService
from worker.training.reward_services.service_client import CallContext

KEY = "sk-key-of-ada-0123456789"
FAILS = Reply({"error": "overloaded"}, 503)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(service_client, "_BEAT_SECONDS", 0.05)


@pytest.fixture
def service() -> Iterator[RewardService]:
    with reward_service(length_scores) as service:
        yield service


Scorer = Callable[..., ScoringService]


@pytest.fixture
def scorer(service: RewardService) -> Scorer:
    """A function that creates a scorer of the service, or of another URL."""

    def create(
        url: str = service.url,
        hosts: Sequence[RewardHost] | None = None,
        context: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ScoringService:
        values = {"type": "http", "url": url, "rows_per_request": 1, "timeout_seconds": 5.0, **fields}
        if hosts is None:
            hosts = [RewardHost(name="127.0.0.1", port=httpx.URL(url).port, is_private=True)]
        return ScoringService(HttpReward.model_validate(values), "http", CallContext(hosts, **(context or {})))

    return create


def score(scorer: ScoringService, *completions: str) -> list[float | None]:
    return scorer(prompts=["?"] * len(completions), completions=list(completions), rows=[[1]] * len(completions))


def test_rows_are_posted_in_batches_and_scored_in_order(service: RewardService, scorer: Scorer) -> None:
    chat = [{"role": "user", "content": "why"}]
    function = scorer(rows_per_request=2)
    scores = function(
        prompts=[chat] * 5,
        completions=[[{"role": "assistant", "content": "a" * length}] for length in (3, 1, 2, 5, 4)],
        answer=["because", None, "x", "y", "z"],
        completion_ids=[[0]] * 5,
    )
    assert scores == [3, 1, 2, 5, 4]
    assert sorted(len(call.json["rows"]) for call in service.calls) == [1, 2, 2]
    (first,) = [call.json for call in service.calls if call.json["rows"][0]["reference"] == "because"]
    assert first == {
        "rows": [
            {"prompt": chat, "completion": "aaa", "reference": "because"},
            {"prompt": chat, "completion": "a", "reference": None},
        ]
    }
    assert function.take_usage() == {
        "reward_calls": 3, "reward_prompt_tokens": 0, "reward_completion_tokens": 0, "reward_missing": 0,
    }  # fmt: skip
    assert function.take_usage()["reward_calls"] == 0


def test_no_more_calls_are_made_at_a_time_than_the_reward_says(service: RewardService, scorer: Scorer) -> None:
    two, most, active = threading.Barrier(2), 0, 0

    def answer(body: Any) -> Any:
        nonlocal active, most
        with service.lock:
            active += 1
            most = max(most, active)
        two.wait(10)  # it breaks if the other call comes only after this one
        with service.lock:
            active -= 1
        return length_scores(body)

    service.answer = answer
    assert score(scorer(concurrency=2), *["ab"] * 6) == [2] * 6
    assert most == 2


@pytest.mark.parametrize(
    "replies", [[FAILS, FAILS], [Reply(status=429), Reply(status=408)], [Reply(b"", 500)]], ids=["503", "4xx", "500"]
)
def test_failures_that_may_pass_are_repeated_and_counted(
    replies: list[Reply], service: RewardService, scorer: Scorer
) -> None:
    service.replies = list(replies)
    function = scorer()
    assert score(function, "abc") == [3]
    assert function.take_usage()["reward_calls"] == len(replies) + 1


def test_no_call_is_made_before_the_moment_that_a_rate_limited_service_names(
    service: RewardService, scorer: Scorer
) -> None:
    held, beats = threading.Event(), 0

    def alive() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:  # the first row waits by then
            held.set()

    service.replies = [Reply(status=429, headers={"retry-after": "0.6"}), Reply({"scores": [2]}, held_by=held)]
    function = scorer(concurrency=2, context={"alive": alive})
    assert score(function, "ab", "ab", "abc") == [2, 2, 3]
    first, _, *others = [call.moment for call in service.calls]
    assert len(others) == 2 and min(others) - first >= 0.6


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7, 7), ("0.5", 0.5, 0.5), ("100000", 120, 120), ("-1", 0, 0), ("nan", 0, 0), ("soon", 0, 0), ("", 0, 0),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 120, 120), ("Fri, 01 Jan 2021 00:00:00 GMT", 0, 0),
    ],
    ids=["seconds", "fraction", "long", "negative", "nan", "text", "empty", "date", "past"],
)  # fmt: skip
def test_pause_is_a_number_of_seconds_or_a_date_within_limits(header: str, least: float, most: float) -> None:
    assert least <= service_client._pause_seconds(header) <= most


def test_service_that_does_not_answer_in_time_is_called_again(service: RewardService, scorer: Scorer) -> None:
    held = threading.Event()
    service.replies = [Reply({"scores": [9]}, held_by=held)]
    beats: list[float] = []
    try:
        assert score(scorer(timeout_seconds=0.3, context={"alive": lambda: beats.append(0)}), "abc") == [3]
    finally:
        held.set()
    assert len(service.calls) == 2 and len(beats) > 1


@pytest.mark.parametrize(
    "body",
    [
        b"<html>", b"[" * 5000, {"scores": [1, 2]}, {"scores": "1"}, [1], {"scores": ["7"]}, {"scores": [True]},
        b'{"scores": [NaN]}', b'{"scores": [1e400]}', {"scores": [10**20]}, b'{"scores": [1' + b" " * 2**20 + b"]}",
    ],
    ids=["html", "deep", "two", "text", "list", "quoted", "true", "nan", "infinite", "huge", "long"],
)  # fmt: skip
def test_response_without_scores_is_requested_once_more_and_then_the_score_is_missing(
    body: Any, service: RewardService, scorer: Scorer
) -> None:
    service.replies = [Reply(body)]
    warnings: list[str] = []
    function = scorer(context={"warn": warnings.append})
    assert score(function, "abc") == [3] and warnings == []
    service.replies = [Reply(body), Reply(body)]
    assert score(function, "abc") == [None]
    assert function.take_usage() == {
        "reward_calls": 4, "reward_prompt_tokens": 0, "reward_completion_tokens": 0, "reward_missing": 1,
    }  # fmt: skip
    (warning,) = warnings
    assert warning.startswith("Reward `http` is missing for 1 of the completions so far, which are left out: ")


def test_row_that_a_service_refuses_or_gives_null_has_no_score_and_is_not_sent_again(
    service: RewardService, scorer: Scorer
) -> None:
    service.replies = [Reply({"error": "too long"}, 400), Reply({"scores": [None]})]
    assert score(scorer(concurrency=1), "a", "ab", "abc") == [None, None, 3]
    assert len(service.calls) == 3


def test_run_fails_once_too_many_of_the_last_scores_are_missing(service: RewardService, scorer: Scorer) -> None:
    service.answer = lambda body: {"scores": [None if row["completion"] == "?" else 1 for row in body["rows"]]}
    function = scorer(rows_per_request=10)
    assert score(function, *["?"] * 10) == [None] * 10
    assert score(function, *["a"] * 90) == [1] * 90
    assert score(function, *["?"] * 20) == [None] * 20  # the first ten are not among the last 100 any more
    with pytest.raises(TrainingFailure, match="missing for 21 of the last 100 completions: the service") as failed:
        score(function, "?")
    assert failed.value.code == "reward_unavailable"


def test_service_that_cannot_be_reached_fails_the_run_with_its_last_error(scorer: Scorer) -> None:
    function = scorer(f"http://127.0.0.1:{free_port()}/score")
    with pytest.raises(TrainingFailure, match=r"missing for 11 of the last 11 completions: 127\.0\.0\.1 could not be"):
        score(function, *["a"] * 11)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=302, headers={"location": "http://127.0.0.1:1/metadata"}), "redirects are not followed"),
        (Reply({"error": "no key"}, 401), "the operator names its secret in ANNEAL_REWARD_HOSTS"),
        (Reply({"error": "no such path"}, 404), "status 404: .*no such path.* Correct the reward"),
    ],
    ids=["redirect", "key", "path"],
)
def test_failure_that_every_call_would_have_fails_the_run_at_once(
    reply: Reply, says: str, service: RewardService, scorer: Scorer
) -> None:
    service.replies = [reply]
    with pytest.raises(TrainingFailure, match=says) as failed:
        score(scorer(concurrency=1), "a", "b", "c")
    assert failed.value.code == "reward_unavailable" and len(service.calls) < 3


def test_key_is_a_bearer_token_of_its_host_alone_and_in_no_message(
    service: RewardService, scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = RewardHost(name="127.0.0.1", port=service.port, is_private=True, secret="judge_key")
    other = RewardHost(name="scores.example.com", secret="other_key")
    monkeypatch.setenv("ANNEAL_REWARD_KEY_JUDGE_KEY", KEY)
    keys = service_client.take_keys([host, other])
    assert service_client.take_keys([host, other]) == {}, "processes that this one starts inherit it"
    context = {"keys": keys}
    assert score(scorer(hosts=[other, host], context=context), "abc") == [3]
    assert service.calls[0].headers["authorization"] == f"Bearer {KEY}"
    service.replies = [Reply({"error": f"{KEY} has expired"}, 401)]
    with pytest.raises(TrainingFailure, match="anneal secrets set judge_key") as failed:
        score(scorer(hosts=[other, host], context=context), "abc")
    assert KEY not in failed.value.message and "[redacted] has expired" in failed.value.message
    assert KEY not in repr(CallContext([host], **context))
    assert score(scorer(context=context), "abc") == [3]
    assert "authorization" not in service.calls[-1].headers
    with pytest.raises(TrainingFailure, match="anneal secrets set judge_key"):
        scorer(hosts=[host])


def test_host_that_the_operator_does_not_allow_is_not_called(service: RewardService, scorer: Scorer) -> None:
    public = [RewardHost(name=name, port=service.port) for name in ("localhost", "127.0.0.1")]
    for url, says in (
        (service.url.replace("127.0.0.1", "127.0.0.2"), f"calls 127.0.0.2:{service.port}, which is not allowed"),
        (
            service.url.replace("127.0.0.1", "127.0.0.1.example.com"),
            f"127.0.0.1.example.com:{service.port}, which is not allowed",
        ),
        (f"https://127.0.0.1:{service.port + 1}/score", f"calls 127.0.0.1:{service.port + 1}, which is not allowed"),
        ("https://127.0.0.1/score", "calls 127.0.0.1, which is not allowed"),
        (service.url, "is not encrypted: use https://"),
    ):
        with pytest.raises(TrainingFailure, match=says) as refused:
            scorer(url, hosts=public)
        assert refused.value.code == "config_error"
    for host in ("localhost", "127.0.0.1"):
        function = scorer(f"https://{host}:{service.port}/score", hosts=public)
        with pytest.raises(TrainingFailure, match=r"private network address.*ANNEAL_REWARD_PRIVATE_HOSTS"):
            score(function, "a")
    assert service.calls == []


def test_stop_ends_calls_at_once(service: RewardService, scorer: Scorer) -> None:
    def stop() -> None:
        raise Stopped

    held = threading.Event()
    service.replies = [Reply(held_by=held)]
    try:
        with pytest.raises(Stopped):
            score(scorer(context={"alive": stop}), "a", "b")
    finally:
        held.set()


def test_failed_calls_are_not_repeated_once_the_run_is_to_stop(service: RewardService, scorer: Scorer) -> None:
    service.replies = [FAILS] * 12
    function = scorer(context={"is_stopping": lambda: True})
    assert score(function, *["a"] * 12) == [None] * 12
    assert len(service.calls) == 12


def test_pauses_do_not_draw_from_the_generator_that_decides_about_training(
    service: RewardService, scorer: Scorer
) -> None:
    service.replies = [FAILS]
    before = random.getstate()
    assert score(scorer(), "a") == [1]
    assert random.getstate() == before and len(service.calls) == 2
