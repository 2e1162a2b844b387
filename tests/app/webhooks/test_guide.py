"""The lines of docs/guides/webhooks.md, and the commands of `anneal webhooks`."""

import http.server
import json
import re
import shlex
import threading
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import Engine

from app.config import Settings
from tests.app.webhooks.receiver import Receiver
from tests.app.webhooks.rows import deliveries, end_run
from tests.conftest import Anneal, json_of
from tests.nodes import ROOT
from tests.ports import free_port
from tests.server import ApiServer
from tests.waiting import eventually

GUIDE = (ROOT / "docs" / "guides" / "webhooks.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
LINES = [line.removeprefix("anneal ") for kind, block in BLOCKS if not kind for line in block.splitlines()]


def block_of(kind: str) -> str:
    (block,) = [block for block_kind, block in BLOCKS if block_kind == kind]
    return block


def test_every_command_of_the_guide_works(
    emptied_api: ApiServer, shared_engine: Engine, receiver: Receiver, anneal: Anneal
) -> None:
    commands = [line for line in LINES if line.startswith("webhooks ")]
    assert {command.split()[1] for command in commands} == {
        "create", "test", "edit", "show", "deliveries", "redeliver"
    }  # fmt: skip
    for command in commands:
        local = re.sub(r"https://[\w.]+/(\S+)", rf"{receiver.url}/\1", command)
        if command.startswith("webhooks deliveries"):
            end_run(shared_engine, tags=["nightly"])
            webhook_id = emptied_api.client.get("/v1/webhooks").json()["data"][0]["id"]
            eventually(lambda at=webhook_id: deliveries(shared_engine, at))
        anneal(*shlex.split(local))
    names = [webhook["name"] for webhook in emptied_api.client.get("/v1/webhooks").json()["data"]]
    assert names == [f"127.0.0.1:{receiver.server_address[1]}"] * 3


def test_commands_that_the_guide_does_not_show_work_too(
    emptied_api: ApiServer, receiver: Receiver, anneal: Anneal
) -> None:
    created = json_of(anneal("webhooks", "create", f"{receiver.url}/cli", "--name", "cli", "--json"))
    assert "cli" in anneal("webhooks", "list").output
    rotated = json_of(anneal("webhooks", "rotate", created["id"][:12], "--json"))
    assert rotated["secret"] != created["secret"]
    receiver.statuses["/cli"] = [500]
    failed = anneal("webhooks", "test", "last", code=1)
    assert "answered with status 500" in failed.output
    assert json_of(anneal("webhooks", "edit", "last", "--disable", "--json"))["enabled"] is False
    assert "edit it with `--enable` first" in anneal("webhooks", "test", "last", code=1).output
    anneal("webhooks", "edit", "last", "--tag", "x", "--no-filter", code=2)
    assert json_of(anneal("webhooks", "delete", "last", "--json")) == {"id": created["id"], "deleted": True}


def test_receiver_of_the_guide_verifies_messages(
    emptied_api: ApiServer, shared_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    webhook = emptied_api.client.post("/v1/webhooks", json={"url": f"http://127.0.0.1:{port}/"}).json()
    servers: list[http.server.HTTPServer] = []

    class Server(http.server.HTTPServer):
        def serve_forever(self, poll_interval: float = 0.01) -> None:
            servers.append(self)
            super().serve_forever(poll_interval)

    monkeypatch.setattr(http.server, "HTTPServer", Server)
    program = block_of("python").replace("whsec_…", webhook["secret"]).replace("8000", str(port))
    thread = threading.Thread(target=exec, args=(program, {}))
    thread.start()
    try:
        end_run(shared_engine, name="of the guide")
        eventually(lambda: "delivered" in [row.status for row in deliveries(shared_engine, webhook["id"])])
        forged = httpx.post(f"http://127.0.0.1:{port}/", content=b"{}", headers={"webhook-id": "x"}, trust_env=False)
        assert forged.status_code >= 400
    except httpx.RemoteProtocolError:
        pass  # the receiver raises, and its server closes the connection
    finally:
        servers[0].shutdown()
        thread.join()
        servers[0].server_close()
    assert "of the guide cancelled" in capsys.readouterr().out


def test_message_of_the_guide_has_the_fields_of_a_real_one(
    emptied_api: ApiServer, shared_engine: Engine, receiver: Receiver
) -> None:
    emptied_api.client.post("/v1/webhooks", json={"url": f"{receiver.url}/fields"}).raise_for_status()
    end_run(shared_engine)
    message, documented = receiver.wait_for("/fields")[0].json, json.loads(block_of("json"))

    def fields(value: Any) -> Any:
        return {name: fields(part) for name, part in value.items()} if isinstance(value, dict) else None

    assert fields(message) == fields(documented)


def test_setting_of_the_guide_allows_its_hosts_and_what_is_no_host_is_refused() -> None:
    (line,) = [line for line in LINES if line.startswith("ANNEAL_WEBHOOK_PRIVATE_HOSTS")]
    value = shlex.split(line)[0].partition("=")[2]
    assert Settings(webhook_private_hosts=value).private_webhook_hosts == {"mattermost.internal", "10.1.2.3"}
    for wrong in ("http://mattermost.internal", "mattermost.internal:8065", "10.0.0.0/8", "a host"):
        with pytest.raises(ValidationError, match="is not a host"):
            Settings(webhook_private_hosts=wrong)
