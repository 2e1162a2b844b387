"""Webhooks as OpenAI's client creates and changes them, whose events it verifies and unwraps."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from sqlalchemy import Engine

from tests.app.uploads import lines
from tests.app.webhooks.conftest import receiver, shared_api, shared_engine  # noqa: F401
from tests.app.webhooks.receiver import Message, Receiver
from tests.app.webhooks.rows import end_run
from tests.factories import Trainer
from tests.openai.conftest import async_client_of, client_of
from tests.openai.proxy import losing_answers
from tests.openai.test_files import CHAT, upload
from tests.openai.test_guide import PROGRAMS
from tests.openai.test_jobs import Jobs, newest_run
from tests.server import ApiServer

SUCCEEDED, FAILED, CANCELLED = (f"fine_tuning.job.{status}" for status in ("succeeded", "failed", "cancelled"))
TYPES: Any = [SUCCEEDED, FAILED, CANCELLED]


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def client(api: ApiServer) -> Iterator[openai.OpenAI]:
    with client_of(api) as client:
        yield client


@pytest.fixture
def jobs(client: openai.OpenAI) -> Jobs:
    return Jobs(client, upload(client, lines(CHAT)).id)


@pytest.fixture
def create(client: openai.OpenAI, receiver: Receiver) -> Callable[[str], Any]:  # noqa: F811
    def create(name: str, event_types: Any = TYPES) -> Any:
        return client.webhooks.create(name=name, url=f"{receiver.url}/{name}", event_types=event_types)

    return create


def unwrap(client: openai.OpenAI, message: Message, secret: str) -> tuple[str, str]:
    """The type of an event and the id of its job, as the client reads it; it must be signed with the secret."""
    event: Any = client.webhooks.unwrap(message.body, message.headers, secret=secret)
    assert (event.object, event.id) == ("event", message.id) and type(event).__name__.startswith("FineTuningJob")
    return event.type, event.data.id


def test_end_of_a_job_arrives_as_the_event_that_the_client_unwraps(
    api: ApiServer,
    client: openai.OpenAI,
    jobs: Jobs,
    create: Callable[..., Any],
    shared_engine: Engine,  # noqa: F811
    receiver: Receiver,  # noqa: F811
) -> None:
    webhook, failures = create("all"), create("failures", [FAILED])
    done, failed, cancelled, resumed, paused = (jobs.create().id for _ in range(5))

    def trainer(job_id: str) -> Trainer:
        return Trainer(shared_engine, newest_run(api, job_id)["id"]).begin()

    trainer(done).complete()
    trainer(failed).fail()
    client.fine_tuning.jobs.cancel(cancelled)
    for job_id in (resumed, paused):
        client.fine_tuning.jobs.pause(job_id)
    client.fine_tuning.jobs.resume(resumed)
    trainer(resumed).complete()
    client.fine_tuning.jobs.cancel(paused)
    expected = {
        (SUCCEEDED, done), (FAILED, failed), (CANCELLED, cancelled), (SUCCEEDED, resumed), (CANCELLED, paused),
    }  # fmt: skip
    messages = receiver.wait_for("/all", len(expected))
    events = [unwrap(client, message, webhook.signing_secret) for message in messages]
    # A job that is cancelled right after its pause may be reported twice.
    assert set(events) == expected and len(events) - events.count((CANCELLED, paused)) == len(expected) - 1
    (message,) = receiver.wait_for("/failures")
    assert unwrap(client, message, failures.signing_secret) == (FAILED, failed)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(message.body + b" ", message.headers, secret=failures.signing_secret)


def test_messages_of_native_webhooks_are_verified_by_the_client_too(
    api: ApiServer,
    client: openai.OpenAI,
    shared_engine: Engine,  # noqa: F811
    receiver: Receiver,  # noqa: F811
) -> None:
    native = api.client.post("/v1/webhooks", json={"url": f"{receiver.url}/native"}).json()
    end_run(shared_engine)
    (message,) = receiver.wait_for("/native")
    client.webhooks.verify_signature(message.body, message.headers, secret=native["secret"])
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(message.body, message.headers, secret="whsec_" + "A" * 43 + "=")


def test_runs_that_are_no_jobs_send_nothing_to_webhooks_of_openai(
    api: ApiServer,
    create: Callable[..., Any],
    shared_engine: Engine,  # noqa: F811
    receiver: Receiver,  # noqa: F811
) -> None:
    create("none")
    api.client.post("/v1/webhooks", json={"url": f"{receiver.url}/others"})
    end_run(shared_engine, task="evaluate")
    end_run(shared_engine, config={"extra": {"probe": True}})
    receiver.wait_for("/others", 2)
    assert receiver.at("/none") == []


def test_webhook_is_created_listed_changed_and_deleted(
    api: ApiServer, client: openai.OpenAI, create: Callable[..., Any]
) -> None:
    assert client.webhooks.event_types.list().data == TYPES
    first, second = create("first", [SUCCEEDED]), create("second")
    slack = api.client.post("/v1/webhooks", json={"url": "https://hooks.invalid", "format": "slack"}).json()["id"]
    assert (first.object, first.event_types, first.name) == ("webhook_endpoint", [SUCCEEDED], "first")
    assert [webhook.id for webhook in client.webhooks.list(limit=1)] == [second.id, first.id]
    assert client.webhooks.retrieve(first.id).to_dict() == {
        name: value for name, value in first.to_dict().items() if name != "signing_secret"
    }
    changed = client.webhooks.update(first.id, event_types=[FAILED], name="other")  # type: ignore[list-item]
    assert (changed.event_types, changed.name, changed.url) == ([FAILED], "other", first.url)
    assert client.webhooks.retrieve(first.id) == changed
    deleted = client.webhooks.delete(first.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (first.id, True, "webhook_endpoint.deleted")
    for unknown in (first.id, slack, "whk_none"):
        for call in (client.webhooks.retrieve, client.webhooks.delete, client.webhooks.rotate_secret):
            with pytest.raises(openai.NotFoundError, match="GET /openai/v1/webhook_endpoints") as refused:
                call(unknown)
            assert refused.value.code == "webhook_not_found"
    with client_of(api, api.key_with(["read"])) as reader:
        assert reader.webhooks.retrieve(second.id).url.endswith("/…")
        with pytest.raises(openai.PermissionDeniedError):
            reader.webhooks.delete(second.id)


def test_rotated_secret_replaces_the_former_at_once_or_after_a_day(
    client: openai.OpenAI,
    create: Callable[..., Any],
    receiver: Receiver,  # noqa: F811
    jobs: Jobs,
) -> None:
    webhook = create("rotated")

    def signed_by(secret: str, message: Message) -> bool:
        try:
            client.webhooks.verify_signature(message.body, message.headers, secret=secret)
        except openai.InvalidWebhookSignatureError:
            return False
        return True

    second = client.webhooks.rotate_secret(webhook.id).signing_secret
    client.fine_tuning.jobs.cancel(jobs.create().id)
    (message,) = receiver.wait_for("/rotated")
    assert [signed_by(secret, message) for secret in (webhook.signing_secret, second)] == [False, True]
    third = client.webhooks.rotate_secret(webhook.id, keep_old_secret_active_for_24_hours=True).signing_secret
    client.fine_tuning.jobs.cancel(jobs.create().id)
    message = receiver.wait_for("/rotated", 2)[1]
    secrets = (webhook.signing_secret, second, third)
    assert [signed_by(secret, message) for secret in secrets] == [False, True, True]


def test_test_of_a_webhook_returns_the_status_of_its_receiver(
    client: openai.OpenAI,
    create: Callable[..., Any],
    receiver: Receiver,  # noqa: F811
) -> None:
    webhook = create("tested")
    receiver.statuses["/tested"] = [200, 500]
    for status in (200, 500):
        result = client.webhooks.test(webhook.id, event_type="fine_tuning.job.failed")
        assert (result.status_code, result.success, result.event_type) == (status, True, FAILED)
        kind, job_id = unwrap(client, receiver.at("/tested")[-1], webhook.signing_secret)
        assert kind == FAILED and job_id.startswith("ftjob-")
    client.webhooks.update(webhook.id, url="https://hooks.invalid/none")
    with pytest.raises(openai.BadRequestError, match="cannot be resolved") as refused:
        client.webhooks.test(webhook.id, event_type="fine_tuning.job.failed")
    assert refused.value.code == "receiver_unreachable"


def test_webhook_whose_answer_was_lost_is_created_once_with_a_secret_that_works(
    api: ApiServer,
    client: openai.OpenAI,
    receiver: Receiver,  # noqa: F811
) -> None:
    with losing_answers(api, "cut") as (proxy, url), client_of(api, url=url) as losing:
        webhook = losing.webhooks.create(name="lost", url=f"{receiver.url}/lost", event_types=TYPES)
    assert proxy.answers_lost == 1 and [listed.id for listed in client.webhooks.list()] == [webhook.id]
    client.webhooks.test(webhook.id, event_type="fine_tuning.job.succeeded")
    unwrap(client, receiver.at("/lost")[-1], webhook.signing_secret)


def test_retry_that_finds_a_webhook_in_use_leaves_its_secret_valid(
    client: openai.OpenAI,
    jobs: Jobs,
    create: Callable[..., Any],
    receiver: Receiver,  # noqa: F811
) -> None:
    webhook, headers = create("used"), {"x-stainless-retry-count": "1"}
    url = f"{receiver.url}/used"
    again = client.webhooks.create(name="used", url=url, event_types=TYPES, extra_headers=headers)
    assert again.id == webhook.id and again.signing_secret != webhook.signing_secret
    job_id = jobs.create().id
    client.fine_tuning.jobs.cancel(job_id)
    (message,) = receiver.wait_for("/used")
    for secret in (webhook.signing_secret, again.signing_secret):
        assert unwrap(client, message, secret) == (CANCELLED, job_id)


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"event_types": ["batch.completed"]}, "event_types.0", "literal_error"),
        ({"event_types": []}, "event_types", "too_short"),
        ({"url": "https://10.0.0.1"}, "url", "private_address"),
        ({"name": ""}, "name", "string_too_short"),
        ({"format": "slack"}, "format", "extra_forbidden"),
    ],
)
def test_webhook_that_could_not_work_is_refused_by_parameter(
    client: openai.OpenAI, changes: dict[str, Any], param: str, code: str
) -> None:
    body = {"name": "x", "url": "https://hooks.invalid", "event_types": TYPES, **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/webhook_endpoints", cast_to=object, body=body)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("body", "types"),
    [({}, TYPES), ({"types": [FAILED]}, [FAILED]), ({"types": ["end"]}, None), ({"format": "slack"}, ["end"])],
)
def test_native_webhook_of_the_format_openai_has_types_of_its_own(
    api: ApiServer, body: dict[str, Any], types: list[str] | None
) -> None:
    answer = api.client.post("/v1/webhooks", json={"url": "https://hooks.invalid", "format": "openai", **body})
    if types is None:
        (error,) = answer.json()["errors"]
        assert (error["field"], error["code"]) == ("types", "conflict") and SUCCEEDED in error["message"]
        return
    assert answer.json()["types"] == types
    path = answer.headers["location"]
    other = api.client.patch(path, json={"format": "standard" if types != ["end"] else "openai"})
    assert other.json()["errors"][0]["field"] == "types"


def test_program_of_the_guide_creates_a_webhook_and_unwraps_its_event(
    api: ApiServer,
    client: openai.OpenAI,
    jobs: Jobs,
    shared_engine: Engine,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    namespace: dict[str, Any] = {"client": client}
    exec(PROGRAMS[1].replace("https://hooks.example.com/openai", f"{receiver.url}/guide"), namespace)
    run_id = newest_run(api, jobs.create().id)["id"]
    Trainer(shared_engine, run_id).begin().complete()
    (message,) = receiver.wait_for("/guide")
    namespace["receive"](message.body, message.headers)
    assert capsys.readouterr().out.splitlines()[-1] == run_id


async def test_asynchronous_client_creates_and_unwraps(
    api: ApiServer,
    receiver: Receiver,  # noqa: F811
) -> None:
    async with async_client_of(api) as client:
        webhook = await client.webhooks.create(name="async", url=f"{receiver.url}/async", event_types=TYPES)
        await client.webhooks.test(webhook.id, event_type="fine_tuning.job.cancelled")
        (message,) = receiver.at("/async")
        event: Any = client.webhooks.unwrap(message.body, message.headers, secret=webhook.signing_secret)
    assert event.type == CANCELLED
