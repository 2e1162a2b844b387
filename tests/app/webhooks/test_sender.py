"""Sender: each delivery arrives at least once, signed, under one id, whatever its receiver and the processes do."""

import asyncio
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from app.config import Settings
from app.infra import guarded_http
from app.infra.db import async_engine, sync_engine
from app.tables.webhooks import Webhook
from app.webhooks import sender, service
from app.webhooks.http_post import AttemptFailed, post_message
from app.webhooks.sender import MOST_AT_A_TIME, PAUSES, WebhookSender
from tests.app.webhooks.receiver import Message, Receiver
from tests.app.webhooks.rows import add_webhook, deliveries, end_run, enqueue_tests, make_due
from tests.certificates import write_certificate
from tests.server import ApiServer, ProcessServer
from tests.waiting import eventually


def create(api: ApiServer, url: str, **values: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/webhooks", json={"url": url, **values})
    assert answer.status_code == 201, answer.text
    webhook: dict[str, Any] = answer.json()
    return webhook


def verify(message: Message, secret: str) -> Any:
    return Verifier(secret).verify(message.body, message.headers)


def recorded(engine: Engine, webhook_id: str, attempts: int, response_status: int = 200) -> Any:
    """Wait until the first delivery has this result of so many attempts, and return it."""

    def find() -> Any:
        rows = deliveries(engine, webhook_id)
        return rows[0] if rows and (rows[0].attempts, rows[0].response_status) == (attempts, response_status) else None

    return eventually(find, what=f"the result of attempt {attempts}")


@pytest.fixture
def webhook(shared_api: ApiServer, shared_engine: Engine, receiver: Receiver, request: Any) -> Iterator[dict[str, Any]]:
    """A webhook for runs with the test's tag, whose path is the test's name."""
    name = request.node.originalname
    yield create(shared_api, f"{receiver.url}/{name}", filter={"tag": name[:200]})


def test_end_of_a_run_arrives_as_standard_webhooks_specify(
    webhook: dict[str, Any], shared_engine: Engine, receiver: Receiver, request: Any
) -> None:
    run_id = end_run(shared_engine, name="rank 8", tags=[request.node.originalname])
    (message,) = receiver.wait_for(f"/{request.node.originalname}")
    assert verify(message, webhook["secret"]) == message.json
    assert message.headers["user-agent"] == "Anneal"
    assert message.json["type"] == "end" and message.json["timestamp"].endswith("Z")
    data = message.json["data"]
    assert (data["run_id"], data["seq"], data["status"]) == (run_id, 3, "cancelled")
    assert (data["run"]["name"], data["run"]["error_code"]) == ("rank 8", None)
    with pytest.raises(WebhookVerificationError):
        verify(message._replace(body=message.body + b" "), webhook["secret"])
    delivery = recorded(shared_engine, webhook["id"], 1)
    assert (delivery.id, delivery.status, delivery.next_attempt_at) == (message.id, "delivered", None)


def test_failed_attempts_are_repeated_under_one_id_until_the_receiver_accepts(
    webhook: dict[str, Any], shared_api: ApiServer, shared_engine: Engine, receiver: Receiver, request: Any
) -> None:
    path = f"/{request.node.originalname}"
    receiver.statuses[path] = [500, 302, 400]
    end_run(shared_engine, tags=[path[1:]])
    for attempt, (status, pause) in enumerate(zip((500, 302, 400), PAUSES, strict=False), 1):
        delivery = recorded(shared_engine, webhook["id"], attempt, status)
        with shared_engine.connect() as connection:
            waits = (delivery.next_attempt_at - connection.scalar(text("SELECT clock_timestamp()"))).total_seconds()
        assert pause - 4 < waits <= pause * 1.1
        assert str(status) in shared_api.client.get(f"/v1/webhooks/{webhook['id']}").json()["last_error"]
        make_due(shared_engine, webhook["id"])
    delivery = recorded(shared_engine, webhook["id"], 4)
    messages = receiver.at(path)
    assert {message.id for message in messages} == {delivery.id} and len({message.body for message in messages}) == 1
    assert receiver.at("/redirected") == []
    assert all(verify(message, webhook["secret"]) for message in messages)
    view = shared_api.client.get(f"/v1/webhooks/{webhook['id']}").json()
    assert (view["failing_since"], view["last_error"]) == (None, None)


def count_outcomes(api: ApiServer) -> Counter[str]:
    """Return how many attempts the API has made, by outcome."""
    lines = re.findall(r'^anneal_webhook_attempts_total{outcome="(\w+)"} (\S+)$', api.client.get("/metrics").text, re.M)
    return Counter({outcome: int(float(count)) for outcome, count in lines})


def test_delivery_fails_after_the_attempts_of_31_hours_and_can_be_sent_again(
    webhook: dict[str, Any], shared_api: ApiServer, shared_engine: Engine, receiver: Receiver, request: Any
) -> None:
    assert 31 * 3600 <= sum(PAUSES) < 32 * 3600
    before = count_outcomes(shared_api)
    path = f"/{request.node.originalname}"
    receiver.statuses[path] = [503, 503]
    end_run(shared_engine, tags=[path[1:]])
    recorded(shared_engine, webhook["id"], 1, 503)
    make_due(shared_engine, webhook["id"], attempts=len(PAUSES))
    delivery = recorded(shared_engine, webhook["id"], len(PAUSES) + 1, 503)
    assert shared_api.client.get(f"/v1/webhooks/{webhook['id']}").json()["failing_since"] is not None
    address = f"/v1/webhooks/{webhook['id']}/deliveries"
    (listed,) = shared_api.client.get(address, params={"status": "failed"}).json()["data"]
    assert (listed["id"], listed["error"]) == (delivery.id, "127.0.0.1 answered with status 503.")
    assert shared_api.client.post(f"{address}/{delivery.id}/redeliver").status_code == 202
    recorded(shared_engine, webhook["id"], 1)
    assert [message.id for message in receiver.at(path)] == [delivery.id] * 3
    assert set(count_outcomes(shared_api) - before) == {"retried", "failed", "delivered"}


def test_slow_receiver_gets_few_messages_at_a_time_and_delays_no_other(
    webhook: dict[str, Any], shared_api: ApiServer, shared_engine: Engine, receiver: Receiver, request: Any
) -> None:
    path = f"/{request.node.originalname}"
    go_on = receiver.held[path] = threading.Event()
    other = create(shared_api, f"{receiver.url}/quick", filter={"tag": "quick"})
    for _ in range(MOST_AT_A_TIME + 3):
        end_run(shared_engine, tags=[path[1:]])
    receiver.wait_for(path, MOST_AT_A_TIME)
    end_run(shared_engine, tags=["quick"])
    recorded(shared_engine, other["id"], 1)
    assert len(receiver.at(path)) == MOST_AT_A_TIME
    go_on.set()
    assert len({message.id for message in receiver.wait_for(path, MOST_AT_A_TIME + 3)}) == MOST_AT_A_TIME + 3


def test_after_a_rotation_both_secrets_verify_for_a_day(
    webhook: dict[str, Any], shared_api: ApiServer, shared_engine: Engine, receiver: Receiver, request: Any
) -> None:
    path = f"/{request.node.originalname}"
    *lost, new = (shared_api.client.post(f"/v1/webhooks/{webhook['id']}/rotate").json()["secret"] for _ in range(3))
    assert len({webhook["secret"], *lost, new}) == 4
    end_run(shared_engine, tags=[path[1:]])
    message = receiver.wait_for(path)[0]
    assert verify(message, webhook["secret"]) and verify(message, new)
    with shared_engine.begin() as connection:
        connection.execute(
            update(Webhook).where(Webhook.id == webhook["id"]).values(previous_secret_until=text("now()"))
        )
    end_run(shared_engine, tags=[path[1:]])
    message = receiver.wait_for(path, 2)[1]
    assert verify(message, new)
    with pytest.raises(WebhookVerificationError):
        verify(message, webhook["secret"])


def test_slack_gets_a_sentence_that_mentions_nobody(
    shared_api: ApiServer, shared_engine: Engine, receiver: Receiver
) -> None:
    create(shared_api, f"{receiver.url}/slack", format="slack", filter={"tag": "slack"})
    run_id = end_run(shared_engine, name="<!channel> & @all", tags=["slack"])
    (message,) = receiver.wait_for("/slack")
    assert message.json == {"text": f"Run *&lt;!channel&gt; &amp; @\u200ball* ({run_id}) cancelled"}


def test_test_message_is_tried_once(shared_api: ApiServer, shared_engine: Engine, receiver: Receiver) -> None:
    webhook = create(shared_api, f"{receiver.url}/tested")
    receiver.statuses["/tested"] = [404]
    for status in ("failed", "delivered"):
        answer = shared_api.client.post(f"/v1/webhooks/{webhook['id']}/test")
        assert (answer.status_code, answer.json()["status"]) == (202, "pending")
        ended = eventually(lambda at=answer.headers["location"]: _ended(shared_api, at))
        assert (ended["type"], ended["status"], ended["attempts"]) == ("test", status, 1)
    assert verify(receiver.at("/tested")[1], webhook["secret"])["data"] == {"message": "A test of this webhook."}


def _ended(api: ApiServer, path: str) -> Any:
    delivery = api.client.get(path).json()
    return delivery if delivery["finished_at"] else None


async def test_several_senders_send_each_delivery_once_and_that_of_a_dead_one_again(
    settings: Settings, engine: Engine, receiver: Receiver
) -> None:
    settings = settings.model_copy(update={"webhook_private_hosts": "127.0.0.1"})
    webhook_id = add_webhook(engine, url=f"{receiver.url}/shared")
    _seal(settings, engine, webhook_id)
    enqueue_tests(engine, webhook_id, 30)
    with engine.begin() as connection:
        # As a sender has left it that died in its attempt.
        connection.execute(text("UPDATE webhook_deliveries SET attempts = 1 WHERE id LIKE '%1'"))
    engines = [async_engine(settings.database_url or "", pool_size=1) for _ in range(3)]
    senders = [WebhookSender(engine, settings) for engine in engines]
    await asyncio.gather(*(sender.start() for sender in senders))
    await asyncio.to_thread(receiver.wait_for, "/shared", 30)
    await asyncio.to_thread(eventually, lambda: {row.status for row in deliveries(engine, webhook_id)} == {"delivered"})
    for webhook_sender, used in zip(senders, engines, strict=True):
        await webhook_sender.stop()
        await used.dispose()
    assert len(receiver.at("/shared")) == len({message.id for message in receiver.at("/shared")}) == 30


async def test_deletion_of_a_webhook_waits_for_no_delivery_and_all_are_deleted_in_batches(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, other = add_webhook(engine), add_webhook(engine, enabled=False)
    enqueue_tests(engine, deleted, 5)
    enqueue_tests(engine, other, 5)
    own = async_engine(settings.database_url or "", pool_size=1)
    with engine.begin() as sending:
        sending.execute(text("SELECT id FROM webhook_deliveries FOR UPDATE"))
        async with AsyncSession(own) as session, session.begin():
            await service.delete_webhook(session, deleted)
    assert len(deliveries(engine, deleted)) == 5
    monkeypatch.setattr(sender, "_PRUNED_AT_ONCE", 2)
    pruning = WebhookSender(own, settings)
    await pruning.start()
    await asyncio.to_thread(eventually, lambda: not deliveries(engine, deleted), what="they are deleted")
    await pruning.stop()
    await own.dispose()
    assert len(deliveries(engine, other)) == 5


def _seal(settings: Settings, engine: Engine, webhook_id: str) -> None:
    from app.secrets import store

    with engine.begin() as connection:
        keyring = store.encryption_keyring(connection, settings)
        connection.execute(store.put_secret(keyring, f"webhook:{webhook_id}", "whsec_" + "A" * 40, None))


def test_api_that_is_killed_between_commit_and_sending_loses_nothing(settings: Settings, receiver: Receiver) -> None:
    settings = settings.model_copy(update={"webhook_private_hosts": "127.0.0.1"})
    engine = sync_engine(settings.database_url or "")
    api = ProcessServer(settings)
    go_on = receiver.held["/killed"] = threading.Event()
    with api:
        webhook = create(api, f"{receiver.url}/killed")
        under_way = end_run(engine)
        receiver.wait_for("/killed")
        api.kill()
        go_on.set()
        committed = end_run(engine)
        api.start()
        first, second = receiver.wait_for("/killed", 2)
        assert second.json["data"]["run_id"] == committed, "it had no number yet"
        make_due(engine, webhook["id"])  # instead of waiting for 60 s
        again = receiver.wait_for("/killed", 3)[-1]
        if again.id == second.id:  # its result was not stored yet
            again = receiver.wait_for("/killed", 4)[-1]
        assert (again.id, again.body) == (first.id, first.body) and again.json["data"]["run_id"] == under_way
        eventually(lambda: {row.status for row in deliveries(engine, webhook["id"])} == {"delivered"})
    engine.dispose()


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers about `rebound.example` with a public address, and with one of this machine from the second time on."""
    real, lookups, connect = socket.getaddrinfo, [], anyio.connect_tcp

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("rebound.example", b"rebound.example"):
            return real(host, port, *args, **kwargs)
        lookups.append("lookup")
        return real("8.8.8.8" if len(lookups) == 1 else "127.0.0.1", port, *args, **kwargs)

    async def connect_tcp(remote_host: str, *args: Any, **kwargs: Any) -> Any:
        lookups.append(remote_host)
        if remote_host == "8.8.8.8":
            raise OSError("no way out of here")
        return await connect(remote_host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(anyio, "connect_tcp", connect_tcp)
    return lookups


async def test_name_is_resolved_once_for_an_attempt_and_private_addresses_are_not_called(lookups: list[str]) -> None:
    with pytest.raises(AttemptFailed, match="could not be reached"):
        await post_message("https://rebound.example/hook", {}, b"{}", frozenset())
    assert lookups == ["lookup", "8.8.8.8"]
    with pytest.raises(AttemptFailed, match=r"has a private network address.*ANNEAL_WEBHOOK_PRIVATE_HOSTS"):
        await post_message("https://rebound.example/hook", {}, b"{}", frozenset())
    assert lookups == ["lookup", "8.8.8.8", "lookup"]


@pytest.mark.parametrize("certified", ["hooks.example", "others.example"])
async def test_receiver_at_the_checked_address_must_have_the_certificate_of_the_name(
    certified: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = write_certificate(tmp_path / "certificate.pem", certified)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=certificate)
    server.load_cert_chain(certificate)
    connect, resolve = anyio.connect_tcp, socket.getaddrinfo

    async def connect_tcp(remote_host: str, remote_port: int, **kwargs: Any) -> Any:
        assert remote_host == "8.8.8.8"
        return await connect("127.0.0.1", remote_port, **kwargs)

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve("8.8.8.8" if host in ("hooks.example", b"hooks.example") else host, *args, **kwargs)

    monkeypatch.setattr(anyio, "connect_tcp", connect_tcp)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(guarded_http, "tls_context", lambda: client)
    with Receiver() as receiver:
        receiver.socket = server.wrap_socket(receiver.socket, server_side=True)
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        sending = post_message(f"https://hooks.example:{receiver.server_port}/tls", {}, b"{}", frozenset())
        if certified == "hooks.example":
            assert await sending == 200
        else:
            with pytest.raises(AttemptFailed, match="certificate verify failed"):
                await sending
        receiver.shutdown()
        thread.join()
    hosts = [message.headers["host"] for message in receiver.at("/tls")]
    assert hosts == [f"hooks.example:{receiver.server_port}"] * (certified == "hooks.example")


async def test_host_that_the_operator_no_longer_allows_gets_nothing(receiver: Receiver) -> None:
    with pytest.raises(AttemptFailed, match="not encrypted"):
        await post_message(f"{receiver.url}/forbidden", {}, b"{}", frozenset())
    with pytest.raises(AttemptFailed, match="private network"):
        await post_message(f"{receiver.url.replace('http:', 'https:')}/forbidden", {}, b"{}", frozenset())
    assert receiver.at("/forbidden") == []
